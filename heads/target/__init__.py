"""The frozen language model: loading it, forwards over a tree, its cache, and CUDA graphs of its forwards."""

from foredraft.heads.target.model import Target, TargetCache
from foredraft.heads.target.output import TargetOutput

__all__ = ["Target", "TargetCache", "TargetOutput"]
