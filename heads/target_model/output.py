"""The result of a forward of the target."""

from typing import NamedTuple

from torch import Tensor


class TargetOutput(NamedTuple):
    """Hold the outputs for some tokens."""

    logits: Tensor  # (batch, length or fewer, vocab)
    aux_hidden_states: Tensor  # (batch, length, len(layers) * hidden); width 0 if no layers were requested
