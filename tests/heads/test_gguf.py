"""Heads in GGUF: what llama.cpp's own converter writes of them, to the byte, and what comes back.

gguf_golden.json was written by that converter (b11434), as tests/serving/llamacpp_golden.py says. What differs is left out of
it: under `general.` what the file is called and counted (name, size_label, tags), which the converter takes from the folder's
name and a model card. A third would differ for a target that the converter knows: `tokenizer.ggml.pre`, the rule by which it
splits text, is "default" in our files, since no text is split by a head's. tests/serving/test_llamacpp.py compares whole
files.
"""

import json

import gguf
import pytest
import torch

from foredraft.heads import Target, load_head, save_head
from foredraft.heads.checkpoint import read_head, write_head
from foredraft.heads.eagle3 import Eagle3Head
from foredraft.heads.formats import engines
from foredraft.heads.formats.files import read
from foredraft.heads.formats.gguf import tensors
from foredraft.heads.formats.gguf.tensors import DTYPES, FILE
from foredraft.heads.mtp import MTPHead
from foredraft.heads.target_model.logits import LogitScaling
from foredraft.scripts import export
from foredraft.train import gguf_gate, parity_gate
from tests.support import nightly_but
from tests.support.gguf_heads import EMBEDDED, GOLDEN, OUTTYPES, SMALL, contents, gguf_head, write_qwen
from tests.support.gguf_targets import write_target
from tests.support.head_factory import edit, make_head, same

FILES = json.loads(GOLDEN.read_text())
HEADS = (*SMALL, "mtp")
BY_DAY = {(name, "f32") for name in HEADS} | {(name, kind) for name in ("eagle3 pruned", "mtp") for kind in OUTTYPES}


@pytest.fixture(scope="module")
def made(embedded, tmp_path_factory):
    """Return a head by its name, and its target."""
    folder = tmp_path_factory.mktemp("qwen")
    qwen = Target.from_pretrained(write_qwen(folder), dtype="float32", device="cpu")
    return lambda name: (MTPHead.for_target(qwen), qwen) if name == "mtp" else (gguf_head(name, embedded), embedded)


def write(head, target, folder, **options):
    layout = engines.export_for("gguf", head, target, **options).layout
    write_head(head, folder, target, layout, layout.weight_files)
    return layout


@pytest.mark.parametrize(("name", "outtype"), nightly_but([(n, kind) for n in HEADS for kind in OUTTYPES], *BY_DAY))
def test_keys_and_tensors_are_those_of_the_converter(made, tmp_path, name, outtype):
    write(*made(name), tmp_path, dtype={kind.lower(): dtype for dtype, kind in DTYPES.items()}[outtype])
    ours, theirs = contents(tmp_path / FILE), FILES[f"{name} {outtype}"]
    assert ours["keys"] == theirs["keys"]
    assert ours["tensors"] == theirs["tensors"]
    assert list(ours["tensors"]) == list(theirs["tensors"])


@pytest.mark.parametrize("name", HEADS)
def test_what_comes_back_is_equal_to_the_bit(made, tmp_path, name):
    head, target = made(name)
    layout = write(head, target, tmp_path, dtype="float32")
    assert same(layout.stored(head, target), head)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", FILE}
    again = read_head(tmp_path, target)
    assert same(again, head)


@pytest.mark.parametrize("name", ["eagle3 pruned", "mtp"])
@pytest.mark.parametrize("dtype", [name for name in DTYPES if name != "float32"])
def test_rounded_weights_are_those_that_the_gate_is_given(made, tmp_path, name, dtype):
    head, target = made(name)
    layout = write(head, target, tmp_path, dtype=dtype)
    rounded, again = layout.stored(head, target), read_head(tmp_path, target)
    assert same(again, rounded)
    assert torch.equal(again.norm.weight, head.norm.weight)  # norms stay unchanged
    worst = max((a - b).abs().max().item() for a, b in zip(head.parameters(), again.parameters(), strict=True))
    assert 0 < worst < 0.13  # of numbers between -1 and 1


def test_rows_that_blocks_do_not_divide_are_in_half_precision(embedded, tmp_path):
    head = make_head("dspark", embedded)  # its Markov head has rank 8
    write(head, embedded, tmp_path, dtype="q4_0")
    kinds = {name: kind for name, (kind, *_) in contents(tmp_path / FILE)["tensors"].items()}
    assert kinds["markov_w1.weight"] == "F16" and kinds["fc.weight"] == "Q4_0"


def test_a_gguf_of_the_target_gives_its_tokenizer(embedded, tmp_path):
    head = gguf_head("eagle3", embedded)
    write(head, embedded, tmp_path / "own")
    file = write_target(tmp_path / "target.gguf", embedded.vocab_size, "smollm")
    write(head, embedded, tmp_path / "copied", target_gguf=str(file))
    keys = contents(tmp_path / "copied" / FILE)["keys"]
    assert {name for name in keys if name.startswith("tokenizer.")} == {"tokenizer.ggml.pre", "tokenizer.ggml.tokens"}
    assert keys["tokenizer.ggml.pre"] == ["STRING", "smollm"]
    with pytest.raises(ValueError, match="is not a file"):
        write(head, embedded, tmp_path / "none", target_gguf=str(tmp_path / "none.gguf"))
    (tmp_path / "text.gguf").write_text("text instead of tensors")
    with pytest.raises(ValueError, match=r"text\.gguf is damaged or not a GGUF file"):
        write(head, embedded, tmp_path / "none", target_gguf=str(tmp_path / "text.gguf"))
    with pytest.raises(ValueError, match="has 7 tokens, and the target 1024"):
        write(head, embedded, tmp_path / "none", target_gguf=str(write_target(tmp_path / "other.gguf", 7)))


def test_llama3_turns_by_factors_in_the_file(embedded, tmp_path):
    head = gguf_head("eagle3", embedded)
    rope = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 256}
    head.config.rope_parameters = rope | {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    write(head, embedded, tmp_path)
    factors = next(t for t in gguf.GGUFReader(tmp_path / FILE).tensors if t.name == "rope_freqs.weight").data
    assert factors.shape == (32,) and factors[0] == pytest.approx(1) and factors[-1] == pytest.approx(8)
    edit(tmp_path, lambda config: config["foredraft"].pop("target"))  # as of another program, whose rope may differ
    with pytest.warns(UserWarning, match="rope_parameters"):
        again = read_head(tmp_path, embedded)
    assert again.config.rope_parameters["rope_type"] == "llama3"


def test_a_block_is_told_what_its_target_scales_and_caps(embedded, tmp_path, monkeypatch):
    """Check targets other than Gemma, too; llama.cpp's DFlash-2 adds scores to logits, all others only compare them."""
    rows = embedded.model.get_input_embeddings()
    monkeypatch.setattr(Target, "embed", lambda self, tokens: 8 * rows(tokens))
    monkeypatch.setattr(embedded, "scaled", LogitScaling(divisor=4.0, factor=None, cap=30.0))
    head = make_head("dflash2", embedded, selector_top_k=13)
    write(head, embedded, tmp_path)
    keys = contents(tmp_path / FILE)["keys"]
    names = "embedding_scale", "logit_scale", "final_logit_softcapping"
    assert [keys[f"dflash.{name}"][1] for name in names] == pytest.approx([8.0, 0.25, 30.0])
    monkeypatch.setattr(Target, "embed", lambda self, tokens: rows(tokens) + 1)
    with pytest.raises(ValueError, match=r"llama.cpp can only scale rows of the target's embedding, and .* does more"):
        engines.export_for("gguf", head, embedded)


REFUSED = [
    ("medusa", {}, "llama.cpp does not support medusa heads: it loads EAGLE-3, DFlash"),
    ("mtp", {}, "of Qwen3.5, .* belongs to a target of type llama, without these: train head=eagle3"),
    ("eagle3_1", {}, "llama.cpp does not support fc_norm, norm_output"),
    ("eagle3", {"target_layer_ids": [2, 5]}, r"fuses three layers, and this head reads hidden states \[2, 5\]"),
    ("eagle3", {"target_layer_ids": [2, 5, 16]}, r"the last hidden state \(16\) before its norm"),
    ("dflash anchor first", {}, "drafts dflash in place, and this head anchor first"),
    ("dflash", {"window": 6}, r"only in its sliding layers \(head.window=6\)"),
    ("dflash2", {"selector_top_k": 16, "draft_vocab_size": None}, "at least 272, .* with head.selector_top_k=13"),
    ("dspark gated", {}, "supports DSpark heads only with head.markov_head_type=vanilla"),
]


@pytest.mark.parametrize(("kind", "changes", "message"), REFUSED)
def test_what_llama_cpp_has_no_loader_for_is_refused(embedded, kind, changes, message):
    with pytest.raises(ValueError, match=message):
        engines.export_for("gguf", make_head(kind, embedded, **changes), embedded)


def test_an_unknown_number_format_is_an_error(embedded):
    with pytest.raises(ValueError, match=r"^dtype=q9 is not one of float32, float16, bfloat16, q8_0"):
        engines.export_for("gguf", gguf_head("eagle3", embedded), embedded, dtype="q9")


def test_other_files_are_no_head(embedded, tmp_path):
    write(gguf_head("eagle3", embedded), embedded, tmp_path)
    (tmp_path / FILE).write_bytes(b"GGUX" + bytes(100))
    with pytest.raises(ValueError, match=r"head\.gguf is damaged or not a GGUF file"):
        read(tmp_path)
    write_target(tmp_path / FILE, 7)
    with pytest.raises(ValueError, match="is not a head but a model of architecture llama"):
        read(tmp_path)


def test_the_gate_sees_another_order_of_rows(embedded, tmp_path, monkeypatch):
    """Check that a head of real sizes passes; with rows as transformers orders them it does not."""
    head = Eagle3Head.for_target(embedded, 3)
    write(head, embedded, tmp_path / "right", dtype="float32")
    assert parity_gate.check(head, embedded, list(range(300, 348)), saved=tmp_path / "right") < 1e-3
    monkeypatch.setattr(tensors, "interleave", lambda weight, heads: weight)
    write(head, embedded, tmp_path / "wrong", dtype="float32")
    with pytest.raises(ValueError, match="parity gate: at depth 1"):
        parity_gate.check(head, embedded, list(range(300, 348)), saved=tmp_path / "wrong")


def test_parity_names_the_first_place_where_llama_cpp_differs(embedded, tmp_path, monkeypatch):
    save_head(gguf_head("eagle3", embedded), tmp_path / "head", embedded)
    head, prompts = load_head(tmp_path / "head", embedded), [[7, 8, 9], [30, 40]]
    ours = [gguf_gate.decode_here(head, embedded, row, 3, 8) for row in prompts]
    given = tmp_path / "head", embedded, write_target(tmp_path / "target.gguf", 7), prompts, 8

    def compared(**changes) -> str:
        monkeypatch.setattr(gguf_gate, "decode_llamacpp", lambda *_: [ours[0], ours[1]._replace(**changes)])
        return gguf_gate.check(*given)

    assert "every text and number of accepted drafts equal" in compared()
    for changes, message in (
        ({"tokens": [0] * 8}, "at token 0 of text 1 llama.cpp chooses 0, and we "),
        ({"accepted": 9}, "in text 1 llama.cpp accepts 9 drafts, and we "),
    ):
        with pytest.raises(ValueError, match=f"^parity gate: {message}"):
            compared(**changes)


def test_a_target_is_not_ours_to_convert(call):
    done = call(export.main, f"target={EMBEDDED}", "format=gguf", "output_dir=x")
    assert done.code == 2
    assert f"python convert_hf_to_gguf.py {EMBEDDED} --outfile TARGET.gguf" in done.err
