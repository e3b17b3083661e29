"""Caches of keys, values and recurrent states, and captured forwards."""
