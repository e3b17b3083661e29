"""The frozen language model: loading it, reading it over a tree, its cache, and CUDA graphs of its reads."""

from heads.target.model import Target, TargetCache
from heads.target.reading import Reading

__all__ = ["Reading", "Target", "TargetCache"]
