"""Capture a function of tensors at its first call and replay it from then on: on a GPU as a CUDA graph.

A decoding step has about a thousand small kernels, and launching them takes the host longer than the device needs to run
them. A captured function must have fixed shapes and never wait for the device. In addition to its inputs it may use memory
with a fixed address (weights, a KVCache). Decisions of the host are part of its key. Capturing runs its Python code once
more, but none of its kernels.
"""

import contextlib
import functools
import gc
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

MAX_GRAPHS = 128  # of one owner; the least recently used is dropped first


class CapturedGraph(Protocol):
    """Hold a capture of `CAPTURES`: `outputs` have fixed addresses, which every `replay` overwrites."""

    outputs: Any

    def replay(self) -> None: ...


class SyncDetector(TorchDispatchMode):
    """Detect the first kernel that a graph cannot contain because its result is awaited, or its input comes from the host. A
    capture with such a kernel fails, and leaves the device's stream and allocator in an invalid state."""

    KERNELS = frozenset(
        f"aten::{name}"
        for name in ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2")
    )
    reason: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        # A single number from the host is passed with the kernel that uses it.
        waits = name in self.KERNELS or (name == "aten::lift_fresh" and args[0].ndim > 0)
        if name == "aten::index":
            waits = any(index is not None and index.dtype == torch.bool for index in args[1])
        if waits and self.reason is None:
            self.reason = f"{name} waits for the device, or for the host"
        return func(*args, **(kwargs or {}))


class KeptReferences(TorchDispatchMode):
    """Collect the tensors that a captured function uses and did not make. They must live as long as the graph, which only
    stores their addresses."""

    def __init__(self) -> None:
        super().__init__()
        self.made: set[int] = set()
        self.tensors: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in self.made:
                self.tensors.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        out = func(*args, **kwargs)
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in self.tensors:
                self.made.add(tensor.untyped_storage().data_ptr())
        return out


class GraphMemory:
    """Hold the memory that all graphs of a device share. Outputs of a graph stay referenced, so that no later graph
    overwrites them. Intermediate results of all graphs share memory, since graphs run one after the other. torch shares a
    pool only among captures on the same stream, and frees it with its last graph: `keeper` keeps it."""

    def __init__(self, device: torch.device):
        with torch.cuda.device(device):
            self.pool, self.stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
            self.lock = threading.Lock()  # engines in several threads share the stream
            self.keeper = torch.cuda.CUDAGraph()
            with self.capture(self.keeper):
                torch.zeros(1, device=device)

    @contextlib.contextmanager
    def capture(self, graph: Any) -> Iterator[None]:
        before = torch.cuda.current_stream()
        with self.lock:
            collects = gc.isenabled()
            # A workspace that cuBLAS keeps for the stream would be in the memory that the next graph overwrites.
            torch._C._cuda_clearCublasWorkspaces()
            gc.disable()  # it may free an older graph, and CUDA then ends the capture in progress with an error
            try:
                # thread_local: another thread, for example a streamer, may use the device meanwhile.
                with torch.cuda.graph(graph, self.pool, self.stream, capture_error_mode="thread_local"):
                    yield
            except BaseException:
                graph_memory.cache_clear()  # the allocator still records into this pool, and takes no other capture
                raise
            finally:
                torch.cuda.set_stream(before)  # torch stays on the capture's stream if ending the capture fails
                torch._C._cuda_clearCublasWorkspaces()
                if collects:
                    gc.enable()


graph_memory = functools.cache(GraphMemory)  # by device


class CudaGraph:
    def __init__(self, function: Callable[..., Any], inputs: tuple[Tensor | None, ...]):
        self.device = next(x.device for x in inputs if x is not None)
        self.graph, memory = torch.cuda.CUDAGraph(), graph_memory(self.device)
        with torch.cuda.device(self.device), KeptReferences() as references, memory.capture(self.graph):
            self.outputs = function(*inputs)
        self.references = list(references.tensors.values())

    def replay(self) -> None:
        with torch.cuda.device(self.device):
            self.graph.replay()


CAPTURES: dict[str, Callable[..., CapturedGraph]] = {"cuda": CudaGraph}  # by type of device; others do not capture


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """Let what is built inside run kernel by kernel."""
    before = dict(CAPTURES)
    CAPTURES.clear()
    try:
        yield
    finally:
        CAPTURES.update(before)


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least `number`: few sizes need few graphs."""
    return 1 << (number - 1).bit_length() if number else 0


class CudaGraphs:
    """Hold the captured graphs of one owner, by key and shapes of its inputs."""

    num_captured = 0  # of all owners: a step in which it grew took longer than later steps

    def __init__(self, device: torch.device, enabled: bool = True):
        self.capture = CAPTURES.get(device.type) if enabled else None
        self.graphs: OrderedDict[Hashable, tuple[list[Tensor | None], CapturedGraph] | None] = OrderedDict()

    @property
    def active(self) -> bool:
        return self.capture is not None

    def __call__(self, key: Hashable, function: Callable[..., Any], *inputs: Tensor | None) -> Any:
        """Return function(*inputs), which are tensors, None, or tuples of them."""
        if self.capture is None:
            return function(*inputs)
        key = key, *(None if x is None else (x.shape, x.dtype) for x in inputs)
        if key not in self.graphs:
            with SyncDetector() as detector:
                out = function(*inputs)  # libraries also initialize themselves in the first call
            CudaGraphs.num_captured += 1
            try:
                self.graphs[key] = self.try_capture(function, inputs, detector.reason)
            except torch.OutOfMemoryError:  # not a property of the function: tried again at its next call
                return out
            if len(self.graphs) > MAX_GRAPHS:
                self.graphs.popitem(last=False)
            return out
        self.graphs.move_to_end(key)
        captured = self.graphs[key]
        if captured is None:
            return function(*inputs)
        static_inputs, graph = captured
        for static, x in zip(static_inputs, inputs, strict=True):
            if static is not None and x is not None:
                static.copy_(x)
        graph.replay()
        return tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, graph.outputs)

    def try_capture(self, function: Callable[..., Any], inputs: tuple[Tensor | None, ...], reason: str | None) -> Any:
        """Return its inputs and graph; None if it cannot be captured, for this `reason` or another."""
        static_inputs = [None if x is None else x.clone(memory_format=torch.contiguous_format) for x in inputs]
        assert self.capture is not None
        if reason is None:
            try:
                return static_inputs, self.capture(function, tuple(static_inputs))
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                reason = str(error).strip().split("\n")[0]
        # For example, a mixture of experts asks the device how many tokens each expert got.
        warnings.warn(f"a part of decoding cannot be captured and runs kernel by kernel: {reason}", stacklevel=2)
        return None
