"""Text that a target writes: answers, conversations with itself, continued text."""
