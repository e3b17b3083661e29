"""A target in pieces says what the whole one says, and teaches the same head: two real processes with gloo."""

import json
from pathlib import Path

import pytest
import torch

from heads import Target
from heads.spread import TOGETHER, arguments

from .test_engines import ONE, ROOT, SMALL, STEPS, TWO, losses, torchrun
from .test_run import end, folder, here, program  # noqa: F401 -- fixtures

WRITTEN = "written=512"


@pytest.fixture(scope="module")
def given(tiny_path: Path, folder: Path) -> list[str]:  # noqa: F811
    more = [name for name in SMALL if not name.startswith("written")]
    return [*more, WRITTEN, f"target.path={tiny_path}", f"data.path={folder}", "target.dtype=float32"]


@pytest.fixture(scope="module")
def alone(given: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    cwd = tmp_path_factory.mktemp("whole")
    ended = end(program(*given, ONE, cwd=cwd))
    assert ended.code == 0, ended.err
    return cwd / "outputs/eagle3"


@pytest.fixture(scope="module")
def together(given: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    cwd = tmp_path_factory.mktemp("pieces")
    runs = ["ddp,target.spread=fsdp", "fsdp,target.spread=tensor"]
    ended = end(torchrun(str(ROOT / "tests/engine_probe.py"), str(cwd), *runs, "--", *given, TWO, cwd=cwd))
    assert ended.code == 0, ended.err[-6000:]
    return cwd


@pytest.mark.parametrize("name", ["ddp-fsdp", "fsdp-tensor"])
def test_a_head_learns_the_same_from_a_target_in_pieces(alone: Path, together: Path, name: str):
    ours, theirs = losses(together / name), losses(alone)
    assert len(ours) == STEPS
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-3, atol=0)
    gained = [
        json.loads((place / "metrics.json").read_text())["acceptance_length"] for place in (together / name, alone)
    ]
    assert gained[0] == gained[1]


@pytest.mark.parametrize("name", ["ddp-fsdp", "fsdp-tensor"])
def test_every_process_has_a_piece_of_the_target(together: Path, tiny_path: Path, name: str):
    whole = sum(p.numel() for p in Target.from_pretrained(tiny_path, device="cpu").model.parameters())
    for rank in (0, 1):
        facts = json.loads((together / name / f"facts-{rank}.json").read_text())
        assert facts["local_target"] < 0.7 * whole  # its embedding and lm_head may stay whole


def test_layers_may_lie_on_several_devices(target: Target, tiny_path: Path, tmp_path: Path):
    """Here these are the host and its disk."""
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    places |= {f"model.layers.{i}": "disk" if i > 2 else "cpu" for i in range(target.num_layers)}
    tokens = torch.arange(12)[None]
    for how in ({"device_map": places, "offload_folder": str(tmp_path)}, {"spread": "layers"}):
        spread = Target.from_pretrained(tiny_path, dtype="float32", **how)
        ours, theirs = (t.read(tokens, layers=[1, 5]) for t in (spread, target))
        torch.testing.assert_close(ours.logits, theirs.logits)
        torch.testing.assert_close(ours.features, theirs.features)
    assert arguments(str(tiny_path), "layers", None) == {"device_map": "auto"}


@pytest.mark.parametrize(
    ("spread", "quantization", "told"),
    [
        ("layer", None, "spread=layer is not one of layers, fsdp, tensor"),
        *((name, None, f"spread={name} works in processes that torchrun starts") for name in TOGETHER),
        ("fsdp", "8bit", "spread=fsdp cuts weights that quantization=8bit has packed"),
    ],
)
def test_what_cannot_be_spread_says_why(spread, quantization, told, tiny_path: Path, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("heads.target.quantization_config", lambda *given: None)
    with pytest.raises(ValueError, match=told):
        Target.from_pretrained(tiny_path, spread=spread, quantization=quantization)
