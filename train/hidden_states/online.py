"""hidden_states=online: the target reads every batch in the training process."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from foredraft.heads.base import PackedBatch
from foredraft.heads.target_model import Target
from foredraft.heads.target_model.documents import forward_documents
from foredraft.heads.target_model.images import reads_images
from foredraft.heads.target_model.sharding import gather_rows
from foredraft.train.data.packing import Packed, collate


def online(packed: Packed, target: Target, layers: list[int], batch: int) -> Dataset:
    """Return the rows unchanged."""
    return packed


def batch_of(rows: Sequence[dict[str, Any]], target: Target) -> PackedBatch:
    """Return packed rows as one batch on the target's device."""
    from accelerate.utils import send_to_device  # `foredraft plan` does without it

    return PackedBatch(**send_to_device(collate(rows), target.device))


def several_documents(text: PackedBatch) -> bool:
    """Return whether a row of this batch contains more than one document, by `multiple_documents` if it is known."""
    if text.multiple_documents is not None:
        return text.multiple_documents
    return bool((text.documents != text.documents[:, :1]).any())


def forward_target(target: Target, text: PackedBatch, layers: list[int]) -> tuple[Tensor, Tensor]:
    """Return the aux hidden states (batch, length, width) and the last hidden state (batch, length, hidden) of a packed
    batch.

    In the target's own precision, as decoding reads it: a trainer's autocast would round the output of a float32 target."""
    rows, images = slice(None), text.images
    if target.sharding == "tensor":  # its slices read one batch together: the rows of all processes of a node
        (tokens, loss_mask, documents, positions), rows = gather_rows(text[:4])
        text = PackedBatch(tokens, loss_mask, documents, positions)
    wanted = [*layers, target.num_layers]
    with torch.autocast(text.tokens.device.type, enabled=False):
        # All processes of fsdp run the same forwards, also where only some of them have images.
        pictured = reads_images(target.model.config) if target.sharding == "fsdp" else images is not None
        if target.capabilities.packed_rows and not pictured:
            mask = target.masks.packed(text.document_starts(), target.dtype, text.parts)
            reading = target.forward(text.tokens, text.positions, mask, None, wanted, 1)
        elif text.parts is not None:
            raise ValueError(f"{target.name} cannot read parts of rows: set context_parallel=1")
        elif target.sharding == "fsdp" or images is not None or several_documents(text):  # under fsdp all must
            reading = forward_documents(target, text.tokens, text.documents, wanted, images)
        else:
            reading = target.forward(text.tokens, text.positions, None, None, wanted, 1)
    width = target.hidden_size
    aux_hidden_states = reading.aux_hidden_states[rows]
    return aux_hidden_states[..., :-width], aux_hidden_states[..., -width:]
