"""Decoding with a drafter, losslessly, against a frozen target."""

from inference.drafters import Drafter, drafter_for, load_drafter
from inference.engine import Generation, generate

__all__ = ["Drafter", "Generation", "drafter_for", "generate", "load_drafter"]
