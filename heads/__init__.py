"""Draft heads, the frozen target that they draft for, and their files."""

from foredraft.heads.base import DraftHead
from foredraft.heads.checkpoint import load_head, save_head
from foredraft.heads.target_model import Target

__all__ = ["DraftHead", "Target", "load_head", "save_head"]
