"""Build the head that a run trains: a new one, or one that was trained before."""

import inspect
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import Tensor

from foredraft.heads.base import DraftHead, RecurrentHead
from foredraft.heads.checkpoint import read_head
from foredraft.heads.eagle import EagleHead
from foredraft.heads.eagle3 import Eagle3Head
from foredraft.heads.hydra import HydraHead
from foredraft.heads.target_model import Target


def new_head(settings: DictConfig, target: Target, counts: Tensor | None = None) -> DraftHead:
    """Return an untrained head by its yaml. counts: (vocab,) int64, occurrences of each token; None counts all alike."""
    counts = torch.ones(target.vocab_size, dtype=torch.int64) if counts is None else counts
    return instantiate(settings, target=target, **({"counts": counts} if "draft_vocab_size" in settings else {}))


def init_from(path: str, head: DraftHead, target: Target) -> DraftHead:
    """Return the head at `path`, a directory or a repository of the Hub in any layout that decoding reads, with the training
    settings of `head`, its window, and its rope if that is not the target's. Vocabulary, layers and shape stay, which is
    printed where they differ. Raise ValueError for one of another kind."""
    found = read_head(path, target)
    if type(found) is not type(head):
        raise ValueError(f"init_from={path} is of the kind {found.kind}, and head={head.kind}: set head={found.kind}")
    if isinstance(found, RecurrentHead) and found.limit is None:
        found.depth = head.depth  # its weights are the same for all depths
    elif found.depth != head.depth:
        raise ValueError(f"init_from={path} drafts {found.depth} tokens, not {head.depth}: set head.{head.depth_key}")
    take_window_and_rope(found, head, path)
    ours, theirs = settings_of(head), settings_of(found)
    if kept := [f"head.{name}={theirs.get(name)}" for name in sorted(ours) if ours[name] != theirs.get(name)]:
        print(f"init_from={path} keeps {' '.join(kept)}: its vocabulary, layers and shape stay", flush=True)
    if isinstance(found, EagleHead) and isinstance(head, EagleHead):
        found.noise = head.noise
    if isinstance(found, HydraHead) and isinstance(head, HydraHead):
        found.set_dropout(head.dropout)
    found.lm_head_is_targets &= head.lm_head_is_targets or not head.projections  # a head without has nothing to train
    found.to(target.device, torch.float32).train().requires_grad_(True)
    found.freeze_projections()
    return found


def settings_of(head: DraftHead) -> dict[str, Any]:
    """Return the settings of a head's yaml that its config.json has, all but those that `init_from` takes."""
    config = head.to_config()
    config |= config.get("dflash_config", {}) | {"target_layer_ids": head.layers}
    taken = {"ttt_steps", "window", "rope", "num_heads", "block_size"}
    return {
        name: config[name] for name in inspect.signature(head.for_target).parameters if name in config.keys() - taken
    }


def limit_window(head: DraftHead, cfg: DictConfig) -> None:
    """Let an EAGLE-3 head look back as far as its longest training rows, unless head.window says otherwise: farther back it
    has learned nothing, and its drafts would become worse."""
    unlimited = head.imported and getattr(head, "window", None) is None  # its rows are unknown
    if isinstance(head, Eagle3Head) and cfg.head.window is None and not unlimited:
        head.window = max(cfg.max_length, head.window or 0, head.depth + 1)


def take_window_and_rope(found: DraftHead, head: DraftHead, path: str) -> None:
    """Give a trained head the window and the rope that were chosen for `head`: no weight depends on them."""
    window = getattr(head, "window", None)
    if (window is not None or head.own_rope) and getattr(found, "latent", False):
        raise ValueError(f"init_from={path} has latent attention: leave head.window and head.rope out")
    if window is not None and window != found.window:
        if not isinstance(found, Eagle3Head):  # its layers may differ in theirs
            raise ValueError(f"init_from={path} has head.window={found.window}, which stays: leave head.window out")
        found.window = window
    if head.own_rope:
        assert found.config is not None and head.config is not None
        # `found.rotary` reads the config at its first use, which is later.
        found.own_rope, found.config.rope_parameters = True, head.config.rope_parameters
