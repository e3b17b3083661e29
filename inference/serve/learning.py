"""foredraft serve learn=true: the head follows the server's traffic.

A thread beside the worker's. When enough has been served (traffic.py keeps it), a round begins: a process of low priority
trains the head further on it (`foredraft train data=accepted`), another decodes held-out texts with the old and the new head.
Where the new one gains more on new texts, beyond twice the standard error, and loses little on those of earlier rounds, it
serves from the next step on. If acceptance falls afterwards, both decode what was served since, and the better one serves.

    learned/head-0001/ ..    every head that has served, with its card; the first is a copy of drafter=
    learned/current          the name of the one that serves: whoever writes another into it changes it (`follow`)
    learned/history.jsonl    a line per round

Nothing here is needed for an answer: processes are killed with the server, what they were doing is resumed by the next one,
and whatever fails is a warning.
"""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from foredraft.heads import adapter
from foredraft.heads.base import BlockHead
from foredraft.heads.checkpoint import read_config
from foredraft.heads.hub import find
from foredraft.heads.uno import UnoHead
from foredraft.inference.drafters import Drafter, tree_of
from foredraft.inference.serve.completion import Answer
from foredraft.inference.serve.traffic import Traffic, acceptance, gain
from foredraft.inference.serve.worker import Worker

log = logging.getLogger("foredraft.serve")
TICK = 0.05  # seconds between two looks at a process
IDLE = 0.25  # seconds without a request after which a CPU is idle
ATTEMPTS = 5  # that a process has to end well
ERRORS = 2.0  # standard errors: what differs by less is chance
MOST_LOST = 0.02  # share of the acceptance on texts of earlier rounds
LIVE, FEWEST = 128, 32  # newest texts whose acceptance is that of the head; of fewer, it says nothing
# A process lets all others go first, and dies with the thread that starts it, also where the server is killed.
CHILD = """
import ctypes, os, sys
os.nice(19)
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


class Stopped(Exception):
    """The server ends."""


class Learning(threading.Thread):
    def __init__(
        self,
        worker: Worker,
        load: Callable[..., Drafter],
        head: str,
        train: list[str],
        target: dict[str, Any],
        directory: str,
        rows: int = 256,
        budget: float = 60.0,
        share: float | None = None,
        limit_mib: float = 256.0,
    ):
        """load: a drafter, of the directory `spec`; the one that serves is of `head`. train: arguments of Python that train a
        head; what is trained on, and from where, is added. target: of those processes; a constructor and its arguments, as
        conf/target has them. rows: new texts that begin a round. budget: minutes that a process of it may run. share: of the
        time that it may run; None is 0.1 on a GPU, and on a CPU, where it runs while nothing is served, all of that.
        limit_mib: MiB of logged rows."""
        super().__init__(name="learning", daemon=True)
        self.on_gpu = str(target.get("device") or worker.target.device).startswith("cuda")
        self.share = share if share is not None else 0.1 if self.on_gpu else 1.0
        if rows < 8 or budget <= 0 or not 0 < self.share <= 1 or limit_mib <= 0:
            raise ValueError(
                f"learn.rows={rows} must be at least 8, learn.budget={budget} and learn.limit_mib={limit_mib} above 0, and "
                f"learn.share={share} between 0 and 1"
            )
        self.worker, self.load, self.train, self.target = worker, load, train, target
        self.rows, self.budget, self.directory = rows, 60 * budget, Path(directory)
        self.directory.mkdir(0o700, parents=True, exist_ok=True)  # texts are nobody else's
        keep_first(self.directory, head)
        self.traffic = Traffic(self.directory, int(limit_mib * 2**20))
        self.current, self.history = self.directory / "current", self.directory / "history.jsonl"
        worker.drafter_name = self.current.read_text().strip()
        log.warning(
            "learn=true: token ids of prompts and answers are kept in %s, at most %g MiB, and the head learns from them; a "
            'request with "store": false is left out. %s serves, from there.',
            directory,
            limit_mib,
            worker.drafter_name,
        )
        worker.on_reserve = self.hold
        self.live: deque[tuple[int, int]] = deque(maxlen=LIVE)  # gained and forwards of the newest texts
        self.since = time.monotonic()  # when the head that serves began
        # The head whose place it took, and the `live` of that; None where it need not be doubted.
        self.before: tuple[str, list[tuple[int, int]]] | None = None
        self.stopped, self.lock = threading.Event(), threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None
        self.allowed = self.goes = True  # whether its share of time lets the process run; whether it runs
        self.busy = time.monotonic()  # when something was served last
        self.seconds = 0.0  # that processes ran

    # -- for the event loop ------------------------------------------------------------------------------------------------

    def write(self, answer: Answer) -> None:
        """An answer has ended."""
        if answer.began > self.since:
            self.live += [(choice.gained, choice.forwards) for choice in answer.choices.values() if choice.accepted]
        self.traffic.write(answer)

    def hold(self) -> None:
        """A request has come."""
        if not self.on_gpu:
            self.steer()

    def stop(self) -> None:
        self.stopped.set()
        self.join()

    # -- in the thread -----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        while not self.stopped.wait(TICK):
            try:
                self.follow()
                if self.is_worse():
                    self.compare_again()
                elif self.traffic.round.is_dir() or self.traffic.count >= self.rows:
                    self.learn()
            except Stopped:
                return
            except Exception as error:  # a full disk, say
                log.warning("learning: %s: %s", type(error).__name__, error)
                self.stopped.wait(10)

    def learn(self) -> None:
        """A round."""
        parent = self.worker.drafter_name
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
                late = parent != self.worker.drafter_name  # another head was chosen by hand meanwhile
                facts["outcome"] = "forgot too much" if forgot else "late" if late else "served"
        facts["seconds"] = round(self.seconds - seconds, 1)
        if facts["outcome"] == "served":
            facts["head"] = new_name(self.directory)
            before = parent, list(self.live)
            self.adopt(run / "head", facts)
            self.follow()
            if self.worker.drafter_name != facts["head"]:
                facts["outcome"] = "failed"
            elif len(before[1]) >= FEWEST:
                self.before = before
        self.note(facts)
        self.traffic.end()

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
        now, before = self.worker.drafter_name, self.before[0]
        rows, verdict = self.directory / "doubted.jsonl", self.directory / "doubted.json"
        rows.write_bytes(self.traffic.newest())
        if self.judged([self.directory / now, self.directory / before], [rows], verdict):
            ((old, new),) = json.loads(verdict.read_text())
            difference, error = gain(old, new)
            outcome = "back" if difference > ERRORS * error and now == self.worker.drafter_name else "stays"
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
        name, done = self.current.read_text().strip(), threading.Event()
        if name == self.worker.drafter_name:
            return
        self.worker.inbox.put(partial(self.swap, name, done))
        while not done.wait(TICK):
            if self.stopped.is_set() or not self.worker.is_alive():
                raise Stopped
        if self.worker.drafter_name != name:
            write(self.current, self.worker.drafter_name)

    def swap(self, name: str, done: threading.Event) -> None:
        """In the worker's thread, between steps: loading may use the device, where a step may be captured."""
        try:
            self.worker.engines[0].swap(self.load(spec=str(self.directory / name)))
        except Exception as error:
            log.warning("learning: %s cannot serve: %s", name, error)
        else:
            self.worker.drafter_name, self.before = name, None
            self.live, self.since = deque(maxlen=LIVE), time.monotonic()
        finally:
            done.set()

    # -- processes ---------------------------------------------------------------------------------------------------------

    def succeeds(self, arguments: list[str]) -> bool:
        """Run Python with these arguments; again where it was killed, since training resumes. Raises Stopped."""
        for attempt in range(ATTEMPTS):
            with (self.directory / "process.log").open("wb") as output:
                command = [sys.executable, "-c", CHILD, *arguments]
                code = self.watch(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output))
            if code == 0:
                return True
            said = (self.directory / "process.log").read_text(errors="replace").strip().rpartition("\n")[2]
            log.warning("learning: a process ended with %s: %s", "its budget" if code is None else code, said)
            if code is None or code > 0:
                return False
            if self.stopped.wait(2.0**attempt):
                raise Stopped
        return False

    def watch(self, process: "subprocess.Popen[bytes]") -> int | None:
        """Its exit code; None where its budget is spent."""
        began = last = time.monotonic()
        ran, self.goes, self.process = 0.0, True, process
        try:
            while (code := process.poll()) is None:
                self.allowed = ran <= self.share * (last - began)
                self.steer()
                if self.stopped.wait(TICK):
                    raise Stopped
                self.follow()
                now = time.monotonic()
                ran, self.seconds = ran + self.goes * (now - last), self.seconds + self.goes * (now - last)
                last = now
                if ran > self.budget:
                    return None
            return code
        finally:
            self.process = None
            process.kill()
            process.wait()

    def steer(self) -> None:
        """Let the process run, or halt it."""
        with self.lock:
            process, now = self.process, time.monotonic()
            if self.worker.open:
                self.busy = now
            may = self.allowed and (self.on_gpu or now - self.busy > IDLE)
            if process is not None and may != self.goes:
                process.send_signal(signal.SIGCONT if may else signal.SIGSTOP)
                self.goes = may


def write(file: Path, text: str) -> None:
    """Completely or not at all."""
    part = file.with_name(f"{file.name}.part")
    part.write_text(f"{text}\n")
    os.replace(part, file)


def newest_head(directory: str, spec: str) -> str:
    """What to serve with: `spec` where it is one of the heads in `directory` or there are none, else the one that served
    last."""
    current = Path(directory) / "current"
    if is_in(directory, spec) or not current.exists():
        return spec
    return str(Path(directory) / current.read_text().strip())


def new_name(directory: Path) -> str:
    numbers = [int(path.name.removeprefix("head-")) for path in directory.glob("head-*")]
    return f"head-{max(numbers, default=0) + 1:04}"


def is_in(directory: str | Path, head: str) -> bool:
    return Path(head).absolute().parent == Path(directory).absolute()


def keep_first(directory: Path, spec: str) -> None:
    """The head that serves is one of `directory`. Raises ValueError for one that cannot learn."""
    found = find(spec, None)
    if (found / adapter.CONFIG).exists() and read_config(found).get("foredraft", {}).get("kind") != UnoHead.kind:
        raise ValueError(
            f"learn=true: {spec} changes the target's text, which none may while it serves: take another head"
        )
    if not is_in(directory, spec):
        part = directory / "part"
        shutil.rmtree(part, ignore_errors=True)
        shutil.copytree(found, part)
        if not (part / "README.md").exists():
            (part / "README.md").write_text(f"# A copy of {spec}\n")
        found = part.rename(directory / new_name(directory))
    write(directory / "current", found.name)


def settings_of(drafter: Drafter) -> list[str]:
    """Of `foredraft train`, for a head that goes on. Raises ValueError for a drafter that is no head."""
    tree = tree_of(drafter)
    if tree is None:
        raise ValueError("learn=true trains the head that drafts: give drafter=DIRECTORY")
    more = ["data.rejection_weight=1"] if isinstance(tree.head, BlockHead) else []
    few = ["evaluate.eval_steps=0", "evaluate.prompts=16", "evaluate.new_tokens=64", "evaluate.timed_prompts=1"]
    return [f"head={tree.head.kind}", f"head.depth={tree.head.depth}", *more, *few, "evaluate.proof=false"]
