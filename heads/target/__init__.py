"""The frozen language model: loading it, reading it over a tree, its cache, and CUDA graphs of its reads."""

from foredraft.heads.target.model import Target, TargetCache
from foredraft.heads.target.output import TargetOutput

__all__ = ["Target", "TargetCache", "TargetOutput"]
