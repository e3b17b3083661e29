"""What head=auto knows so far, in search.json: a search that was stopped resumes from it, and people read it."""

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from foredraft.train.runtime.run_state import differences, write_atomically
from foredraft.train.search.plan import Goal

FILE = "search.json"


@dataclass
class Candidate:
    overrides: list[str]
    step_seconds: float | None = None  # of a training step
    steps: int = 0  # trained so far
    dropped: str | None = None  # why it was dropped


@dataclass
class Round:
    goals: dict[str, Goal]
    prompts: int  # that are measured on
    found: dict[str, dict[str, Any]] = field(default_factory=dict)  # figures of each, by search.figures_of
    note: str = ""  # what was measured on
    judged: bool = False  # is it over?


@dataclass
class State:
    file: Path
    config: dict[str, Any]
    candidates: dict[str, Candidate]
    rounds: list[Round] = field(default_factory=list)
    decode_seconds: float | None = None  # of one text of a round
    spent_seconds: float = 0.0  # before this process
    final: Goal | None = None  # of the winner
    started: float = field(default_factory=time.perf_counter)

    @classmethod
    def open(cls, directory: Path, config: dict[str, Any], candidates: dict[str, list[str]]) -> "State":
        """Open a new search, or one that was stopped there; raise ValueError if that had other settings."""
        fresh = cls(directory / FILE, config, {name: Candidate(given) for name, given in candidates.items()})
        if not fresh.file.exists():
            return fresh
        kept = json.loads(fresh.file.read_text())
        if different := differences(kept["config"], config):
            raise ValueError(
                f"output_dir={directory} holds an unfinished search with other settings ({'; '.join(different[:3])}): give "
                f"another output_dir, the old settings to continue it, or delete {directory}"
            )
        fresh.candidates = {name: Candidate(**facts) for name, facts in kept["candidates"].items()}
        fresh.rounds = [Round(**facts) for facts in kept["rounds"]]
        for one in fresh.rounds:
            one.goals = {name: Goal(*goal) for name, goal in one.goals.items()}
        fresh.decode_seconds, fresh.spent_seconds = kept["decode_seconds"], kept["spent_seconds"]
        fresh.final = None if kept["final"] is None else Goal(*kept["final"])
        return fresh

    def save(self) -> None:
        facts = asdict(self) | {"spent_seconds": round(self.seconds, 3)}
        del facts["file"], facts["started"]
        write_atomically(self.file, json.dumps(facts, indent=1) + "\n")

    @property
    def seconds(self) -> float:
        """Return the seconds that all parts of this search took."""
        return self.spent_seconds + time.perf_counter() - self.started

    @property
    def left(self) -> list[str]:
        """List the candidates that are still in, in their order."""
        return [name for name, one in self.candidates.items() if one.dropped is None]
