"""How layers move a recurrent state over several tokens, so that it takes in the first of them alone.

transformers has a function for each kind of recurrence, which a layer calls by its name. The newest tokens of a text change
nothing where they write nothing and let nothing decay: so the state after `count` of them is what the same call gives.

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

RULES = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention", "mamba2_chunk_scan")
# Their arguments (batch, tokens, ...) that say how much a token changes, and what one that changes nothing has: no decay
# and no write, or a step whose softplus is 0.
NOTHING = {"g": 0, "beta": 0, "dt": -1e4}
CHUNK = 64  # tokens, where a rule is asked for no other


class Call(NamedTuple):
    rule: "Rule"
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def until(self, counts: Tensor) -> "Call":
        """Of which the first counts (batch, 1) tokens alone change the state."""
        tokens = self.args[0].shape[1]
        rest = torch.arange(tokens, device=self.args[0].device) >= counts.to(self.args[0].device)

        def without(name: str, value: Any) -> Any:
            if name not in NOTHING:
                return value
            return value.masked_fill(rest.view(*rest.shape, *[1] * (value.ndim - 2)), NOTHING[name])

        args = tuple(without(name, value) for name, value in zip(self.rule.names, self.args, strict=False))
        return Call(self.rule, args, {name: without(name, value) for name, value in self.kwargs.items()})

    def __call__(self) -> Any:
        return self.rule.function(*self.args, **self.kwargs)


class Now(threading.local):
    """Of the forward that runs in this thread."""

    watched = False  # else the functions are transformers' own
    counts: Tensor | None = None  # (batch, 1): how many of each sequence's tokens change its state; None for all
    records = False
    newest: Call | None = None  # where it records


NOW = Now()


class Rule:
    """In the place of transformers' function, which it calls."""

    def __init__(self, function: Callable[..., Any]):
        functools.update_wrapper(self, function)
        self.function, self.names = function, list(inspect.signature(function).parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # A compiler of others' code (fullgraph=True) does not look into a thread's own variables.
        if torch.compiler.is_compiling() or not NOW.watched:
            return self.function(*args, **kwargs)
        if args[0].device.type == "cpu":  # there whatever it takes is padded to whole chunks
            kwargs["chunk_size"] = min(args[0].shape[1], kwargs.get("chunk_size", CHUNK))
        call = Call(self, args, kwargs)
        call = call if NOW.counts is None else call.until(NOW.counts)
        # With a least step every token lets the state decay.
        NOW.newest = call if NOW.records and kwargs.get("dt_limit", (0.0,))[0] == 0 else None
        return call()


def watch(model: PreTrainedModel) -> None:
    """Put a Rule in the place of the functions that its layers call."""
    for source in {inspect.getmodule(type(part)) for part in model.modules()}:
        for name in RULES:
            function = vars(source).get(name)
            if function is not None and not isinstance(function, Rule):
                vars(source)[name] = Rule(function)


@contextlib.contextmanager
def watched(counts: Tensor | None = None, records: bool = False) -> Iterator[None]:
    """A forward of which the first counts (batch, 1) tokens alone change states, or whose calls are recorded."""
    NOW.watched, NOW.counts, NOW.records = True, counts, records
    try:
        yield
    finally:
        NOW.watched, NOW.counts, NOW.records, NOW.newest = False, None, False, None
