"""The arithmetic of head=auto: how a budget becomes steps, and how a round's measurements become a verdict.

Successive halving (Jamieson and Talwalkar, arXiv:1502.07943, algorithm 1): every round gets the same part of the search's
budget, its candidates get equal parts of that, and the better half continues from where it is.

Every candidate trains by the learning rate's schedule of the training that it would have if it won, cut short by its rounds:
so the winner simply continues, and rounds compare all heads at the same share of their training.
"""

import math
import re
from collections.abc import Collection
from statistics import median
from typing import NamedTuple

from foredraft.inference.evaluation import figures
from foredraft.inference.evaluation.figures import Table

UNITS = {"s": 1, "m": 60, "h": 3600, "steps": 1}
JUDGING = 0.3  # of a round's time at most: a short budget measures on fewer prompts
FEWEST_PROMPTS = 3  # one alone has no standard error, and some end in loops


class Budget(NamedTuple):
    amount: float  # seconds or optimizer steps
    in_steps: bool

    def shown(self, amount: float) -> str:
        """Format an amount of this kind, as it is typed, rounded up."""
        if self.in_steps:
            return f"{math.ceil(amount)}steps"
        return f"{math.ceil(amount)}s" if amount < 120 else f"{math.ceil(amount / 60)}m"


class Goal(NamedTuple):
    """Hold how far a candidate trains in a round."""

    until: int  # step
    of: int  # steps of its whole training if it wins, which the learning rate follows


class Judged(NamedTuple):
    """Hold what a drafter measured over a round's texts."""

    tokens: list[float]  # of each text
    seconds: list[float]  # the medians of its repeats

    @property
    def rate(self) -> float:
        """Return tokens per second."""
        return sum(self.tokens) / sum(self.seconds)

    @property
    def parts(self) -> list[float]:
        """Return what each text contributes to the deviation of `rate`, a ratio of two sums, in tokens per second."""
        whole = sum(self.seconds)
        return [(tokens - self.rate * seconds) / whole for tokens, seconds in zip(self.tokens, self.seconds)]

    @property
    def error(self) -> float | None:
        """Return the standard error of `rate` over texts."""
        return standard_error(self.parts)

    def behind(self, other: "Judged") -> tuple[float, float | None]:
        """Return how many tokens per second it is slower, and the standard error: on the same texts, so a text that is hard
        for both counts little."""
        return other.rate - self.rate, standard_error([a - b for a, b in zip(self.parts, other.parts, strict=True)])


def standard_error(parts: list[float]) -> float | None:
    """Return the standard error of a sum whose terms deviate by `parts`; None for only one term."""
    return math.sqrt(len(parts) / (len(parts) - 1) * sum(x * x for x in parts)) if len(parts) > 1 else None


def shown_error(error: float | None) -> str:
    return "± ?" if error is None else f"± {error:.1f}"


def parse_budget(text: str) -> Budget:
    """Parse a budget. Raise ValueError for what is neither a time nor a number of steps."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(h|m|s|steps)", text.strip())
    if match is None or float(match[1]) == 0:
        raise ValueError(
            f"budget={text} is not an amount: give a time such as 2h, 30m or 90s, or optimizer steps such as 4000steps"
        )
    return Budget(float(match[1]) * UNITS[match[2]], match[2] == "steps")


def round_sizes(candidates: int) -> list[int]:
    """Return the number of candidates in each round: 10 gives 10, 5, 3, 2. A single one needs no round."""
    found = []
    while candidates > 1:
        found.append(candidates)
        candidates = math.ceil(candidates / 2)
    return found


def shares(sizes: list[int], number: int, search_share: float) -> tuple[float, float]:
    """Return, of the rest of the budget when round `number` (from 0) starts: the share of each of its candidates, and the
    share that the one that wins it all still gets after this round."""
    each = [search_share / (len(sizes) * size) for size in sizes]
    final = 1 - search_share
    left = sum(share * size for share, size in zip(each[number:], sizes[number:])) + final
    return each[number] / left, (sum(each[number + 1 :]) + final) / left


def goal(done: int, step_cost: float, train: float, afterwards: float) -> Goal:
    """Return a candidate's goal, at least one step. done: steps so far; train, afterwards: of the budget, in this round and
    if it wins; at least one step."""
    until = done + max(1, int(train / step_cost))
    return Goal(until, until + max(0, int(afterwards / step_cost)))


def prompts_within(seconds: float, fixed: float, each: float, most: int) -> int:
    """Return the number of prompts that a round of `seconds` measures. fixed, each: seconds that measuring takes without
    any, and for each prompt."""
    return max(min(FEWEST_PROMPTS, most), min(most, int((JUDGING * seconds - fixed) / each)))


def check_enough(
    budget: Budget, share: float, spent: float, judging: float, costs: dict[str, float], size: int
) -> None:
    """Raise ValueError where the first round has not one step for every candidate. share: of each, of what is left; judging:
    what measuring one candidate on the fewest prompts takes."""
    slowest = max(costs, key=lambda name: costs[name])
    need = spent + (costs[slowest] + judging) / share
    if need > budget.amount:
        raise ValueError(
            f"budget={budget.shown(budget.amount)} is too small for a round of {size} candidates ({slowest} is the slowest): "
            f"give at least {budget.shown(need)}, or name fewer in heads=[...]"
        )


def judged(table: Table, name: str, texts: Collection[int]) -> Judged:
    """Measure `name` on these texts, prompt included, as a user waits for them."""
    lines = [line for (_, text), line in table.by_decoder[name].items() if text in texts]
    by_text = {text: [figures.with_prefill(line) for line in lines if line["text"] == text] for text in sorted(texts)}
    return Judged(
        [pairs[0][0] for pairs in by_text.values()],
        [median(seconds for _, seconds in pairs) for pairs in by_text.values()],
    )


def verdicts(found: dict[str, Judged], keep: int) -> dict[str, str]:
    """Return why each dropped candidate of a round is dropped. keep: the number that stays."""
    ranked = sorted(found, key=lambda name: -found[name].rate)
    reasons = {}
    for name in ranked[keep:]:
        last = ranked[keep - 1]
        gap, error = found[name].behind(found[last])
        within = "on one text alone" if error is None else "within two standard errors"
        doubt = f"; that is {within}, so it may be as good" if error is None or gap < 2 * error else ""
        against = f"{last}, which won" if keep == 1 else f"{last}, the slowest that went on"
        reasons[name] = (
            f"{found[name].rate:.1f} {shown_error(found[name].error)} tokens/s, "
            f"{gap:.1f} {shown_error(error)} fewer than {against}{doubt}"
        )
    return reasons
