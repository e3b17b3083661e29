"""The figures of a benchmark, computed from its lines: a row per drafter, category and temperature.

Texts whose baseline ends in a loop at this temperature are only in the category "loops": a loop is easy to draft, so it would
overestimate every drafter. Speeds are medians over repeats, with minimum and maximum. A speedup compares the same texts of
the same repeat.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

from foredraft.inference.evaluation.benchmark import BASELINE, Line, Text
from foredraft.inference.evaluation.measure import REPETITIVE, distinct

ALL, LOOPS = "all", "loops"


class Spread(NamedTuple):
    median: float
    least: float
    most: float


Rate = Callable[[Line], tuple[float, float]]  # returns tokens and seconds of a text


def with_prefill(line: Line) -> tuple[float, float]:
    return line["tokens"], line["seconds"]


def without_prefill(line: Line) -> tuple[float, float]:
    """Return tokens and seconds without the prompt's forward."""
    return line["tokens"] - line["first_tokens"], line["seconds"] - line["first_seconds"]


class Table:
    """Compute figures from the lines of one temperature."""

    def __init__(self, lines: Iterable[Line], texts: list[Text], temperature: float):
        self.texts = texts
        # decoder -> (repeat, text) -> line
        self.by_decoder: dict[str, dict[tuple[int, int], Line]] = defaultdict(dict)
        for line in lines:
            if line["kind"] == "text" and line["temperature"] == temperature:
                self.by_decoder[line["decoder"]][line["repeat"], line["text"]] = line
        baseline = self.by_decoder[BASELINE]
        self.loops = {text for (_, text), line in baseline.items() if distinct(line.get("ids", [])) < REPETITIVE}

    def chosen(self, category: str) -> set[int]:
        if category == LOOPS:
            return self.loops
        named = {number for number, text in enumerate(self.texts) if category in (ALL, text.category)}
        return named - self.loops

    def lines(self, decoder: str, category: str) -> list[Line]:
        chosen = self.chosen(category)
        return [line for (_, text), line in self.by_decoder[decoder].items() if text in chosen]

    def rates(self, decoder: str, category: str, what: Rate) -> Spread | None:
        """Return the tokens per second."""
        return spread([rate(lines, what) for lines in by_repeat(self.lines(decoder, category)).values()])

    def speedup(self, decoder: str, over: str, category: str, what: Rate) -> Spread | None:
        mine, theirs = self.by_decoder[decoder], self.by_decoder[over]
        both = [key for key in mine.keys() & theirs.keys() if key[1] in self.chosen(category)]
        found = []
        for repeat in sorted({key[0] for key in both}):
            keys = [key for key in both if key[0] == repeat]
            found.append(rate([mine[key] for key in keys], what) / rate([theirs[key] for key in keys], what))
        return spread(found)

    def best_rival(self, rivals: Iterable[str], category: str) -> str | None:
        speeds = {name: self.rates(name, category, with_prefill) for name in rivals}
        known = {name: found.median for name, found in speeds.items() if found is not None}
        return max(known, key=lambda name: known[name], default=None)


def by_repeat(lines: Iterable[Line]) -> dict[int, list[Line]]:
    found: dict[int, list[Line]] = defaultdict(list)
    for line in lines:
        found[line["repeat"]].append(line)
    return found


def rate(lines: list[Line], what: Rate) -> float:
    pairs = [what(line) for line in lines]
    return sum(tokens for tokens, _ in pairs) / max(1e-9, sum(seconds for _, seconds in pairs))


def spread(values: list[float]) -> Spread | None:
    return Spread(median(values), min(values), max(values)) if values else None


def acceptance(lines: list[Line]) -> float | None:
    """Return the acceptance length: tokens per target forward."""
    emitted = [count for line in lines for count in line.get("emitted", [])]
    return sum(emitted) / len(emitted) if emitted else None


def conditional(lines: list[Line]) -> list[float]:
    """Return, for d = 1, 2, ..., the share of the drafting steps with at least d - 1 accepted drafts that accepted d."""
    pairs = [pair for line in lines for pair in zip(line.get("accepted", []), line.get("nodes", []))]
    counts = [accepted for accepted, nodes in pairs if nodes > 1]
    reached = [sum(count >= depth for count in counts) for depth in range(max(counts, default=0) + 1)]
    return [after / before for before, after in pairwise(reached)]


def by_context(table: Table, lines: list[Line]) -> dict[str, float]:
    """Return the acceptance length by the length of the text at the step, in ranges up to 256, 512, 1024, ... tokens."""
    counts: dict[int, list[int]] = defaultdict(list)
    for line in lines:
        length = len(table.texts[line["text"]].tokens) + line.get("first_tokens", 1)
        for emitted in line.get("emitted", []):
            counts[max(256, 1 << (length - 1).bit_length())].append(emitted)
            length += emitted
    return {str(end): sum(counts[end]) / len(counts[end]) for end in sorted(counts)}


def decoder_figures(
    table: Table, decoder: str, category: str, rivals: list[str], chain: str | None
) -> dict[str, Any] | None:
    """Return the figures of a decoder; None without texts of this category. chain: name of the decoder of its chain."""
    lines = table.lines(decoder, category)
    if not lines:
        return None
    best = table.best_rival(rivals, category)
    tau, over_baseline = acceptance(lines), table.speedup(decoder, BASELINE, category, without_prefill)
    return {
        "texts": len({line["text"] for line in lines}),
        "acceptance_length": tau,
        "chain_acceptance_length": acceptance(table.lines(chain, category)) if chain else None,
        "accepted_per_depth": conditional(lines),
        "by_context": by_context(table, lines),
        "tokens_per_second": table.rates(decoder, category, without_prefill),
        "tokens_per_second_with_prefill": table.rates(decoder, category, with_prefill),
        "speedup": over_baseline,
        "speedup_with_prefill": table.speedup(decoder, BASELINE, category, with_prefill),
        "best_rival": best,
        "over_best_rival": None if best is None else table.speedup(decoder, best, category, with_prefill),
        "eta": over_baseline.median / tau if over_baseline is not None and tau else None,
    }
