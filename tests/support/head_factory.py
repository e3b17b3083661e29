"""Heads for tests, built from conf/head as a training run builds them."""

from typing import Any

import torch
from hydra.utils import instantiate

from foredraft.heads import Target
from foredraft.heads.base import DraftHead
from foredraft.train.losses import build
from foredraft.train.module import DistillationModel
from tests.support import names
from tests.support.configs import composed

# What tests change in conf/head/<kind>.yaml, so that a head is small and each of its parts is in use. A kind without a line
# here is built as its yaml says. A name without a yaml is a variant: {"kind": the yaml it changes, ...}.
OVERRIDES: dict[str, dict[str, Any]] = {
    "domino": {"block_size": 4, "num_hidden_layers": 2, "emb_dim": 8, "gru_hidden_dim": 12},
    "domino in place": {
        "kind": "domino",
        "block_size": 4,
        "num_hidden_layers": 1,
        "sample_from_anchor": False,
        "emb_dim": 8,
    },
    "dspark": {"block_size": 3, "num_hidden_layers": 2, "markov_rank": 8},
    "dflash pruned": {"kind": "dflash", "block_size": 4, "num_hidden_layers": 1, "draft_vocab_size": 200},
    "dspark pruned": {
        "kind": "dspark",
        "block_size": 3,
        "num_hidden_layers": 1,
        "markov_rank": 8,
        "draft_vocab_size": 200,
    },
    "dspark gated": {
        "kind": "dspark",
        "block_size": 3,
        "num_hidden_layers": 1,
        "markov_rank": 8,
        "markov_head_type": "gated",
    },
    "dspark rnn": {
        "kind": "dspark",
        "block_size": 3,
        "num_hidden_layers": 1,
        "markov_rank": 8,
        "markov_head_type": "rnn",
    },
    "dflash": {"block_size": 4, "num_hidden_layers": 2},
    "dflash2": {
        "block_size": 4,
        "num_hidden_layers": 2,
        "conv_group_size": 8,
        "selector_rank": 6,
        "selector_top_k": 120,
        "draft_vocab_size": 200,
    },
    "dflash anchor first": {
        "kind": "dflash",
        "block_size": 3,
        "num_hidden_layers": 3,
        "sample_from_anchor": True,
        "window": 6,
    },
    "eagle": {"bias": True},
    "eagle3": {"draft_vocab_size": 200},
    "eagle3_1": {"draft_vocab_size": None},
    "eagle3 qk_norm": {"kind": "eagle3", "ttt_steps": 3, "draft_vocab_size": 200, "qk_norm": True},
    "hydra": {"num_heads": 3, "dropout": 0.1, "draft_vocab_size": 150},
    "hydra_pp": {"num_heads": 3, "mlp_layers": 3, "dropout": 0.1, "draft_vocab_size": 150},
    "jetspec": {"block_size": 5, "num_hidden_layers": 2},
    "medusa": {"num_heads": 3, "blocks": 2, "draft_vocab_size": 250},
    "p_eagle": {"num_depths": 4, "num_hidden_layers": 2, "draft_vocab_size": 200},
    "xpress": {"block_size": 4, "num_hidden_layers": 2, "xpress_rank": 6, "xpress_mlp_hidden": 12},
    "xpress pruned, anchor first": {
        "kind": "xpress",
        "block_size": 3,
        "num_hidden_layers": 1,
        "xpress_rank": 6,
        "xpress_mlp_hidden": 18,
        "sample_from_anchor": True,
        "draft_vocab_size": 200,
    },
    "eagle3 full vocabulary": {"kind": "eagle3", "draft_vocab_size": None},
    "hass": {"kind": "eagle", "ttt_steps": 3},
}
KINDS = sorted({*names("head"), *OVERRIDES})
BLOCK_KINDS = [
    name
    for name in KINDS
    if name.split()[0] in ("dflash", "dflash2", "jetspec", "dspark", "domino", "p_eagle", "xpress")
]


def build_head(kind: str, target: Target, **overrides: Any) -> DraftHead:
    """Build the head of conf/head/<kind>.yaml with these keys changed, with the initial weights of a training run."""
    settings = composed("train", f"head={kind}").head
    if "draft_vocab_size" in settings:
        overrides = {"counts": torch.arange(target.vocab_size)} | overrides
    return instantiate(settings, target=target, **overrides)


def criterion(name: str, head: DraftHead, target: Target) -> DistillationModel:
    """Build the objective with the loss of its yaml, in the middle of the training."""
    settings = composed("train", f"head={OVERRIDES.get(name, {}).get('kind', name)}")
    made = instantiate(settings.objective, head=head, target=target, loss=build(settings.loss, settings.loss_args))
    made.progress = 0.5
    return made


def make_head(name: str, target: Target, **overrides: Any) -> DraftHead:
    """Make a head of a kind or of a variant, in eval mode, with noise on its weights: a norm with weights of one, or a
    layer with weights of zero, could be left out without a trace."""
    settings = {"kind": name} | OVERRIDES.get(name, {}) | overrides
    head = build_head(target=target, **settings)
    with torch.no_grad():
        for parameter in head.parameters():
            scale = parameter.std().clamp(min=0.1) if parameter.numel() > 1 else 1.0
            parameter.copy_(parameter + 0.3 * torch.randn_like(parameter) * scale)
    return head.eval()
