"""Text that may be shown: nothing that a stop string may still remove, and nothing that may become a mark."""

from collections.abc import Sequence


def find_partial_mark(text: str, marks: Sequence[str]) -> int:
    """Return the position at the end of a text where one of the marks may start; the length of the text if none may."""
    starts = range(max(0, len(text) - max(map(len, marks), default=0) + 1), len(text))
    return next((at for at in starts if any(mark.startswith(text[at:]) for mark in marks)), len(text))


class StopStrings:
    """Hold back the end of a text while it may be the start of a stop string. The engine decides which one ends the text
    (inference/request.py): the text is cut only if its last token completes a stop string."""

    def __init__(self, stops: Sequence[str], include: bool = False):
        """Initialize the buffer. include: show the stop string."""
        self.stops, self.include, self.buffer = tuple(stops), include, ""

    def push(self, text: str) -> str:
        """Return the text that may be shown now."""
        text = self.buffer + text
        cut = find_partial_mark(text, self.stops)
        self.buffer = text[cut:]
        return text[:cut]

    def end(self, text: str = "", last: str = "") -> str:
        """Return the remaining text, after adding `text` and the text of the last token."""
        text, self.buffer = self.buffer + text + last, ""
        starts = ((stop, max(0, len(text) - len(last) + 1 - len(stop))) for stop in self.stops)
        found = [(at, stop) for stop, start in starts if (at := text.find(stop, start)) >= 0]
        if not found:
            return text
        at, stop = min(found)
        return text[: at + len(stop)] if self.include else text[:at]
