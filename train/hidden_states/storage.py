"""How features lie on disk in few bytes, and how they are read back."""

import torch
from torch import Tensor

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float8": torch.float8_e4m3fn}
LARGEST = 448.0  # of float8_e4m3fn


def store(name: str, tensor: Tensor, dtype: str, layers: int) -> dict[str, Tensor]:
    """Return the tensors to write. float8 has one scale per position and layer, whose sizes differ by orders of magnitude."""
    if dtype != "float8":
        return {name: tensor.to(DTYPES[dtype])}
    parts = tensor.float().unflatten(-1, (layers, -1))
    scale = parts.abs().amax(-1, keepdim=True).clamp(min=1e-12) / LARGEST
    return {name: (parts / scale).flatten(-2).to(torch.float8_e4m3fn), f"{name}_scale": scale[..., 0]}


def restore(stored: dict[str, Tensor], name: str) -> Tensor:
    tensor = stored[name]
    if f"{name}_scale" not in stored:
        return tensor
    scale = stored[f"{name}_scale"][..., None]
    return (tensor.float().unflatten(-1, (scale.shape[-2], -1)) * scale).flatten(-2)


def unpack(stored: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return a stored batch, on the head's device, as online.forward_target does."""
    return restore(stored, "features"), restore(stored, "last")
