"""foredraft serve learn=true: the head follows the server's traffic.

A thread beside the worker's. When enough has been served (traffic.py keeps it), a round begins: a process of low priority
trains the head further on it (`foredraft train data=accepted`), another decodes held-out texts with the old and the new head.
Where the new one gains more on new texts, beyond twice the standard error, and loses little on those of earlier rounds, it
serves from the next step on. If acceptance falls afterwards, both decode what was served since, and the better one serves.
learned.py has the directory of the heads, and `history.jsonl` there a line per round. Several tenants are several threads.

Nothing here is needed for an answer: processes are killed with the server, what they were doing is resumed by the next one,
and whatever fails is a warning.
"""

import concurrent.futures
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from foredraft.inference.drafters import Drafter
from foredraft.inference.serve.background import TICK, Background, Stopped
from foredraft.inference.serve.completion import Answer
from foredraft.inference.serve.learned import keep_first, new_name, prune, write
from foredraft.inference.serve.traffic import Traffic, acceptance, gain
from foredraft.inference.serve.worker import Worker

log = logging.getLogger("foredraft.serve")
ERRORS = 2.0  # standard errors: what differs by less is chance
MOST_LOST = 0.02  # share of the acceptance on texts of earlier rounds
LIVE, FEWEST = 128, 32  # newest texts whose acceptance is that of the head; of fewer, it says nothing


class Serving(Protocol):
    """Where a head drafts."""

    head: str  # the name of the one that does

    def swap(self, head: Path) -> None:
        """Draft with another one, which requests do not notice. Raises what its loading raises; Stopped."""


class InWorker:
    """A tenant's engine in the worker's thread."""

    def __init__(self, worker: Worker, tenant: int, name: str, load: Callable[..., Drafter]):
        """tenant: its number, and `name`, "" where there is but one. load: a drafter, of the directory `spec`."""
        self.worker, self.engine, self.name, self.load = worker, worker.engines[tenant], name, load

    @property
    def head(self) -> str:
        return self.worker.heads[self.engine].rpartition("/")[2]

    @head.setter
    def head(self, name: str) -> None:
        self.worker.heads[self.engine] = f"{self.name}/{name}" if self.name else name

    def swap(self, head: Path) -> None:
        done: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.worker.inbox.put(partial(self.swap_between_steps, head, done))
        while not concurrent.futures.wait([done], TICK).done:
            if not self.worker.is_alive():
                raise Stopped
        done.result()

    def swap_between_steps(self, head: Path, done: "concurrent.futures.Future[None]") -> None:
        """In the worker's thread: loading may use the device, where a step may be captured."""
        try:
            self.engine.swap(self.load(spec=str(head)))
        except Exception as error:
            done.set_exception(error)
        else:
            self.head = head.name
            done.set_result(None)


class Learning(threading.Thread):
    def __init__(
        self,
        serving: Serving,
        background: Background,
        head: str,
        train: list[str],
        target: dict[str, Any],
        directory: Path,
        rows: int = 256,
        keep: int = 8,
        limit_mib: float = 256.0,
    ):
        """head: the directory of the one that serves. train: arguments of Python that train a head; what is trained on, and
        from where, is added. target: of those processes; a constructor and its arguments, as conf/target has them. rows: new
        texts that begin a round. keep: heads kept on disk. limit_mib: MiB of logged rows."""
        super().__init__(name="learning", daemon=True)
        if rows < 8 or limit_mib <= 0 or keep < 2:
            raise ValueError(
                f"learn.rows={rows} must be at least 8, learn.limit_mib={limit_mib} above 0, and learn.keep={keep} at least 2"
            )
        self.serving, self.background, self.train, self.target = serving, background, train, target
        self.rows, self.keep, self.directory = rows, keep, directory
        keep_first(directory, head)
        self.traffic = Traffic(directory, int(limit_mib * 2**20))
        self.current, self.history = directory / "current", directory / "history.jsonl"
        serving.head = self.current.read_text().strip()
        log.warning(
            "learn=true: token ids of prompts and answers are kept in %s, at most %g MiB, and the head learns from them; a "
            'request with "store": false is left out. %s serves, from there.',
            directory,
            limit_mib,
            serving.head,
        )
        self.live: deque[tuple[int, int]] = deque(maxlen=LIVE)  # gained and forwards of the newest texts
        self.since = time.monotonic()  # when the head that serves began
        self.seconds = 0.0  # that its processes ran
        # The head whose place it took, and the `live` of that; None where it need not be doubted.
        self.before: tuple[str, list[tuple[int, int]]] | None = None

    # -- for the event loop ------------------------------------------------------------------------------------------------

    def write(self, answer: Answer) -> None:
        """An answer has ended."""
        if answer.began > self.since:
            self.live += [(choice.gained, choice.forwards) for choice in answer.choices.values() if choice.accepted]
        self.traffic.write(answer)

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        """Rows of an answer of another engine, which does not tell what it accepted."""
        self.traffic.add(rows)

    def stop(self) -> None:
        self.background.stopped.set()
        self.join()

    # -- in the thread -----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        said = ""
        while not self.background.stopped.wait(TICK):
            try:
                self.follow()
                if self.is_worse():
                    self.compare_again()
                elif self.traffic.round.is_dir() or self.traffic.count >= self.rows:
                    self.learn()
                said = ""
            except Stopped:
                return
            except Exception as error:  # a full disk, say
                if said != (said := f"{type(error).__name__}: {error}"):
                    log.warning("learning: %s", said)
                self.background.stopped.wait(10)

    def learn(self) -> None:
        """A round."""
        parent = self.serving.head
        folder, seconds = self.traffic.begin(seed=int(time.time())), self.seconds
        run, verdict = folder / f"from-{parent}", folder / f"from-{parent}.json"
        given = [
            f"data.path={folder / 'train'}",
            f"+data.cache_dir={folder / 'cache'}",
            f"init_from={self.directory / parent}",
        ]
        sets = [folder / "recent.jsonl", folder / "replay.jsonl"]
        heads = [self.directory / parent, run / "head"]
        facts: dict[str, Any] = {"parent": parent, "outcome": "failed"}
        if self.succeeds([*self.train, *given, f"output_dir={run}"]) and self.judged(heads, sets, verdict):
            (old, new), known = json.loads(verdict.read_text())
            difference, error = gain(old, new)
            facts |= {"recent": [acceptance(old)[0], acceptance(new)[0]], "error": error, "outcome": "no better"}
            if known[0]:
                facts["replay"] = [acceptance(known[0])[0], acceptance(known[1])[0]]
            if difference > ERRORS * error:
                forgot = "replay" in facts and facts["replay"][1] < (1 - MOST_LOST) * facts["replay"][0]
                late = parent != self.serving.head  # another head was chosen by hand meanwhile
                facts["outcome"] = "forgot too much" if forgot else "late" if late else "served"
        facts["seconds"] = round(self.seconds - seconds, 1)
        if facts["outcome"] == "served":
            facts["head"] = new_name(self.directory)
            before = parent, list(self.live)
            self.adopt(run / "head", facts)
            self.follow()
            if self.serving.head != facts["head"]:
                facts["outcome"] = "failed"
            elif len(before[1]) >= FEWEST:
                self.before = before
        self.note(facts)
        self.traffic.end()
        prune(self.directory, self.keep, {self.serving.head, self.before[0] if self.before else ""})

    def adopt(self, head: Path, facts: dict[str, Any]) -> None:
        with (head / "README.md").open("a") as card:
            card.write(f"\n## Learned while serving\n\n```json\n{json.dumps(facts, indent=1)}\n```\n")
        head.rename(self.directory / facts["head"])
        write(self.current, facts["head"])

    def is_worse(self) -> bool:
        """Than the head before it was: on other texts, so this proves nothing."""
        if self.before is None or len(self.live) < FEWEST:
            return False
        (old, old_error), (now, error) = acceptance(self.before[1]), acceptance(list(self.live))
        return old - now > ERRORS * (old_error**2 + error**2) ** 0.5

    def compare_again(self) -> None:
        """With the head before, on texts that neither has learned from: the better one serves."""
        assert self.before is not None
        now, before = self.serving.head, self.before[0]
        rows, verdict = self.directory / "doubted.jsonl", self.directory / "doubted.json"
        rows.write_bytes(self.traffic.newest())
        if self.judged([self.directory / now, self.directory / before], [rows], verdict):
            ((old, new),) = json.loads(verdict.read_text())
            difference, error = gain(old, new)
            outcome = "back" if difference > ERRORS * error and now == self.serving.head else "stays"
            figures = {"recent": [acceptance(old)[0], acceptance(new)[0]], "error": error}
            self.note({"parent": now, "head": before, "outcome": outcome, **figures})
            if outcome == "back":
                write(self.current, before)
        rows.unlink()
        verdict.unlink(missing_ok=True)
        self.before = None

    def judged(self, heads: list[Path], rows: list[Path], verdict: Path) -> bool:
        facts = {"target": self.target, "heads": [*map(str, heads)], "files": [*map(str, rows)], "output": str(verdict)}
        return self.succeeds(["-m", "foredraft.inference.serve.traffic", json.dumps(facts)])

    def note(self, facts: dict[str, Any]) -> None:
        log.info("learning", extra={"facts": facts})
        with self.history.open("a") as file:
            file.write(json.dumps({"time": round(time.time()), **facts}) + "\n")

    # -- which head serves -------------------------------------------------------------------------------------------------

    def follow(self) -> None:
        """Serve with the head that the file `current` names; where it cannot be loaded, the file is set right."""
        if not self.current.exists():
            log.warning("learning: %s was gone, and is written again", self.current)
            write(self.current, self.serving.head)
        name = self.current.read_text().strip()
        if name in ("", self.serving.head):  # somebody has not finished writing it
            return
        try:
            self.serving.swap(self.directory / name)
        except Stopped:
            raise
        except Exception as error:
            log.warning("learning: %s cannot serve: %s", name, error)
            write(self.current, self.serving.head)
        else:
            self.live, self.since = deque(maxlen=LIVE), time.monotonic()
            self.before = None

    def succeeds(self, arguments: list[str]) -> bool:
        """Of a process of Python. Raises Stopped."""
        well, seconds = self.background.run(arguments, self.directory / "process.log", self.follow)
        self.seconds += seconds
        return well
