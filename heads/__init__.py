"""What is trained and shipped: draft heads, the frozen target they draft for, and their files."""

from heads.base import DraftHead
from heads.checkpoint import load_head, save_head
from heads.target import Target

__all__ = ["DraftHead", "Target", "load_head", "save_head"]
