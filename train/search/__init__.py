"""head=auto: which head is best for a target, a text and a device, by successive halving (search.py)."""
