"""conf/ as a program sees it."""

from foredraft.config import read as composed

__all__ = ["composed"]
