"""Attention and its masks, in training and decoding."""
