"""Heads for tests, built from conf/head as a training run builds them."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from torch import Tensor

from foredraft.heads import Target
from foredraft.heads.base import DraftHead, PackedBatch
from foredraft.heads.checkpoint import write_head
from foredraft.heads.formats.engines import Export, export_for
from foredraft.train.losses import build
from foredraft.train.module import DistillationModel
from tests.support import names
from tests.support.configs import composed

# What tests change in conf/head/<kind>.yaml, so that a head is small and each of its parts is in use. A kind without a line
# here is built as its yaml says. A name without a yaml is a variant: {"kind": the yaml it changes, ...}.
ONE_LAYER, TWO_LAYERS = {"num_hidden_layers": 1}, {"num_hidden_layers": 2}
DOMINO = {"kind": "domino", "block_size": 4, "emb_dim": 8}
DSPARK = {"kind": "dspark", "block_size": 3, "markov_rank": 8}
HYDRA = {"num_heads": 3, "dropout": 0.1, "draft_vocab_size": 150}
XPRESS = {"kind": "xpress", "xpress_rank": 6}
SELECTOR = {"conv_group_size": 8, "selector_rank": 6, "selector_top_k": 120, "draft_vocab_size": 200}
ANCHOR = {"block_size": 3, "sample_from_anchor": True}
OVERRIDES: dict[str, dict[str, Any]] = {
    "dflash": {"block_size": 4, **TWO_LAYERS},
    "dflash pruned": {"kind": "dflash", "block_size": 4, "draft_vocab_size": 200, **ONE_LAYER},
    "dflash anchor first": {"kind": "dflash", "num_hidden_layers": 3, "window": 6, **ANCHOR},
    "dflash2": {"block_size": 4, **TWO_LAYERS, **SELECTOR},
    "domino": {**DOMINO, **TWO_LAYERS, "gru_hidden_dim": 12},
    "domino in place": {**DOMINO, **ONE_LAYER, "sample_from_anchor": False},
    "dspark": {**DSPARK, **TWO_LAYERS},
    "dspark pruned": {**DSPARK, **ONE_LAYER, "draft_vocab_size": 200},
    "dspark gated": {**DSPARK, **ONE_LAYER, "markov_head_type": "gated"},
    "dspark rnn": {**DSPARK, **ONE_LAYER, "markov_head_type": "rnn"},
    "eagle": {"bias": True},
    "hass": {"kind": "eagle", "ttt_steps": 3},
    "eagle3": {"draft_vocab_size": 200},
    "eagle3 full vocabulary": {"kind": "eagle3", "draft_vocab_size": None},
    "eagle3 qk_norm": {"kind": "eagle3", "ttt_steps": 3, "draft_vocab_size": 200, "qk_norm": True},
    "eagle3_1": {"draft_vocab_size": None},
    "hydra": HYDRA,
    "hydra_pp": HYDRA | {"mlp_layers": 3},
    "jetspec": {"block_size": 5, **TWO_LAYERS},
    "medusa": {"num_heads": 3, "blocks": 2, "draft_vocab_size": 250},
    "p_eagle": {"num_depths": 4, "draft_vocab_size": 200, **TWO_LAYERS},
    "xpress": {**XPRESS, **TWO_LAYERS, "block_size": 4, "xpress_mlp_hidden": 12},
    "xpress pruned, anchor first": {**XPRESS, **ONE_LAYER, **ANCHOR, "xpress_mlp_hidden": 18, "draft_vocab_size": 200},
}
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
    documents = torch.tensor([[0] * 20 + [1] * 28, [0] * 40 + [-1] * 8])
    positions = torch.tensor([[*range(20), *range(28)], [*range(40), *[0] * 8]])
    tokens = torch.randint(3, target.vocab_size, (2, 48)) if tokens is None else tokens
    text = PackedBatch(tokens, documents >= 0, documents, positions)
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
