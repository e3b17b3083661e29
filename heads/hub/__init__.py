"""Heads on the Hugging Face Hub: pulling and pushing (client.py), and the model card (card.py)."""

from foredraft.heads.hub.client import WEIGHTS, check_name, find, push, weights_sha256

__all__ = ["WEIGHTS", "check_name", "find", "push", "weights_sha256"]
