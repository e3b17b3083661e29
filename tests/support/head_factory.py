"""Heads for tests, built from conf/head as a training run builds them, with the changes in heads.yaml; a trainer of one."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import Tensor

from foredraft.heads import Target
from foredraft.heads.base import DraftHead
from foredraft.heads.checkpoint import write_head
from foredraft.heads.eagle3 import Eagle3Head
from foredraft.heads.formats.engines import Export, export_for
from foredraft.train.data.packing import Document, Packed
from foredraft.train.data.row_order import EpochStream
from foredraft.train.losses import build, kl_div
from foredraft.train.module import DistillationModel
from foredraft.train.trainer import HeadTrainer, arguments
from tests.support import names
from tests.support.batches import packed
from tests.support.configs import composed

OVERRIDES: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("heads.yaml").read_text())
KINDS = sorted({*names("head"), *OVERRIDES})
PLAIN_KINDS = [name for name in KINDS if " " not in name]  # by day; the variants follow by night
BLOCKS = {"dflash", "dflash2", "jetspec", "dspark", "domino", "p_eagle", "xpress"}
BLOCK_KINDS = [name for name in KINDS if name.split()[0] in BLOCKS]


@cache
def settings(kind: str) -> Any:
    """Read what a run with head=kind is configured with; nobody changes it."""
    return composed("train", f"head={kind}")


def build_head(kind: str, target: Target, **overrides: Any) -> DraftHead:
    """Build the head of conf/head/<kind>.yaml with these keys changed, with the initial weights of a training run."""
    if "draft_vocab_size" in settings(kind).head:
        overrides = {"counts": torch.arange(target.vocab_size)} | overrides
    return instantiate(settings(kind).head, target=target, **overrides)


def criterion(name: str, head: DraftHead, target: Target) -> DistillationModel:
    """Build the objective with the loss of its yaml, in the middle of the training."""
    chosen = settings(OVERRIDES.get(name, {}).get("kind", name))
    made = instantiate(chosen.objective, head=head, target=target, loss=build(chosen.loss, chosen.loss_args))
    made.progress = 0.5
    return made


def new_head(name: str, target: Target, **overrides: Any) -> DraftHead:
    """Make a small head of a kind or of a variant, with the initial weights of a training run."""
    return build_head(target=target, **{"kind": name} | OVERRIDES.get(name, {}) | overrides)


def make_head(name: str, target: Target, **overrides: Any) -> DraftHead:
    """Make such a head in eval mode, with noise on its weights: a norm with weights of one, or a
    layer with weights of zero, could be left out without a trace."""
    head = new_head(name, target, **overrides)
    with torch.no_grad():
        for parameter in head.parameters():
            scale = parameter.std().clamp(min=0.1) if parameter.numel() > 1 else 1.0
            parameter.copy_(parameter + 0.3 * torch.randn_like(parameter) * scale)
    return head.eval()


def same(ours: DraftHead, theirs: DraftHead) -> bool:
    """Return whether they are one head, to the bit."""
    state, other = ours.state_dict(), theirs.state_dict()
    alike = type(ours) is type(theirs) and (ours.layers, ours.depth) == (theirs.layers, theirs.depth)
    return alike and state.keys() == other.keys() and all(torch.equal(state[name], other[name]) for name in state)


def learn(kind: str, head: DraftHead, target: Target, tokens: Tensor | None = None) -> float:
    """Train a step on these tokens (2, 48), or random ones: two documents in a row, and one before padding. Return the
    loss."""
    model = criterion(kind, head, target)
    head.on_train_begin(target)
    text = packed((20, 28), (40,), low=3, high=target.vocab_size)
    text = text if tokens is None else text._replace(tokens=tokens)
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=1e-3)
    loss = model(*text[:4], **model.prepare(text, step=0)).loss
    loss.backward()
    gradients = [weight.grad for weight in head.parameters() if weight.grad is not None]
    assert gradients and all(gradient.isfinite().all() for gradient in gradients)
    optimizer.step()
    head.on_train_end()
    head.eval()
    return loss.item()


def edit(directory: Path, change: Callable[[dict], object]) -> None:
    """Change config.json."""
    config = json.loads((directory / "config.json").read_text())
    change(config)
    (directory / "config.json").write_text(json.dumps(config))


def write_export(name: str, head: DraftHead, target: Target, directory: Path) -> Export:
    """Write a head in the layout of another engine, as scripts/export.py does."""
    export = export_for(name, head, target)
    write_head(head, directory, target, export.layout, export.layout.weight_files)
    return export


def make_trainer(target: Target, directory: Path, optim: str = "adamw", n_gpu: int = 0, **settings: Any) -> HeadTrainer:
    """Make a trainer of a small head as a run makes it. n_gpu: what transformers finds on a machine with this many."""
    settings = {"bf16": False, "optim": optim, "per_device_train_batch_size": 2, "max_steps": 1} | settings
    cfg = composed("train", f"output_dir={directory}")
    OmegaConf.set_struct(cfg, False)  # as +trainer.<name>= does
    args = arguments(OmegaConf.merge(cfg, {"trainer": settings}), target)
    args._n_gpu = n_gpu
    packed = Packed([Document(list(range(1, 200)), [True] * 199)], 16, seed=0)
    head = Eagle3Head.for_target(target, ttt_steps=2)
    return HeadTrainer(
        DistillationModel(head, target, kl_div),
        args,
        train_dataset=EpochStream(packed, 2 * args.max_steps * args.gradient_accumulation_steps, 0),
        measure=lambda head: {"acceptance_length": 1.0},
    )
