"""A run and its processes: distributed, strategies, checkpoints, resuming, logging, memory and cost."""
