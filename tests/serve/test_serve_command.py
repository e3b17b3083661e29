"""`foredraft serve` as a command: what it hands over to vLLM and llama.cpp, and what it refuses."""

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
import torch
from safetensors import safe_open

from foredraft.heads import Target, save_head
from foredraft.inference.serve.address import is_loopback
from foredraft.inference.serve.other_engines import llamacpp_command, vllm_command
from foredraft.scripts.serve import reserve_event_loop_core
from tests.support.gguf_heads import EMBEDDED
from tests.support.gguf_targets import write_target
from tests.support.head_factory import make_head
from tests.support.processes import Ended, script

FAKE = """#!/bin/sh
for word in "$@"; do printf '%s\\n' "$word"; done > "$RECORD"
printf '%s' "$VLLM_API_KEY$LLAMA_API_KEY" >> "$RECORD.key"
"""


def serve(cwd: Path, *arguments: str, path: Path | None = None, **environment: str) -> Ended:
    """Serve with only the commands in `path`."""
    named = [] if any(argument.startswith("target=") for argument in arguments) else ["target=test_model"]
    return script("scripts/serve.py", *named, *arguments, cwd=cwd, PATH=str(path or cwd), **environment)


@pytest.fixture
def handed_over(tmp_path) -> Callable[..., list[str]]:
    """Return handed_over("vllm", ...), which serves by a stand-in for this command and returns the words that it is started
    with."""

    def run(command: str, *arguments: str) -> list[str]:
        fake = tmp_path / "bin" / command
        fake.parent.mkdir()
        fake.write_text(FAKE)
        fake.chmod(0o755)
        facts = [f"drafter={tmp_path / 'head'}", "port=7", "max_num_seqs=3", *arguments]
        environment = {"RECORD": str(tmp_path / "record"), "FOREDRAFT_API_KEY": " a-key\n", "TMPDIR": str(tmp_path)}
        done = serve(tmp_path, *facts, path=fake.parent, **environment)
        assert done.code == 0, done.err
        words = (tmp_path / "record").read_text().splitlines()
        assert "a-key" not in words and (tmp_path / "record.key").read_text() == "a-key"
        return words

    return run


def test_vllm_gets_the_target_and_the_exported_head(tiny_path, target, tmp_path, handed_over):
    save_head(make_head("eagle3", target), tmp_path / "head", target)
    words = handed_over("vllm", "engine=vllm", f"target={tiny_path}", "target.device=cpu", "served_model_name=tiny")
    assert words[:3] == ["serve", str(tiny_path), "--speculative-config"]
    config = json.loads(words[3])
    assert config["method"] == "eagle3" and config["num_speculative_tokens"] >= 1
    rest = dict(zip(words[4::2], words[5::2], strict=True))
    assert rest["--port"] == "7" and rest["--served-model-name"] == "tiny" and rest["--max-num-seqs"] == "3"
    assert rest["--dtype"] == "float32"
    assert json.loads((Path(config["model"]) / "config.json").read_text())["architectures"]
    with safe_open(Path(config["model"]) / "model.safetensors", "pt") as weights:
        assert any("midlayer" in name for name in weights.keys())  # noqa: SIM118  (not a dict)


def test_llamacpp_gets_the_targets_file_and_the_exported_head(tmp_path, handed_over):
    embedded = Target.from_pretrained(EMBEDDED, dtype="float32", device="cpu")
    save_head(make_head("eagle3", embedded), tmp_path / "head", embedded)
    file = write_target(tmp_path / "target.gguf", embedded.vocab_size)
    words = handed_over("llama-server", "engine=llamacpp", f"target_gguf={file}", "served_model_name=small")
    given = dict(zip(words[::2], words[1::2], strict=True))
    assert given["-m"] == str(file) and given["--spec-type"] == "draft-eagle3"
    assert given["--port"] == "7" and given["--alias"] == "small" and given["-np"] == "3"
    assert gguf.GGUFReader(given["-md"]).fields["general.architecture"].contents() == "eagle3"


def test_llamacpp_wants_the_target_in_its_own_format(target):
    with pytest.raises(ValueError, match=r"target_gguf=None is not a file: .* python convert_hf_to_gguf\.py"):
        llamacpp_command(target, None, "none", "tiny", "127.0.0.1", 8000, 4)
    command = llamacpp_command(target, __file__, "none", "tiny", "127.0.0.1", 8000, 4)
    assert command[:2] == ["-m", __file__] and "-md" not in command
    with pytest.raises(ValueError, match=r"ngram.*drafter=DIRECTORY"):
        llamacpp_command(target, __file__, "ngram", "tiny", "127.0.0.1", 8000, 4)


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["engine=vllm"], "needs the command `vllm`"),
        (["engine=vllm", "drafter.window=64"], "drafter.window=64: vLLM uses the window of a head's config.json"),
        (["engine=sglang"], "engine=sglang is not one of foredraft, vllm, llamacpp"),
        (["log_text=true"], "needs log_accepted=FILE"),
        (["max_num_seqs=0"], "max_num_seqs=0 must be at least 1"),
        (["max_waiting=-1"], "max_waiting=-1 must be at least 0"),
        (["max_num_batched_tokens=0"], "max_num_batched_tokens=0 must be at least 1"),
        (["timeout=0"], "timeout=0 must be at least 1"),
        (["port=99999"], " port=99999: "),
        (["host=0.0.0.0"], "set FOREDRAFT_API_KEY, or set insecure=true"),
        (["log_accepted=no/such/folder/log"], "log_accepted=no/such/folder/log cannot be written"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_sentence(tmp_path, arguments, sentence):
    done = serve(tmp_path, *arguments)
    assert done.code == 2 and sentence in done.err and len(done.err.strip().splitlines()) == 1


def test_an_empty_key_is_none_that_clients_need(tmp_path):
    done = serve(tmp_path, FOREDRAFT_API_KEY="\n")
    assert done.code == 2 and "FOREDRAFT_API_KEY is empty" in done.err


@pytest.mark.parametrize("host, only_here", [("localhost", True), ("127.9.9.9", True), ("::1", True), ("::", False)])
def test_addresses_of_this_machine_are_known(host, only_here):
    assert is_loopback(host) == only_here


def test_vllm_does_not_draft_with_everything(target):
    with pytest.raises(ValueError, match=r"ngram.*drafter=DIRECTORY"):
        vllm_command(target, "ngram", "tiny", "127.0.0.1", 8000, 4)
    assert "--speculative-config" not in vllm_command(target, "none", "tiny", "127.0.0.1", 8000, 4)


@pytest.mark.parametrize("cores, environment, threads", [(4, None, [3]), (1, None, [1]), (4, "4", [])])
def test_a_core_is_left_to_the_event_loop(monkeypatch, cores, environment, threads):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if environment is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", environment)
    found = list[int]()
    monkeypatch.setattr(torch, "get_num_threads", lambda: cores)
    monkeypatch.setattr(torch, "set_num_threads", found.append)
    reserve_event_loop_core()
    assert found == threads
