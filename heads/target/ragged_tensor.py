"""Keys, values and masks of a batch's cohorts (heads/target/ragged_cache.py), passed through a model's own code."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._pytree import tree_map


class OnDemand(Tensor):
    """Represent a tensor. Everything except our attention gets the tensor that `dense()` makes."""

    def dense(self) -> Tensor:
        raise NotImplementedError

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map(lambda x: x.dense() if isinstance(x, OnDemand) else x, (args, kwargs or {}))
        return func(*args, **kwargs)


class RaggedTensor(OnDemand):
    """Hold tensors of a batch's spans, `parts`, which differ in the size of one dimension. `rows`: the rows of the batch in
    each part, (n,) int64 or a slice. The dense tensor is padded with `fill`."""

    parts: list[Tensor]
    rows: list[Tensor | slice]

    @staticmethod
    def __new__(cls, parts: list[Tensor], rows: list[Tensor | slice], dim: int, fill: float = 0.0) -> "RaggedTensor":
        shape, like = [*parts[0].shape], parts[0]
        shape[0], shape[dim] = sum(map(len, parts)), max(part.shape[dim] for part in parts)
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device)

    def __init__(self, parts: list[Tensor], rows: list[Tensor | slice], dim: int, fill: float = 0.0):
        self.parts, self.rows, self.fill = parts, rows, fill

    def dense(self) -> Tensor:
        out = self.parts[0].new_full(self.shape, self.fill)
        for part, rows in zip(self.parts, self.rows, strict=True):
            missing = [end - start for start, end in zip(part.shape[1:], self.shape[1:], strict=True)]
            widths = [width for size in reversed(missing) for width in (0, size)]
            out[rows] = pad(part, widths, value=self.fill)
        return out
