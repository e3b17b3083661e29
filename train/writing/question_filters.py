"""Which conversations that a target wrote with itself are worth learning from (train/writing/magpie.py).

A question is dropped for what shows that the target lost its thread; an answer is cut where it starts to repeat itself,
which decoding drafts without having learned anything. No model judges: these are rules on text, and the card counts each.
"""

import re
import unicodedata
import zlib
from collections import Counter, defaultdict
from collections.abc import Sequence

SHORTEST = 12  # characters of a question
LETTERS = 0.6  # share of letters and spaces in a question, at least
ONE_SCRIPT = 0.85  # share of its letters in one script
SHINGLE, DUPLICATE = 4, 0.7  # words that are compared together; Jaccard similarity of two questions that are alike
REPEATED = 12  # tokens said twice in a row of an answer that loops
LONGEST_PERIOD = 16


class QuestionFilter:
    """Filter questions, and remember those that were kept. script: the only one wanted (LATIN, CJK ...), None for any."""

    def __init__(self, script: str | None = None):
        self.script = None if script is None else script.upper()
        self.sizes: list[int] = []  # shingles of each question
        self.questions: defaultdict[int, list[int]] = defaultdict(list)  # with a shingle

    def add(self, question: str) -> None:
        found = shingles(question)
        for shingle in found:
            self.questions[shingle].append(len(self.sizes))
        self.sizes.append(len(found))

    def is_duplicate(self, question: str) -> bool:
        """Return whether one earlier question is nearly the same. A comparison with all of them together would reject ever
        more good questions as the set grows."""
        found = shingles(question)
        shared = Counter(number for shingle in found for number in self.questions.get(shingle, ()))
        return any(count >= DUPLICATE * (len(found) + self.sizes[number] - count) for number, count in shared.items())

    def reason(self, question: str, tokens: Sequence[int], special: bool, ended: bool) -> str | None:
        """Return why a question is rejected, None if it is kept. special: whether it contains marks of the template. ended:
        whether the target ended it."""
        name, share = main_script(question)
        plain = sum(sign.isalpha() or sign.isspace() for sign in question)
        rules = {
            "question without an end": not ended,
            "question with marks of the template": special,
            "question too short": len(question) < SHORTEST,
            "question that repeats itself": loops(tokens),
            "question with few letters": plain < LETTERS * len(question),
            "question in several scripts": share < ONE_SCRIPT,
            f"question not in {self.script}": self.script not in (None, name),
            "question that ends badly": question.endswith(tuple(":,;-([")),
            "question like an earlier one": self.is_duplicate(question),
        }
        return next((reason for reason, broken in rules.items() if broken), None)


def shingles(text: str) -> set[int]:
    words = re.findall(r"\w+", text.lower())
    starts = range(max(1, len(words) - SHINGLE + 1))
    return {zlib.crc32(" ".join(words[i : i + SHINGLE]).encode()) for i in starts}


def main_script(text: str) -> tuple[str, float]:
    """Return the script of most letters, as Unicode names it, and its share of them."""
    counts = Counter(unicodedata.name(sign, "NONE").split()[0] for sign in text if sign.isalpha())
    if not counts:
        return "NONE", 1.0
    name, count = counts.most_common(1)[0]
    return name, count / counts.total()


def loops(tokens: Sequence[int]) -> bool:
    """Return whether a text repeats a few tokens over and over at its end, or little else from start to end."""
    ids = list(tokens)
    if len(ids) >= 48:
        grams = [tuple(ids[i : i + 6]) for i in range(len(ids) - 5)]
        if len(set(grams)) < 0.55 * len(grams) or len(set(grams[-48:])) < 24:
            return True
    periods = range(1, min(LONGEST_PERIOD, (len(ids) - 8) // 4) + 1)
    return any(ids[-(4 * period + 8) : -period] == ids[-(3 * period + 8) :] for period in periods)


def before_loop(tokens: Sequence[int]) -> int:
    """Return the number of tokens of a text before REPEATED tokens occur a second time."""
    seen: set[tuple[int, ...]] = set()
    for i in range(len(tokens) - REPEATED + 1):
        some = tuple(tokens[i : i + REPEATED])
        if some in seen:
            return i
        seen.add(some)
    return len(tokens)
