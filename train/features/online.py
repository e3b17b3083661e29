"""What heads learn from: read from the target in the training process, or before, and then kept in few bytes."""

import torch
from torch import Tensor
from torch.utils.data import Dataset

from heads.base import PackedBatch
from heads.target import Target
from train.data.packing import Packed
from train.runtime import distributed

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
LARGEST = 448.0  # of float8_e4m3fn


def online(packed: Packed, target: Target, layers: list[int], batch: int) -> Dataset:
    """The rows as they are: training reads the target itself."""
    return packed


def read(target: Target, text: PackedBatch, layers: list[int]) -> tuple[Tensor, Tensor]:
    """The features (batch, length, width) and the last hidden state (batch, length, hidden) of a packed batch.

    In the target's own precision, as decoding reads it: a trainer's autocast would round what a float32 target says."""
    rows = slice(None)
    if target.sharding == "tensor":  # its slices can only read one thing: the rows of all processes
        rows = slice(len(text.tokens) * distributed.rank(), len(text.tokens) * (distributed.rank() + 1))
        text = PackedBatch(*map(distributed.all_gather, text))
    packed = bool((text.documents != text.documents[:, :1]).any())
    with torch.autocast(text.tokens.device.type, enabled=False):
        reading = target.read(
            text.tokens,
            text.positions,
            mask=text.mask() if packed or target.window else None,
            layers=[*layers, target.num_layers],
            keep_logits=1,
            key_positions=text.positions,
        )
    width = target.hidden_size
    features = reading.features[rows]
    return features[..., :-width], features[..., -width:]


def store(name: str, tensor: Tensor, dtype: str, layers: int) -> dict[str, Tensor]:
    """As it lies on disk. fp8 has one scale per position and layer: their sizes differ by orders of magnitude."""
    if not tensor.is_floating_point():
        return {name: tensor}
    if dtype != "fp8":
        return {name: tensor.to(DTYPES[dtype])}
    parts = tensor.float().unflatten(-1, (layers if name == "features" else 1, -1))
    scale = parts.abs().amax(-1, keepdim=True).clamp(min=1e-12) / LARGEST
    return {name: (parts / scale).flatten(-2).to(torch.float8_e4m3fn), f"{name}_scale": scale[..., 0]}


def restore(stored: dict[str, Tensor], name: str) -> Tensor:
    tensor = stored[name]
    if f"{name}_scale" not in stored:
        return tensor
    scale = stored[f"{name}_scale"][..., None]
    return (tensor.float().unflatten(-1, (scale.shape[-2], -1)) * scale).flatten(-2)


def unpack(stored: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """A stored batch as `read` gives it. With top_k the second is (batch, length, 2 k): values, then token ids, which
    are exact in float32 up to 16 million."""
    if "last" in stored:
        return stored["features"], stored["last"]
    return stored["features"], torch.cat([stored["top_values"].float(), stored["top_ids"].float()], dim=-1)


def sparse(top: Tensor, vocab: int) -> Tensor:
    """Logits (..., vocab) from values and ids (..., 2 k); a token that was not kept has no probability left."""
    values, ids = top.chunk(2, dim=-1)
    return values.new_full((*top.shape[:-1], vocab), -1e4).scatter(-1, ids.long(), values)
