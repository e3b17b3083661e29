"""The frozen language model: loading, forwards over a tree, its cache, and CUDA graphs."""

from foredraft.heads.target_model.model import Target, TargetCache
from foredraft.heads.target_model.output import TargetOutput

__all__ = ["Target", "TargetCache", "TargetOutput"]
