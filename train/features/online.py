"""features=online: the target reads every batch in the training process."""

import torch
from torch import Tensor
from torch.utils.data import Dataset

from foredraft.heads.base import PackedBatch
from foredraft.heads.target import Target
from foredraft.heads.target.documents import forward_documents
from foredraft.heads.target.sharding import gather_rows
from foredraft.train.data.packing import Packed

MAX_MASK_LENGTH = 4096  # tokens: the mask of longer rows, length x length in the target's dtype, is what would not fit


def online(packed: Packed, target: Target, layers: list[int], batch: int) -> Dataset:
    """The rows as they are."""
    return packed


def several_documents(text: PackedBatch) -> bool:
    """Does a row of this batch hold more than one?"""
    return bool((text.documents != text.documents[:, :1]).any())


def forward_target(target: Target, text: PackedBatch, layers: list[int]) -> tuple[Tensor, Tensor]:
    """The features (batch, length, width) and the last hidden state (batch, length, hidden) of a packed batch.

    In the target's own precision, as decoding reads it: a trainer's autocast would round the output of a float32 target."""
    rows, images = slice(None), text.images
    if target.sharding == "tensor":  # its slices read one batch together: the rows of all processes of a node
        (tokens, loss_mask, documents, positions), rows = gather_rows(text[:4])
        text = PackedBatch(tokens, loss_mask, documents, positions)
    packed = several_documents(text) if text.multiple_documents is None else text.multiple_documents
    wanted = [*layers, target.num_layers]
    with torch.autocast(text.tokens.device.type, enabled=False):
        # Pieces are gathered by all processes together, whatever rows each has.
        apart = packed or target.sharding == "fsdp"
        if apart and (not target.supports_trees or text.tokens.shape[1] > MAX_MASK_LENGTH):
            reading = forward_documents(target, text.tokens, text.documents, wanted, images)
        else:
            mask, columns = None, text.positions
            if packed or (target.window and target.supports_trees):
                mask = text.mask()
                if images is not None:
                    blocks = images["blocks"][:, None]
                    mask |= (blocks == blocks.mT) & (blocks >= 0)
            reading = target.forward(text.tokens, text.positions, mask, None, wanted, 1, columns, images)
    width = target.hidden_size
    aux_hidden_states = reading.aux_hidden_states[rows]
    return aux_hidden_states[..., :-width], aux_hidden_states[..., -width:]
