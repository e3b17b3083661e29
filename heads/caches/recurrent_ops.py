"""Run the recurrence of a layer over several tokens so that only the first of them change its state.

transformers has a function for each kind of recurrence, which a layer calls by its name. Tokens that write nothing and do not
decay the state leave it unchanged, so the state after `count` tokens is the result of the same call with the others disabled.

    state before    a b c d     the newest tokens, of which a and b are accepted, or c and d are padding
    state after     a b . .

Serving engines keep a state per draft instead, or run a kernel that does this.
"""

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

FUNCTIONS = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention", "mamba2_chunk_scan")
# Arguments (batch, tokens, ...) that determine how a token changes the state, and their values for no change: no decay and
# no write, or a step whose softplus is 0.
IDENTITY_UPDATE = {"g": 0, "beta": 0, "dt": -1e4}
CHUNK = 64  # tokens, the default of these functions


class Call(NamedTuple):
    function: "RecurrentOp"
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def until(self, counts: Tensor) -> "Call":
        """Return this call with only the first counts (batch, 1) tokens changing the state."""
        tokens = self.args[0].shape[1]
        rest = torch.arange(tokens, device=self.args[0].device) >= counts.to(self.args[0].device)

        def without(name: str, value: Any) -> Any:
            if name not in IDENTITY_UPDATE:
                return value
            return value.masked_fill(rest.view(*rest.shape, *[1] * (value.ndim - 2)), IDENTITY_UPDATE[name])

        args = tuple(without(name, value) for name, value in zip(self.function.names, self.args, strict=False))
        return Call(self.function, args, {name: without(name, value) for name, value in self.kwargs.items()})

    def __call__(self) -> Any:
        return self.function.original(*self.args, **self.kwargs)


class ForwardContext(threading.local):
    """Describe the forward that runs in this thread."""

    watched = False  # otherwise transformers' own functions run
    counts: Tensor | None = None  # (batch, 1): how many of each sequence's tokens change its state; None for all
    records = False
    newest: Call | None = None  # while it records


CONTEXT = ForwardContext()


class RecurrentOp:
    """Wrap transformers' function."""

    def __init__(self, function: Callable[..., Any]):
        functools.update_wrapper(self, function)
        self.original, self.names = function, list(inspect.signature(function).parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # A compiler of others' code (fullgraph=True) cannot read thread-local variables.
        if torch.compiler.is_compiling() or not CONTEXT.watched:
            return self.original(*args, **kwargs)
        if args[0].device.type == "cpu":  # where inputs are padded to whole chunks
            kwargs["chunk_size"] = min(args[0].shape[1], kwargs.get("chunk_size", CHUNK))
        call = Call(self, args, kwargs)
        call = call if CONTEXT.counts is None else call.until(CONTEXT.counts)
        # With a smallest step every token decays the state.
        CONTEXT.newest = call if CONTEXT.records and kwargs.get("dt_limit", (0.0,))[0] == 0 else None
        return call()


def patch_recurrent_ops(model: PreTrainedModel) -> None:
    """Replace the functions that its layers call by RecurrentOps."""
    for source in {inspect.getmodule(type(part)) for part in model.modules()}:
        for name in FUNCTIONS:
            function = vars(source).get(name)
            if function is not None and not isinstance(function, RecurrentOp):
                vars(source)[name] = RecurrentOp(function)


@contextlib.contextmanager
def watched(counts: Tensor | None = None, records: bool = False) -> Iterator[None]:
    """Watch a forward in which only the first counts (batch, 1) tokens change states, or whose calls are recorded."""
    CONTEXT.watched, CONTEXT.counts, CONTEXT.records = True, counts, records
    try:
        yield
    finally:
        CONTEXT.watched, CONTEXT.counts, CONTEXT.records, CONTEXT.newest = False, None, False, None
