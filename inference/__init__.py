"""Decoding with a drafter, losslessly, against a frozen target."""

from foredraft.inference.drafters import Drafter, drafter_for, load_drafter
from foredraft.inference.engine import Engine
from foredraft.inference.generation import Generation, generate
from foredraft.inference.grammar import Grammars
from foredraft.inference.request import Request
from foredraft.inference.sampling import SamplingParams

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
