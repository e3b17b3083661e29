"""What a read of the target gives."""

from typing import NamedTuple

from torch import Tensor


class Reading(NamedTuple):
    """What the target made of some tokens."""

    logits: Tensor  # (batch, length or fewer, vocab)
    features: Tensor  # (batch, length, len(layers) * hidden); width 0 when no layer was asked for
