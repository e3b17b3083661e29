"""The target's hidden states that heads learn from: read in the training process, or kept on disk."""
