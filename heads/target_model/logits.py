"""The output of a target: what its config does to the output of the lm_head, and positions at which it is not needed."""

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

if TYPE_CHECKING:
    from foredraft.heads.target_model.model import Target


class TargetOutput(NamedTuple):
    """Hold the outputs for some tokens."""

    logits: Tensor  # (batch, length or fewer, vocab)
    aux_hidden_states: Tensor  # (batch, length, len(layers) * hidden); width 0 if no layers were requested


class LogitScaling(NamedTuple):
    """Hold the divisor (Granite, Inkling, MiniCPM3), the factor (Cohere, Falcon-H1, HyperCLOVA X) and the cap (Gemma) of
    logits."""

    divisor: float | None
    factor: float | None
    cap: float | None

    @classmethod
    def of(cls, config: PreTrainedConfig) -> "LogitScaling":
        def setting(*names: str, neutral: float = 1) -> float | None:
            # Not from `to_dict`, which omits computed values (MiniCPM3's scaling).
            values = (getattr(config, name, None) for name in names)
            return next((value for value in values if value not in (None, 0, neutral)), None)

        scaling = setting("logits_scaling", "logits_mup_width_multiplier")
        factor = setting("logit_scale", "lm_head_multiplier")
        cap = setting("final_logit_softcapping", "logits_soft_cap", neutral=0)
        if config.model_type == "hyperclovax":  # multiplies by what Granite divides by
            scaling, factor = None, scaling
        return cls(scaling, factor, cap)

    @property
    def multiplier(self) -> float:
        return (self.factor or 1.0) / (self.divisor or 1.0)

    def __call__(self, logits: Tensor) -> Tensor:
        """Scale the output of an lm_head."""
        logits = logits if self.divisor is None else logits / self.divisor
        logits = logits if self.factor is None else logits * self.factor
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap


def has_numbers(weight: Tensor) -> bool:
    """Return whether the numbers of a weight are its own. Those of a quantized one, integers or FP8, also have scales."""
    return weight.is_floating_point() and weight.itemsize > 1


@contextlib.contextmanager
def only_logits_at(lm_head: nn.Module, positions: Tensor, shape: torch.Size) -> Iterator[list[bool]]:
    """Compute logits only at these positions (batch, n, 1) int64 of each sequence. No argument of a model selects different
    positions. shape: of the tokens. A model that calls its lm_head in another way returns all logits: then the list that this
    yields stays empty."""
    selected: list[bool] = []
    thread = threading.get_ident()  # other threads may decode other texts with the same target

    def select(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        hidden, *others = inputs
        if hidden.shape[:-1] != shape or threading.get_ident() != thread:
            return None
        selected.append(True)
        return hidden.gather(1, positions.to(hidden.device).expand(-1, -1, hidden.shape[-1])), *others

    hook = lm_head.register_forward_pre_hook(select, prepend=True)
    try:
        yield selected
    finally:
        hook.remove()


def check_logits(target: "Target") -> None:
    """Raise ValueError unless `Target.logits` equals what the model itself computes: heads are trained on the former."""
    if target.embeddings_only:
        return
    tokens = torch.arange(4, device=target.device)[None] % target.vocab_size
    output = target.forward(tokens, layers=[target.num_layers])
    difference = (target.logits(output.aux_hidden_states).float() - output.logits.float()).abs().max().item()
    if difference > 1e-2 * max(1.0, output.logits.abs().max().item()):
        raise ValueError(
            f"{target.name or type(target.model).__name__} changes its logits after the lm_head (by up to "
            f"{difference:.3g}) in a way that its config does not name: its heads would be trained on wrong teacher logits"
        )


def merge_streams(state: Tensor, tokens: Tensor, config: PreTrainedConfig) -> Tensor:
    """Return hidden states (batch, length, hidden) of tokens (batch, length): the mean of hyper-connections' streams."""
    if state.shape[:2] != tokens.shape:  # Gemma 3n's are (streams, batch, length, hidden), each on another scale
        raise ValueError(
            f"model_type {config.model_type} returns hidden states of the shape {tuple(state.shape)}, which heads cannot "
            "read: choose another target, or a drafter without a head, such as suffix or ngram"
        )
    return state.mean(2) if state.ndim == 4 else state
