"""A training step: compiled it is the same step, and it never waits for its device."""

import contextlib
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.errors import InstantiationException
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from foredraft.heads import Target
from foredraft.heads.base import PackedBatch
from foredraft.train.module import DistillationModel, rows_at_a_time
from tests.support import nightly_but
from tests.support.batches import batch
from tests.support.head_factory import criterion, make_head, make_trainer
from tests.support.processes import SMALL, complaint


def test_logits_are_held_for_as_many_rows_as_pay():
    sizes = (300, "cpu"), (49_152, "cpu"), (128_256, "cuda"), (1 << 20, "cuda")
    assert [rows_at_a_time(vocab, device) for vocab, device in sizes] == [3495, 256, 1046, 256]


def test_a_target_that_changes_its_logits_behind_the_head_teaches_nothing(fresh: Target):
    def shift(module: Any, args: Any, output: Any) -> None:
        output.logits *= 1.5

    fresh.model.register_forward_hook(shift)
    with pytest.raises(InstantiationException, match="changes its logits after the lm_head"):
        criterion("medusa", make_head("medusa", fresh), fresh)


# Compiled


def learned(made: DistillationModel, text: PackedBatch) -> list[Tensor]:
    made.zero_grad()
    outcome = made(*text[:4], made.choose_anchors(text, 0))
    outcome.loss.backward()
    return [outcome.loss.detach(), outcome.hits, *(p.grad for p in made.head.parameters() if p.grad is not None)]


@pytest.mark.parametrize("kind", nightly_but(["eagle3", "medusa", "dflash"], "eagle3"))
def test_a_compiled_head_learns_the_same(fresh: Target, kind: str):
    made, text, graphs = criterion(kind, make_head(kind, fresh), fresh), batch(40, 25), []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    plain = learned(made, text)
    made.compile_head(backend)  # type: ignore[arg-type]
    compiled = learned(made, text)
    assert sum(node.op == "call_function" for graph in graphs for node in graph.graph.nodes) > 5
    for ours, theirs in zip(compiled, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    assert not any("_orig_mod" in name for name in made.state_dict())
    other = copy.deepcopy(made.head)  # measured by what is not compiled for the first one
    for parameter in other.parameters():
        parameter.data.zero_()
    count = len(graphs)
    torch.testing.assert_close(learned(made.with_head(other), text), learned(criterion(kind, other, fresh), text))
    assert len(graphs) == count


@pytest.mark.nightly
def test_a_compiled_run_is_resumed_and_saved(target: Target, tmp_path: Path):
    settings: dict[str, Any] = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "seed": 0}
    found = {}
    for name, backend, checkpoint in (
        ("plain", None, None),
        ("compiled", "aot_eager", None),
        ("resumed", "aot_eager", 2),
    ):
        torch.manual_seed(0)
        trainer = make_trainer(target, tmp_path / name, compile_head=backend, **settings)
        before = checkpoint and str(tmp_path / f"compiled/checkpoints/checkpoint-{checkpoint}")
        trainer.train(resume_from_checkpoint=before)
        found[name] = load_file(tmp_path / name / "checkpoints/checkpoint-4/model.safetensors")
        assert trainer.full_head().state_dict().keys() == trainer.distillation.head.state_dict().keys()
    assert found["plain"].keys() == found["compiled"].keys() and not any("_orig_mod" in n for n in found["compiled"])
    for name, tensor in found["plain"].items():
        torch.testing.assert_close(found["compiled"][name], tensor, rtol=1e-4, atol=1e-5)
        assert torch.equal(found["compiled"][name], found["resumed"][name])


def test_a_compiler_that_is_none(here, tiny_path: Path, folder: Path):
    given = [*SMALL, f"target.path={tiny_path}", f"data.path={folder}", "output_dir=out"]
    ended = here("head=medusa", *given, "trainer.compile_head=gcc")
    assert complaint(ended).startswith("trainer.compile_head=gcc is not one of ")
    ended = here("head=medusa", *given, "+trainer.torch_compile=true")
    assert "set trainer.compile_head" in complaint(ended)


# Waiting


@pytest.mark.parametrize("kind", ["eagle3", "eagle3_1", "eagle", "hydra", "medusa", "mtp"])
def test_a_batch_is_learned_without_asking_its_device(fresh: Target, kind: str, monkeypatch):
    """Use a device without numbers, on which `item`, `tolist`, `bool` and `nonzero` fail."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())  # does not support such a device
    monkeypatch.setattr("foredraft.train.module.check_logits", lambda target: None)
    head, text = make_head(kind, fresh).train(), batch(40, 25)
    made = criterion(kind, head, fresh)
    known = made.prepare(text, 0)
    assert known["multiple_documents"] and len(known["label_positions"]) == made.loss_masks(text).any(0).sum()
    elsewhere = Target(copy.deepcopy(fresh.model).to("meta"), fresh.tokenizer, "meta")
    head = head.to("meta")
    head.attach(elsewhere)
    made = criterion(kind, head, elsewhere)
    slots = known["label_positions"].to("meta")
    outcome = made(*(part.to("meta") for part in text[:4]), None, known["multiple_documents"], slots)
    outcome.loss.backward()
    assert {p.grad.device.type for p in head.parameters() if p.grad is not None} == {"meta"}


class Reads(TorchDispatchMode):
    """Count the numbers that Python asks a tensor for."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_a_batch_more_asks_for_no_more(target: Target, tmp_path: Path, monkeypatch):
    """Count what the trainer itself reads, once a step and when it logs, for any number of batches in a step; reads of the
    host's own copy of a batch are counted separately."""
    monkeypatch.setattr(DistillationModel, "prepare", lambda self, text, step: {"multiple_documents": True})
    counts = []
    for batches in (1, 3):
        settings = {"gradient_accumulation_steps": batches, "max_steps": 2, "logging_steps": 2, "save_strategy": "no"}
        trainer = make_trainer(target, tmp_path / str(batches), **settings)
        rows: Any = trainer.train_dataset
        assert rows[0]  # which shuffles them
        rows.order = rows.order.tolist()  # their order never leaves the host
        with Reads() as reads:
            trainer.train()
        counts.append(reads.count)
    assert counts[0] == counts[1]
