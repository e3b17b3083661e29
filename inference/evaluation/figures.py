"""The figures of a benchmark, computed from its lines: a row per drafter, category and temperature.

Texts that end in a loop at this temperature are only in the category "loops": a loop is easy to draft, so it would
overestimate every drafter. Speeds include the prompt's forward. They are medians over repeats, with minimum and maximum. A
speedup compares the same texts of the same repeat.
"""

from collections import defaultdict
from collections.abc import Iterable
from statistics import median
from typing import Any, NamedTuple

from foredraft.inference.evaluation.benchmark import BASELINE, Line, Text
from foredraft.inference.evaluation.measure import REPETITIVE, distinct

ALL, LOOPS = "all", "loops"


class Spread(NamedTuple):
    median: float
    least: float
    most: float


class Table:
    """Compute figures from the lines of one temperature."""

    def __init__(self, lines: Iterable[Line], texts: list[Text], temperature: float):
        self.texts = texts
        # decoder -> (repeat, text) -> line. The second has the texts that were decoded in batches.
        self.by_decoder: dict[str, dict[tuple[int, int], Line]] = defaultdict(dict)
        self.batched: dict[str, dict[tuple[int, int], Line]] = defaultdict(dict)
        for line in lines:
            if line["kind"] in ("text", "batched") and line["temperature"] == temperature:
                decoders = self.by_decoder if line["kind"] == "text" else self.batched
                decoders[line["decoder"]][line.get("repeat", 0), line["text"]] = line
        outputs: dict[int, list[int]] = {}  # the baseline's if it decoded the text
        for found in (self.by_decoder[BASELINE], *self.batched.values(), *self.by_decoder.values()):
            for (_, text), line in found.items():
                if "ids" in line:
                    outputs.setdefault(text, line["ids"])
        self.loops = {text for text, ids in outputs.items() if distinct(ids) < REPETITIVE}

    def chosen(self, category: str) -> set[int]:
        if category == LOOPS:
            return self.loops
        named = {number for number, text in enumerate(self.texts) if category in (ALL, text.category)}
        return named - self.loops

    def lines(self, decoder: str, category: str) -> list[Line]:
        """Return the lines that acceptance is computed from: those of the batches, if there are any."""
        chosen = self.chosen(category)
        lines = self.batched.get(decoder) or self.by_decoder[decoder]
        return [line for (_, text), line in lines.items() if text in chosen]

    def timed(self, decoder: str, category: str) -> list[Line]:
        chosen = self.chosen(category)
        return [line for (_, text), line in self.by_decoder[decoder].items() if text in chosen]

    def rates(self, decoder: str, category: str) -> Spread | None:
        """Return the tokens per second."""
        lines = self.timed(decoder, category)
        repeats = sorted({line["repeat"] for line in lines})
        return spread([rate([line for line in lines if line["repeat"] == number]) for number in repeats])

    def speedup(self, decoder: str, category: str) -> Spread | None:
        """Return the tokens per second over those of the baseline."""
        mine, theirs = self.by_decoder[decoder], self.by_decoder[BASELINE]
        both = [key for key in mine.keys() & theirs.keys() if key[1] in self.chosen(category)]
        ratios = []
        for repeat in sorted({key[0] for key in both}):
            keys = [key for key in both if key[0] == repeat]
            ratios.append(rate([mine[key] for key in keys]) / rate([theirs[key] for key in keys]))
        return spread(ratios)


def rate(lines: list[Line]) -> float:
    return sum(line["tokens"] for line in lines) / sum(line["seconds"] for line in lines)


def spread(values: list[float]) -> Spread | None:
    return Spread(median(values), min(values), max(values)) if values else None


def acceptance(lines: list[Line]) -> float | None:
    """Return the acceptance length: tokens per target forward."""
    emitted = [count for line in lines for count in line.get("emitted", [])]
    return sum(emitted) / len(emitted) if emitted else None


def accepted_shares(lines: list[Line]) -> list[float]:
    """Return the share of steps that accepted at least d drafts, for d = 1, 2, ... up to the most that a step accepted."""
    accepted = [count for line in lines for count in line.get("accepted", [])]
    depths = range(1, max(accepted, default=0) + 1)
    return [sum(count >= depth for count in accepted) / len(accepted) for depth in depths]


def decoder_figures(table: Table, decoder: str, category: str, chain: str | None) -> dict[str, Any] | None:
    """Return the figures of a decoder; None without texts of this category. chain: name of the decoder of its chain."""
    lines = table.lines(decoder, category)
    if not lines:
        return None
    return {
        "texts": len({line["text"] for line in lines}),
        "timed_texts": len({line["text"] for line in table.timed(decoder, category)}),
        "acceptance_length": acceptance(lines),
        "chain_acceptance_length": acceptance(table.lines(chain, category)) if chain else None,
        "accepted_per_depth": accepted_shares(lines),
        "tokens_per_second": table.rates(decoder, category),
        "speedup": table.speedup(decoder, category),
    }
