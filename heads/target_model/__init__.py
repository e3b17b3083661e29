"""The frozen language model: loading, forwards over a tree, its cache, and CUDA graphs."""

from foredraft.heads.target_model.logits import TargetOutput
from foredraft.heads.target_model.model import Target, TargetCache

__all__ = ["Target", "TargetCache", "TargetOutput"]
