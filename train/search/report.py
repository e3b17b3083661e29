"""What head=auto tells: a table on the terminal after each round."""

from collections.abc import Iterator

from foredraft.inference.evaluation.benchmark import BASELINE
from foredraft.train.search.plan import shown_error
from foredraft.train.search.state import State


def announce(state: State, number: int) -> None:
    this = state.rounds[number]
    print(f"\nround {number + 1}: {this.note}")
    for name, steps, rate, over, length, verdict in rows(state, number):
        print(f"  {name:<14} {steps:>6}  {rate:>15} tokens/s  {over:>6}  {length:>5} per forward  {verdict}")
    print(flush=True)


def rows(state: State, number: int) -> Iterator[list[str]]:
    """Yield a row per candidate, the fastest first."""
    this = state.rounds[number]
    for name in sorted(this.found, key=lambda name: -this.found[name]["tokens_per_second"]):
        facts = this.found[name]
        speed = f"{facts['tokens_per_second']:.1f} {shown_error(facts['standard_error'])}"
        if name == BASELINE:
            yield ["no head", "", speed, "1.00x", "1.00", ""]
            continue
        numbers = [f"{facts['speedup']:.2f}x", f"{facts['acceptance_length']:.2f}"]
        yield [name, str(this.goals[name].until), speed, *numbers, verdict(state, number, name)]


def verdict(state: State, number: int, name: str) -> str:
    reason = state.candidates[name].dropped
    if reason is not None:
        return f"dropped: {reason.removeprefix(f'round {number + 1}: ')}"
    return "continues" if len(state.left) > 1 else "wins"
