"""Hidden states as engines give them: the last one before the target's final norm. And which layers an engine gives."""

import copy
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from foredraft.heads.target_model import Target
from foredraft.heads.target_model.documents import spans
from foredraft.heads.target_model.ends import HINT_FULL_TARGET, end_modules
from foredraft.heads.target_model.sharding import full_tensor
from foredraft.train.data.packing import Packed
from foredraft.train.hidden_states.engine import EngineError, States

TOKENS = 64  # of a probe, at most
BEST = 4  # tokens that rounding may exchange


def probe_text(packed: Packed) -> list[int]:
    """Return the tokens of the longest document in the first row."""
    row = packed[0]
    longest = max(spans([row["documents"].tolist()]), key=lambda span: span.stop - span.start)
    return row["tokens"][longest.start : longest.stop][:TOKENS].tolist()


@torch.no_grad()
def final_norm(target: Target) -> nn.Module:
    """Return the module that makes the last hidden state. Raise ValueError if that is not a single module."""
    if target.embeddings_only:  # then it is the one with a weight for each of the hidden size's numbers
        norms = [module for _, module in end_modules(target.model) if next(module.parameters()).ndim == 1]
        if len(norms) != 1:
            raise ValueError(
                f"the final norm of {target.name} is one of {len(norms)}, which its forward tells: {HINT_FULL_TARGET}"
            )
        return norms[0]
    seen: deque[tuple[nn.Module, Any, Any]] = deque(maxlen=16)  # it is among the last that are called
    hooks = [module.register_forward_hook(lambda *call: seen.append(call)) for module in target.model.modules()]
    try:
        tokens = torch.arange(4, device=target.device)[None] % target.vocab_size
        last = target.forward(tokens, layers=[target.num_layers]).aux_hidden_states
    finally:
        for hook in hooks:
            hook.remove()
    for module, given, output in reversed(seen):
        alike = isinstance(output, Tensor) and output.shape == last.shape and torch.equal(output.to(last.device), last)
        if alike and given and isinstance(given[0], Tensor) and given[0].shape == last.shape:
            return module
    raise ValueError(
        f"{target.name} has no final norm that could be applied to an engine's states: take hidden_states=online or offline"
    )


@torch.no_grad()
def read_states(target: Target, norm: nn.Module, tokens: list[int], layers: Sequence[int]) -> Tensor:
    """Return (tokens, layers, hidden) of one text, the last layer's before `norm`."""
    before: list[Tensor] = []
    hook = norm.register_forward_pre_hook(lambda module, given: before.append(given[0]))
    try:
        text = torch.tensor([tokens], device=target.device)
        read = target.forward(text, layers=list(layers), keep_logits=1).aux_hidden_states[0]
    finally:
        hook.remove()
    states = list(read.unflatten(-1, (-1, target.hidden_size)).unbind(1))
    return torch.stack([before[0][0].to(s) if n == target.num_layers else s for n, s in zip(layers, states)], 1)


def on_host(norm: nn.Module) -> nn.Module:
    """Copy a norm for the workers of a DataLoader, which must not touch an accelerator."""
    found = copy.copy(norm)
    weights = {name: full_tensor(weight).detach().cpu() for name, weight in norm.named_parameters()}
    found._parameters = {name: nn.Parameter(weight, requires_grad=False) for name, weight in weights.items()}
    found.__dict__.pop("forward", None)  # accelerate's, which moves what it gets to a device (target.sharding=layers)
    return found


def named_columns(url: str, target: Target, given: States, wanted: Sequence[int]) -> list[int]:
    """Find the layers `wanted` among those that the engine gave, by the numbers that it reports; vLLM reports none, and gives
    those that it was told, in ascending order. Raise EngineError if they do not fit."""
    (_, count, width), last, named = given.tensor.shape, target.num_layers, given.layers
    if width != target.hidden_size:
        raise EngineError(
            f"hidden_states.url={url} serves another model than {target.name}, whose states have {target.hidden_size} "
            f"numbers and not {width}"
        )
    if set(wanted) == {last}:
        return [count - 1] * len(wanted)
    asked = sorted({*wanted, last})
    if named is None and count == len(asked):
        named = asked
    if named is None or not set(wanted) <= set(named):
        raise EngineError(
            f"hidden_states.url={url} gives {f'{count} layers' if named is None else f'layers {list(named)}'} and the head "
            f"needs {asked}: start the engine with these (conf/hidden_states/server.yaml shows how)"
        )
    return [list(named).index(layer) for layer in wanted]


def check_writes_alike(url: str, target: Target, last: Tensor, written: Sequence[int]) -> None:
    """Raise EngineError unless the target's ends make of its last hidden state (1, hidden) about what the engine wrote."""
    best = target.logits(last.to(target.device)).topk(BEST).indices[0].tolist()
    if written and written[0] not in best:
        raise EngineError(
            f"hidden_states.url={url} serves another model than {target.name}: it writes token {written[0]} where the "
            f"lm_head of {target.name} makes {best[0]} of the same state"
        )
