"""foredraft serve learn=true: the head learns from the server's traffic.

A thread runs next to the worker's. When enough texts were served (traffic.py stores them), a round starts: a low-priority
process trains the head further on them (`foredraft train data=accepted`), and another decodes held-out texts with the old and
the new head. If the acceptance length of the new one is significantly higher on new texts, and hardly lower on those of
earlier rounds, it serves from the next step on. If acceptance drops later, both are compared on newer texts, and the better
one serves. learned.py has the directory of the heads, whose `history.jsonl` has a line per round. Each tenant has a thread.

Answers do not depend on any of this: processes end with the server, the next server resumes their work, and failures are only
warnings.
"""

import concurrent.futures
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from foredraft.inference.drafters import Drafter
from foredraft.inference.serve.background import TICK, Background, Stopped
from foredraft.inference.serve.completion import Answer
from foredraft.inference.serve.learned import import_initial_head, new_name, prune, write_atomically
from foredraft.inference.serve.traffic import Traffic, acceptance, acceptance_difference
from foredraft.inference.serve.worker import Worker

log = logging.getLogger("foredraft.serve")
ERRORS = 2.0  # a larger difference, in standard errors, is significant
MAX_REGRESSION = 0.02  # maximum relative loss of acceptance length on texts of earlier rounds
LIVE, MIN_LIVE = 128, 32  # number of newest texts that measure the head in use, and the minimum for a measurement


class ServingHead:
    """Replace the head of a tenant's engine, which runs in the worker's thread."""

    def __init__(self, worker: Worker, tenant: int, name: str, load: Callable[..., Drafter]):
        """Initialize with the tenant's number and name ("" for a single one). load: loads the drafter `spec`, a directory."""
        self.worker, self.engine, self.name, self.load = worker, worker.engines[tenant], name, load

    @property
    def head(self) -> str:
        return self.worker.heads[self.engine].rpartition("/")[2]

    @head.setter
    def head(self, name: str) -> None:
        self.worker.heads[self.engine] = f"{self.name}/{name}" if self.name else name

    def swap(self, head: Path) -> None:
        """Draft with another head, invisibly for requests. Raises Stopped, and what loading the head raises."""
        done: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.worker.inbox.put(partial(self.swap_between_steps, head, done))
        while not concurrent.futures.wait([done], TICK).done:
            if not self.worker.is_alive():
                raise Stopped
        done.result()

    def swap_between_steps(self, head: Path, done: "concurrent.futures.Future[None]") -> None:
        """Load the head in the worker's thread, because loading may use the device while a step is being captured."""
        try:
            self.engine.swap(self.load(path=str(head)))
        except Exception as error:
            done.set_exception(error)
        else:
            self.head = head.name
            done.set_result(None)


class Learning(threading.Thread):
    def __init__(
        self,
        serving: ServingHead,
        background: Background,
        head: str,
        train: list[str],
        target: dict[str, Any],
        directory: Path,
        rows: int = 256,
        keep: int = 8,
        limit_mib: float = 256.0,
    ):
        """Start with the directory of the head in use. train: Python arguments that train a head; data and head are added.
        target: constructor and arguments of the target in these processes (conf/options). rows: number of new texts
        that start a round. keep: maximum number of heads on disk. limit_mib: maximum size of the stored texts."""
        super().__init__(name="learning", daemon=True)
        if rows < 8 or limit_mib <= 0 or keep < 2:
            raise ValueError(
                f"learn.num_samples={rows} must be at least 8, learn.limit_mib={limit_mib} above 0, learn.keep={keep} above 1"
            )
        self.serving, self.background, self.train, self.target = serving, background, train, target
        self.rows, self.keep, self.directory = rows, keep, directory
        import_initial_head(directory, head)
        self.traffic = Traffic(directory, int(limit_mib * 2**20))
        self.current, self.history = directory / "current", directory / "history.jsonl"
        serving.head = self.current.read_text().strip()
        log.warning(
            "learn=true: token ids of prompts and answers are stored in %s (at most %g MiB), and the head learns from it. A "
            'request with "store": false is excluded. %s, from this directory, is in use.',
            directory,
            limit_mib,
            serving.head,
        )
        self.live: deque[tuple[int, int]] = deque(maxlen=LIVE)  # new tokens and forwards of the newest texts
        self.since = time.monotonic()  # when the head in use started to serve
        self.seconds = 0.0  # total run time of its processes
        # The previous head and its `live`; None if it need not be compared again.
        self.before: tuple[str, list[tuple[int, int]]] | None = None

    # -- called in the event loop ------------------------------------------------------------------------------------------

    def write(self, answer: Answer) -> None:
        """Record a finished answer."""
        if answer.began > self.since:
            self.live += [(choice.emitted, choice.forwards) for choice in answer.choices.values() if choice.accepted]
        self.traffic.write(answer)

    def stop(self) -> None:
        self.background.stopped.set()
        self.join()

    # -- called in the thread ----------------------------------------------------------------------------------------------

    def run(self) -> None:
        last_error = ""
        while not self.background.stopped.wait(TICK):
            try:
                self.sync_current_head()
                if self.acceptance_dropped():
                    self.recheck_previous_head()
                elif self.traffic.round.is_dir() or self.traffic.count >= self.rows:
                    self.learn()
                last_error = ""
            except Stopped:
                return
            except Exception as error:  # a full disk, for example
                if last_error != (last_error := f"{type(error).__name__}: {error}"):
                    log.warning("learning: %s", last_error)
                self.background.stopped.wait(10)

    def learn(self) -> None:
        """Run a round."""
        parent = self.serving.head
        folder, seconds = self.traffic.begin(seed=int(time.time())), self.seconds
        run, comparison = folder / f"from-{parent}", folder / f"from-{parent}.json"
        overrides = [
            f"data.path={folder / 'train'}",
            f"+data.cache_dir={folder / 'cache'}",
            f"init_from={self.directory / parent}",
        ]
        sets = [folder / "recent.jsonl", folder / "replay.jsonl"]
        heads = [self.directory / parent, run / "head"]
        facts: dict[str, Any] = {"parent": parent, "outcome": "failed"}
        trained = self.run_process([*self.train, *overrides, f"output_dir={run}"])
        if trained and self.evaluate_heads(heads, sets, comparison):
            (old, new), replay = json.loads(comparison.read_text())
            difference, error = acceptance_difference(old, new)
            facts |= {"recent": [acceptance(old)[0], acceptance(new)[0]], "error": error, "outcome": "no better"}
            if replay[0]:
                facts["replay"] = [acceptance(replay[0])[0], acceptance(replay[1])[0]]
            if difference > ERRORS * error:
                forgot = "replay" in facts and facts["replay"][1] < (1 - MAX_REGRESSION) * facts["replay"][0]
                late = parent != self.serving.head  # another head was chosen manually in the meantime
                facts["outcome"] = "forgot too much" if forgot else "late" if late else "served"
        facts["seconds"] = round(self.seconds - seconds, 1)
        if facts["outcome"] == "served":
            facts["head"] = new_name(self.directory)
            before = parent, list(self.live)
            self.install_head(run / "head", facts)
            self.sync_current_head()
            if self.serving.head != facts["head"]:
                facts["outcome"] = "failed"
            elif len(before[1]) >= MIN_LIVE:
                self.before = before
        self.log_event(facts)
        self.traffic.end()
        prune(self.directory, self.keep, {self.serving.head, self.before[0] if self.before else ""})

    def install_head(self, head: Path, facts: dict[str, Any]) -> None:
        with (head / "README.md").open("a") as card:
            card.write(f"\n## Learned while serving\n\n```json\n{json.dumps(facts, indent=1)}\n```\n")
        head.rename(self.directory / facts["head"])
        write_atomically(self.current, facts["head"])

    def acceptance_dropped(self) -> bool:
        """Return whether acceptance is lower than with the previous head. Texts differ, so this is only an indication."""
        if self.before is None or len(self.live) < MIN_LIVE:
            return False
        (old, old_error), (now, error) = acceptance(self.before[1]), acceptance(list(self.live))
        return old - now > ERRORS * (old_error**2 + error**2) ** 0.5

    def recheck_previous_head(self) -> None:
        """Compare with the previous head on texts that neither was trained on, and serve with the better one."""
        assert self.before is not None
        now, before = self.serving.head, self.before[0]
        texts, comparison = self.directory / "recheck.jsonl", self.directory / "recheck.json"
        texts.write_bytes(self.traffic.newest())
        if self.evaluate_heads([self.directory / now, self.directory / before], [texts], comparison):
            ((old, new),) = json.loads(comparison.read_text())
            difference, error = acceptance_difference(old, new)
            outcome = "back" if difference > ERRORS * error and now == self.serving.head else "stays"
            figures = {"recent": [acceptance(old)[0], acceptance(new)[0]], "error": error}
            self.log_event({"parent": now, "head": before, "outcome": outcome, **figures})
            if outcome == "back":
                write_atomically(self.current, before)
        texts.unlink()
        comparison.unlink(missing_ok=True)
        self.before = None

    def evaluate_heads(self, heads: list[Path], texts: list[Path], comparison: Path) -> bool:
        facts = {"target": self.target, "heads": [*map(str, heads)], "files": [*map(str, texts)]}
        facts["output"] = str(comparison)
        return self.run_process(["-m", "foredraft.inference.serve.traffic", json.dumps(facts)])

    def log_event(self, facts: dict[str, Any]) -> None:
        log.info("learning", extra={"facts": facts})
        with self.history.open("a") as file:
            file.write(json.dumps({"time": round(time.time()), **facts}) + "\n")

    # -- the head in use ---------------------------------------------------------------------------------------------------

    def sync_current_head(self) -> None:
        """Serve with the head that the file `current` names. If it cannot be loaded, the file is corrected."""
        if not self.current.exists():
            log.warning("learning: %s was deleted, and is written again", self.current)
            write_atomically(self.current, self.serving.head)
        name = self.current.read_text().strip()
        if name in ("", self.serving.head):  # an empty file is still being written
            return
        try:
            self.serving.swap(self.directory / name)
        except Stopped:
            raise
        except Exception as error:
            log.warning("learning: %s cannot serve: %s", name, error)
            write_atomically(self.current, self.serving.head)
        else:
            self.live, self.since = deque(maxlen=LIVE), time.monotonic()
            self.before = None

    def run_process(self, arguments: list[str]) -> bool:
        """Run a Python process and return whether it succeeded. Raises Stopped."""
        well, seconds = self.background.run(arguments, self.directory / "process.log", self.sync_current_head)
        self.seconds += seconds
        return well
