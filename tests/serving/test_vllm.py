"""Check the files that we ship with an engine that others wrote, which drafts with heads that were trained here.

    bash scripts/vllm_env.sh && python -m pytest -m serving tests/serving

FOREDRAFT_VLLM_ENV names the environment (default .venv-vllm). FOREDRAFT_SERVING_HEADS names a folder with trained heads of
the test model, <kind>/head each; without it some are trained here for a few minutes.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from foredraft.heads import Target, load_head
from foredraft.heads.base import BlockHead, DraftHead, PackedBatch, ParallelHead
from foredraft.heads.target_model.resolve_path import resolve_path
from foredraft.inference.drafters import drafter_for
from foredraft.inference.evaluation.measure import run
from tests.serving.conftest import DEPTH, EMBEDDED, NEW_TOKENS, SMOLLM2, call, chat_prompts, train_heads
from tests.support import ROOT

pytestmark = [pytest.mark.serving, pytest.mark.timeout(7200)]  # its heads are trained first

HERE = Path(__file__).resolve().parent
PYTHON = Path(os.environ.get("FOREDRAFT_VLLM_ENV", ROOT / ".venv-vllm")) / "bin" / "python"
# DSpark and DFlash-2 need vLLM's second model runner, which its build for a CPU has not.
KINDS = ("eagle3", "eagle", "medusa", "dflash", "jetspec", "p_eagle")


@pytest.fixture(scope="session", autouse=True)
def environment() -> None:
    if not PYTHON.is_file():
        pytest.fail(f"{PYTHON} is not there: bash scripts/vllm_env.sh makes it")


@pytest.fixture(scope="session")
def heads(tmp_path_factory) -> Path:
    return train_heads(tmp_path_factory.mktemp, 60, {kind: [] for kind in KINDS})


def decode(
    folder: Path, rows: list[list[int]], speculative: dict[str, Any] | None, target: Path = EMBEDDED
) -> dict[str, Any]:
    """Return what vLLM writes and counts."""
    folder.mkdir(parents=True, exist_ok=True)
    job = {"target": str(target), "speculative": speculative, "prompts": rows, "new_tokens": NEW_TOKENS}
    (folder / "job.json").write_text(json.dumps(job | {"output": str(folder / "out.json")}))
    call(PYTHON, HERE / "engine.py", folder / "job.json")
    return json.loads((folder / "out.json").read_text())


@pytest.fixture(scope="session")
def plain(rows, tmp_path_factory) -> list[list[int]]:
    return decode(tmp_path_factory.mktemp("plain"), rows, None)["texts"]


def export(heads: Path, kind: str, name: str, folder: Path) -> Path:
    where = ("checkpoint=" + str(heads / kind / "head"), f"format={name}", f"output_dir={folder / 'export'}")
    call(sys.executable, "scripts/export.py", *where, f"target.path={EMBEDDED}")
    return folder / "export"


def chain(head: DraftHead, target: Target, rows: list[list[int]], depth: int) -> tuple[list[list[int]], list[float]]:
    """Return our own texts, and the share of steps that accept d drafts of a chain, d = 1 .. depth."""
    if isinstance(head, ParallelHead):
        drafter = drafter_for(head, target, accuracies=[[1.0]] * depth, nodes=depth + 1)
    else:
        drafter = drafter_for(head, target, width=1, depth=depth, nodes=depth + 1, min_probability=0)
    out = run(target, drafter, rows, max_new_tokens=NEW_TOKENS, eos_token_id=-1)
    accepted = [count for generation in out for step in generation.steps for count in step.accepted]
    shares = [sum(count >= d for count in accepted) / len(accepted) for d in range(1, depth + 1)]
    return [row for generation in out for row in generation.new_tokens], shares


@pytest.mark.parametrize(
    ("kind", "name", "method"),
    [
        ("eagle3", "vllm", "eagle3"),
        ("eagle3", "speculators", "eagle3"),
        ("eagle", "vllm", "eagle"),
        ("dflash", "vllm", "dflash"),
        ("dflash", "speculators", "dflash"),
        ("jetspec", "vllm", "dflash"),
        ("p_eagle", "vllm", "eagle3"),
        ("p_eagle", "speculators", "eagle3"),
    ],
)
def test_the_engine_accepts_what_we_predict(heads, embedded, rows, plain, tmp_path, kind, name, method):
    compare(export(heads, kind, name, tmp_path), embedded, rows, plain, tmp_path, method)


@pytest.mark.parametrize("name", ["vllm", "speculators"])
def test_the_engine_reads_the_window_of_a_head(heads, embedded, rows, plain, tmp_path, name):
    """Use a window that is shorter than the prompts."""
    exported = export(heads, "eagle3", name, tmp_path)
    config = json.loads((exported / "config.json").read_text())
    layer = config.get("transformer_layer_config", config)
    assert layer["layer_types"] == ["sliding_attention"] and layer["sliding_window"] > 16
    layer["sliding_window"] = 16
    (exported / "config.json").write_text(json.dumps(config))
    assert load_head(exported, embedded, dtype=torch.float32).window == 16
    compare(exported, embedded, rows, plain, tmp_path, "eagle3")


def compare(
    exported: Path, embedded: Target, rows: list[list[int]], plain: list[list[int]], tmp_path: Path, method: str
) -> None:
    """Check that the engine writes the target's text, and accepts as many drafts at each position as we do."""
    head = load_head(exported, embedded, dtype=torch.float32)
    # Of a block all: the slots of a shorter one would see fewer of the others.
    depth = head.depth if isinstance(head, BlockHead) else DEPTH
    speculative = {"method": method, "model": str(exported), "num_speculative_tokens": depth}
    out = decode(tmp_path, rows, speculative | ({"parallel_drafting": True} if head.kind == "p_eagle" else {}))
    assert out["texts"] == plain
    drafts = out["counted"]["drafts"]
    theirs = [count / drafts for count in out["counted"]["accepted_tokens_per_pos"]]
    texts, ours = chain(head, embedded, rows, depth)
    print(f"{head.kind}: {drafts} drafts, accepted per position {theirs} in vLLM, {ours} here")
    assert drafts >= 1000 and texts == plain
    assert theirs == pytest.approx(ours, rel=0.05)
    assert theirs[0] > 0.02  # nothing was left out without a word


@pytest.fixture(scope="session")
def smollm2_heads(tmp_path_factory) -> dict[str, Path]:
    """Return heads of SmolLM2: the EAGLE-3 head of the repository, and a DFlash head that is trained here for a minute."""
    folder = tmp_path_factory.mktemp("smollm2")
    rows = ROOT / "scripts" / "smollm2" / "self_written.jsonl"
    data = [f"data.path={rows}", "data.tokens=0", "max_length=256"]
    steps = ["trainer.max_steps=60", "eval.steps=0", "eval.check_float32=false", "eval.final_num_prompts=2"]
    size = ["head=dflash", "head.draft_vocab_size=6144", "eval.timed_prompts=1", "eval.max_new_tokens=16"]
    call(sys.executable, "train/run.py", "target=smollm2", *data, *steps, *size, f"output_dir={folder}")
    return {"eagle3": ROOT / "scripts" / "smollm2" / "eagle3", "dflash": folder / "head"}


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_smollm2_accepts_at_the_places_where_we_do(smollm2_heads, tmp_path, kind):
    """Use a chat model of 135M parameters, in float32."""
    target, folder = (
        Target.from_pretrained(SMOLLM2, dtype="float32", device="cpu"),
        Path(resolve_path(SMOLLM2, "float32")),
    )
    head, rows = smollm2_heads[kind], chat_prompts(target)
    given = (f"checkpoint={head}", "format=vllm", f"output_dir={tmp_path / 'export'}", f"target.path={folder}")
    call(sys.executable, "scripts/export.py", *given)
    loaded = load_head(tmp_path / "export", target, dtype=torch.float32)  # as vLLM drafts
    depth = loaded.depth if isinstance(loaded, BlockHead) else DEPTH
    speculative = {"method": kind, "model": str(tmp_path / "export"), "num_speculative_tokens": depth}
    plain = decode(tmp_path / "plain", rows, None, target=folder)["texts"]
    out = decode(tmp_path / "drafted", rows, speculative, target=folder)
    drafts, theirs = out["counted"]["drafts"], out["counted"]["accepted_tokens_per_pos"]
    texts, ours = chain(loaded, target, rows, depth)
    print(f"{kind}: {drafts} drafts, accepted per position {theirs} in vLLM, {[round(x * drafts) for x in ours]} here")
    same = [a == b == c for a, b, c in zip(out["texts"], texts, plain, strict=True)]
    print(f"{sum(same)} of {len(rows)} texts are the same in vLLM, drafted and plain, and here")
    assert len(rows) >= 4 and sum(same) >= 0.9 * len(rows)  # two engines may part at a near-tie
    assert [count / drafts for count in theirs] == pytest.approx(ours, rel=0.05, abs=2 / drafts)
    assert theirs[0] > 0.02 * drafts


def test_vllm_finds_the_target_of_a_speculators_directory(heads, rows, plain, tmp_path):
    exported = export(heads, "eagle3", "speculators", tmp_path)
    out = decode(tmp_path / "found", rows[:4], None, target=exported)
    assert out["texts"] == plain[:4] and out["counted"]["drafts"] > 0


@torch.no_grad()
def test_the_speculators_package_drafts_the_same_logits(heads, embedded, rows, tmp_path):
    exported = export(heads, "eagle3", "speculators", tmp_path)
    head = load_head(exported, embedded, dtype=torch.float32)
    tokens = torch.tensor([rows[0] + rows[1][:1]])
    length = tokens.shape[1]
    positions = torch.arange(length)[None]
    text = PackedBatch(tokens, torch.ones_like(tokens).bool(), torch.zeros_like(tokens), positions)
    aux_hidden_states = embedded.forward(tokens, layers=head.layers, keep_logits=1).aux_hidden_states
    # Its position t holds the token behind, as our slot t reads it.
    behind = torch.cat([tokens[:, 1:], tokens.new_zeros(1, 1)], dim=1)
    save_file({"features": aux_hidden_states.contiguous(), "tokens": behind.contiguous()}, tmp_path / "in.safetensors")
    call(PYTHON, HERE / "speculators_logits.py", exported, tmp_path / "in.safetensors", tmp_path / "out.safetensors")
    theirs = load_file(tmp_path / "out.safetensors")
    for step, hidden in enumerate(head(aux_hidden_states, embedded.embed(tokens), text)[:DEPTH]):
        # Our slot p is of the draft that started at p - step; the last slots have no token after them.
        ours = head.logits(hidden, step + 1)[0, step : length - 1]
        torch.testing.assert_close(ours, theirs[str(step)][0, : length - 1 - step], atol=1e-3, rtol=1e-3)
