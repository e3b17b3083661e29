"""Start from the weights of a head that was trained before."""

import torch

from foredraft.heads.base import DraftHead, RecurrentHead
from foredraft.heads.checkpoint import read_head
from foredraft.heads.eagle import EagleHead
from foredraft.heads.target_model import Target


def init_from(path: str, head: DraftHead, target: Target) -> DraftHead:
    """Return the head at `path`, a directory or a repository of the Hub in any layout that decoding reads, with the training
    settings of `head`. Its vocabulary, layers and shape stay. Raise ValueError for one of another kind."""
    found = read_head(path, target)
    if type(found) is not type(head):
        raise ValueError(
            f"init_from={path} is a head of the kind {found.kind}, and head={head.kind}: set head={found.kind}"
        )
    if isinstance(found, RecurrentHead) and found.limit is None:
        found.depth = head.depth  # its weights are the same for all depths
    elif found.depth != head.depth:
        raise ValueError(
            f"init_from={path} drafts {found.depth} tokens, and this head {head.depth}: set head.{head.depth_key}"
        )
    if isinstance(found, EagleHead) and isinstance(head, EagleHead):
        found.noise = head.noise
    found.to(target.device, torch.float32).train().requires_grad_(True)
    found.freeze_projections()
    return found
