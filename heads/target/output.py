"""What a forward of the target gives."""

from typing import NamedTuple

from torch import Tensor


class TargetOutput(NamedTuple):
    """Of some tokens."""

    logits: Tensor  # (batch, length or fewer, vocab)
    aux_hidden_states: Tensor  # (batch, length, len(layers) * hidden); width 0 when no layer was asked for
