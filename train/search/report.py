"""What head=auto tells: a table on the terminal after each round, and search.html."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from foredraft.heads.hub.card import duration
from foredraft.heads.target import Target
from foredraft.heads.target.device import device_name
from foredraft.inference.evaluation import plots
from foredraft.inference.evaluation.benchmark import PLAIN
from foredraft.inference.evaluation.pages import write_page
from foredraft.inference.evaluation.plots import Bar
from foredraft.inference.evaluation.report import Figure
from foredraft.train.runtime.environment import versions
from foredraft.train.search.plan import shown_error
from foredraft.train.search.state import Round, State

HEADINGS = ["candidate", "steps", "tokens/s", "over plain", "tokens per forward", "fixed tree, tokens/s", "verdict"]


def announce(state: State, number: int) -> None:
    """The round on the terminal."""
    print(f"\nround {number + 1}: {state.rounds[number].note}")
    for name, steps, rate, over, length, _, verdict in rows(state, number):
        print(f"  {name:<14} {steps:>6}  {rate:>15} tokens/s  {over:>6}  {length:>5} per forward  {verdict}")
    print(flush=True)


def rows(state: State, number: int) -> Iterator[list[str]]:
    """As HEADINGS, the fastest first, then those that failed."""
    this = state.rounds[number]
    for name in sorted(this.found, key=lambda name: -this.found[name]["tokens_per_second"]):
        facts = this.found[name]
        if name == PLAIN:
            yield ["no head", "", speed(facts), "1.00x", "1.00", "", ""]
            continue
        fixed = facts.get("fixed_tree_tokens_per_second")
        shown = "" if fixed is None else f"{fixed:.1f}"
        numbers = [f"{facts['speedup']:.2f}x", f"{facts['acceptance_length']:.2f}", shown]
        yield [name, str(this.goals[name].until), speed(facts), *numbers, verdict(state, number, name)]
    for name in this.goals.keys() - this.found.keys():
        yield [name, "", "", "", "", "", state.candidates[name].dropped or ""]


def speed(facts: dict[str, Any]) -> str:
    return f"{facts['tokens_per_second']:.1f} {shown_error(facts['standard_error'])}"


def verdict(state: State, number: int, name: str) -> str:
    reason = state.candidates[name].dropped
    if reason is not None and (number + 1 == len(state.rounds) or name not in state.rounds[number + 1].goals):
        return f"dropped: {reason.removeprefix(f'round {number + 1}: ')}"
    return "continues" if len(state.left) > 1 or number + 1 < len(state.rounds) else "wins"


def figures(rounds: list[Round]) -> Iterator[Figure]:
    for number, this in enumerate(rounds, start=1):
        ranked = sorted(this.found.items(), key=lambda pair: -pair[1]["tokens_per_second"])
        bars = [
            Bar(name, facts["tokens_per_second"], "grey" if name == PLAIN else "d1", speed(facts))
            for name, facts in ranked
        ]
        title = f"Round {number}: tokens/s"
        yield title, this.note, plots.bar_chart(title, bars)


def write_search_page(file: Path, state: State, target: Target) -> None:
    values: dict[str, Any] = {
        "title": f"Which head is best for {target.name}?",
        "where": f"{device_name(target.device)} · {str(target.dtype).removeprefix('torch.')} · "
        f"{duration(state.seconds)} so far",
        "figures": list(figures(state.rounds)),
        "tables": [
            (f"Round {number + 1}: {this.note}", HEADINGS, list(rows(state, number)))
            for number, this in enumerate(state.rounds)
        ],
        "dropped": [(name, one.dropped) for name, one in state.candidates.items() if one.dropped is not None],
        "winner": state.left[0] if state.final is not None else None,
        "alone": "" if state.final is None else alone(state),
        "command": " ".join(["python", *sys.argv]),
        "versions": list(versions().items()),
    }
    write_page(file, "search.html.jinja", "foredraft.train.data", **values)


def alone(state: State) -> str:
    """The command that trains the winner by itself, for the same number of steps."""
    assert state.final is not None
    return (
        f"python train/run.py {' '.join(state.candidates[state.left[0]].overrides)} trainer.max_steps={state.final.of}"
    )
