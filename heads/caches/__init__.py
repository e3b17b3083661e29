"""Caches of keys, values and recurrent states, and forwards captured as CUDA graphs."""
