"""Text that may be shown: nothing that a stop string may still remove, and nothing that may become a mark."""

from collections.abc import Sequence


def find_partial_mark(text: str, marks: Sequence[str]) -> int:
    """Return the position at the end of a text where one of the marks may start; the length of the text if none may."""
    starts = range(max(0, len(text) - max(map(len, marks), default=0) + 1), len(text))
    return next((at for at in starts if any(mark.startswith(text[at:]) for mark in marks)), len(text))


def without_stop(text: str, stops: Sequence[str], last: str, include: bool = False) -> str:
    """Cut a text that has ended at the first stop string that its last token completes: the engine ignores earlier ones
    (inference/request.py). last: the text of that token. include: keep the stop string."""
    starts = ((stop, max(0, len(text) - len(last) + 1 - len(stop))) for stop in stops)
    at, stop = min(
        ((at, stop) for stop, start in starts if (at := text.find(stop, start)) >= 0), default=(len(text), "")
    )
    return text[: at + len(stop)] if include else text[:at]
