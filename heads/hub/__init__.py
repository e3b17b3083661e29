"""Heads on the Hugging Face Hub: pulling and pushing (client.py), and the model card (card.py)."""

from heads.hub.client import WEIGHTS, check_name, find, push, revision, sha256

__all__ = ["WEIGHTS", "check_name", "find", "push", "revision", "sha256"]
