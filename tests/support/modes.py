"""Modes that see each operation of torch: Tape does what a CUDA graph does, on a CPU, and LiveBytes measures memory."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "_unique2", "item")


class Tape(TorchDispatchMode):
    """Record kernels with the very tensors that they used, and replay them on these.

    Python runs while recording and never again, kernels run while replaying and never before; what a graph may not do while
    it is recorded (wait for the device, bring numbers from the host) raises RuntimeError here too.
    """

    def __init__(self, function: Callable[..., Any], inputs: tuple[Tensor | None, ...]):
        super().__init__()
        self.kernels: list[tuple[Any, Any, Any, Any]] = []
        self.before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}  # what was written to, as it was
        with self:
            self.outputs = function(*inputs)
        for storage, copy in self.before.values():
            storage.copy_(copy)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        # One number from the host goes along with the kernel that uses it.
        if name in WAITS or (name == "lift_fresh" and args[0].ndim):
            raise RuntimeError(f"{func} waits for the device, or for the host")
        if func._schema.name == "aten::index" and any(i is not None and i.dtype == torch.bool for i in args[1]):
            raise RuntimeError("a bool index waits for the device")
        for argument, given in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(given, Tensor):
                storage = given.untyped_storage()
                self.before.setdefault(storage.data_ptr(), (storage, storage.clone()))
        out = func(*args, **kwargs)
        self.kernels.append((func, args, kwargs, out))
        return out

    def replay(self) -> None:
        for func, args, kwargs, out in self.kernels:
            for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                    old.copy_(new)


class LiveBytes(TorchDispatchMode):
    """Count the bytes of tensors made inside, while they live: `peak` is the most at any moment. before: tensors whose memory
    was there before, so that views of them are not new bytes."""

    def __init__(self, before: Iterable[Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.seen = {tensor.untyped_storage()._cdata for tensor in before}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.note(tensor.untyped_storage())
        return out

    def note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self.seen:
            size = storage.nbytes()
            self.seen.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self.gone, key, size)

    def gone(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.now -= size
