"""Decoding with a drafter, losslessly, against a frozen target."""

from inference.drafters import Drafter, drafter_for, load_drafter
from inference.engine import Engine
from inference.generation import Generation, generate
from inference.grammar import Grammars
from inference.request import Request
from inference.sampling import SamplingParams

__all__ = [
    "Drafter",
    "Engine",
    "Generation",
    "Grammars",
    "Request",
    "SamplingParams",
    "drafter_for",
    "generate",
    "load_drafter",
]
