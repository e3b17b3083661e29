"""Train the head of a server on its texts:  foredraft serve ... learn=true starts this program next to the server.

The server appends each text to `served.jsonl` in output_dir, and serves with the head that the file `current` names
(learned_heads.py). When enough texts were served, a round starts: `foredraft train data=accepted` trains the head further on
four fifths of them and as many older ones, and held-out texts are decoded with the old and the new head (judge.py). If the
acceptance length of the new one is significantly higher on new texts, and hardly lower on older ones, `current` names it. The
head that served before is judged too, and returns if it has become the better one.

    round/          the data and results of the round in progress, which a restart continues
    replay.jsonl    a uniform random subset of the texts of earlier rounds; a log of the server (log_text=true) may be put
                    here before the first round
    history.jsonl   one line per round
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from foredraft.cli import entry
from foredraft.train.learned_heads import LearnedHeads
from foredraft.train.runtime.locks import hold, write_atomically
from foredraft.words import has_gpu

POLL = 1.0  # seconds between two looks at the log
PAUSE = 10.0  # seconds after an error such as a full disk
PERIOD = 1.0  # seconds, of which a process runs its share
ATTEMPTS = 5  # maximum number of starts of a process
HELD_OUT = 5  # one of this many prompts is never trained on
MAX_EVAL_TEXTS = 96  # maximum number of texts of each set that heads are compared on
MAX_REPLAY = 2**26  # bytes of texts of earlier rounds
ERRORS = 2.0  # a larger difference, in standard errors, is significant
MAX_REGRESSION = 0.02  # maximum relative loss of acceptance length on texts of earlier rounds
SETS = ("recent", "replay")  # the held-out texts
METRICS = "metrics.json"  # the last file that a training writes
TokenCounts = Sequence[Sequence[int]]  # new tokens and target forwards of each text, without the prompt's forward
# A process dies with the one that starts it, even if that is killed. The first argument is the starter's process id.
CHILD = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
if os.getppid() == int(sys.argv[1]):  # otherwise it died before this
    os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


@entry("learn")
def main(cfg: DictConfig) -> None:
    check_settings(cfg)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends child processes, too
    lower_priority()
    on_gpu = has_gpu() if cfg.target.get("device") is None else str(cfg.target.device).startswith("cuda")
    share = cfg.device_share or (0.1 if on_gpu else 1.0)
    target = OmegaConf.to_container(cfg.target, resolve=True)
    train = ["-m", "foredraft", "train", *typed_target(), "data=accepted", "data.num_proc=1"]
    train += [f"trainer.max_minutes={cfg.max_minutes}", *cfg.train]
    with ExitStack() as stack:
        learners = []
        for folder in folders_of(cfg.output_dir, cfg.tenants):
            heads = LearnedHeads(folder)
            stack.callback(hold(folder, "output_dir").close)
            run = partial(run_process, output=folder / "process.log", share=share)
            learners.append(Learner(heads, target, train, cfg.num_samples, cfg.keep, run))
        print(f"waiting for {cfg.num_samples} texts in {cfg.output_dir}", flush=True)
        while True:
            pause = POLL
            for learner in learners:
                try:
                    learner.run_round_if_due()
                except OSError as error:  # a full disk, for example
                    print(f"{learner.heads.folder}: {error}", flush=True)
                    pause = PAUSE
            time.sleep(pause)


def check_settings(cfg: DictConfig, prefix: str = "") -> None:
    """Check the keys of this program. prefix: of their names, for the error. Raises ValueError."""
    if cfg.num_samples < 8:
        raise ValueError(f"{prefix}num_samples={cfg.num_samples} must be at least 8")
    if cfg.max_minutes <= 0:
        raise ValueError(f"{prefix}max_minutes={cfg.max_minutes} must be above 0")
    if cfg.keep < 2:
        raise ValueError(f"{prefix}keep={cfg.keep} must be at least 2")
    if cfg.device_share is not None and not 0 < cfg.device_share <= 1:
        raise ValueError(f"{prefix}device_share={cfg.device_share} must be in (0, 1]")


def folders_of(output_dir: str, tenants: Sequence[str]) -> list[Path]:
    """Return the directory of each tenant's heads and texts."""
    return [Path(output_dir, tenant) for tenant in tenants or [""]]


def typed_target() -> list[str]:
    """Return the arguments of the command line that choose the target, for another program."""
    overrides = HydraConfig.get().overrides.task
    return [word for word in overrides if word.lstrip("+").partition("=")[0].partition(".")[0] == "target"]


def lower_priority() -> None:
    """Let this process and its children use only processor time that no other process wants."""
    os.nice(19)
    if sys.platform == "linux":
        with suppress(OSError):  # some sandboxes do not support it
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def start_process(arguments: list[str], output: Path) -> "subprocess.Popen[bytes]":
    """Start Python with these arguments. It ends with this process. output: file for its output."""
    with output.open("wb") as file:
        command = [sys.executable, "-c", CHILD, str(os.getpid()), *arguments]
        # In a separate session: Ctrl-C reaches only the first process, which ends the others.
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True)


def run_process(arguments: list[str], output: Path, share: float = 1.0) -> bool:
    """Run Python with these arguments, again if it was killed, because training resumes. share: of the time in which it may
    run. Returns whether it succeeded."""
    for attempt in range(ATTEMPTS):
        code = wait(start_process(arguments, output), share)
        if code == 0:
            return True
        last_line = output.read_text(errors="replace").strip().rpartition("\n")[2]
        print(f"a process ended with {code}: {last_line}", flush=True)
        if code > 0:
            return False
        time.sleep(2.0**attempt)
    return False


def wait(process: "subprocess.Popen[bytes]", share: float) -> int:
    try:
        while True:
            with suppress(subprocess.TimeoutExpired):
                return process.wait(share * PERIOD)
            if share < 1:
                process.send_signal(signal.SIGSTOP)
                time.sleep((1 - share) * PERIOD)
                process.send_signal(signal.SIGCONT)
    finally:
        process.kill()
        process.wait()


@dataclass
class Learner:
    """Train the head of one directory, round by round."""

    heads: LearnedHeads
    target: Any  # constructor and arguments (conf/options)
    train_arguments: list[str]  # Python arguments that train a head; data and head are added
    num_samples: int  # number of new texts that start a round
    keep: int  # maximum number of heads on disk
    run: Callable[[list[str]], bool]  # runs Python with arguments, and returns whether that succeeded

    def __post_init__(self) -> None:
        folder = self.heads.folder
        self.served, self.replay, self.history = (folder / f"{name}.jsonl" for name in ("served", "replay", "history"))
        self.round = folder / "round"
        self.taken = self.round / "served.jsonl"  # the texts of this round

    def run_round_if_due(self) -> None:
        waiting = self.served.read_bytes().count(b"\n") if self.served.exists() else 0
        is_due = self.round.is_dir() or waiting >= self.num_samples
        parent = self.heads.current()
        if is_due and parent is not None:
            self.run_round(parent)

    def run_round(self, parent: Path) -> None:
        started = time.monotonic()
        self.prepare()
        head, verdict = self.find_better(parent)
        facts = {"parent": parent.name, **verdict, "seconds": round(time.monotonic() - started, 1)}
        if head is not None and self.heads.current() != parent:
            facts["outcome"] = "late"  # another head was chosen manually in the meantime
        elif head is not None:
            if facts["outcome"] == "served":
                note = f"\n## Learned while serving\n\n```json\n{json.dumps(facts, indent=1)}\n```\n"
                head = self.heads.add(head, note)
            facts["head"] = head.name
            self.heads.choose(head.name)
        print(json.dumps(facts), flush=True)
        history = self.history.read_bytes() if self.history.exists() else b""
        write_atomically(self.history, history + json.dumps({"time": round(time.time()), **facts}).encode() + b"\n")
        self.finish()
        needed = parent, head or parent, self.heads.current() or parent  # the last one may have been chosen just now
        self.heads.prune(self.keep, {one.name for one in needed})

    def find_better(self, parent: Path) -> tuple[Path | None, dict[str, Any]]:
        """Return a head that drafts better than `parent`, trained now or serving before, and what was measured."""
        facts: dict[str, Any] = {"outcome": "failed"}
        if (old := self.judged(parent)) is None:
            return None, facts
        for outcome, head in (("served", self.trained(parent, old["train"])), ("back", self.previous(parent))):
            if head is not None and (counts := self.judged(head)):
                found = compare(old, counts)
                if found["outcome"] == "better":
                    return head, found | {"outcome": outcome}
                facts = found if outcome == "served" else facts
        return None, facts

    def previous(self, parent: Path) -> Path | None:
        """Return the head that served before `parent`, if it was replaced by a round."""
        lines = self.history.read_bytes().splitlines() if self.history.exists() else []
        rounds = [facts for facts in map(parsed, lines) if facts.get("head") == parent.name]
        head = self.heads.folder / rounds[-1]["parent"] if rounds else parent
        return head if head != parent and head.is_dir() else None

    def prepare(self) -> None:
        """Take the served texts and divide them, unless an interrupted round did."""
        shutil.rmtree(self.heads.folder / "ended", ignore_errors=True)
        self.round.mkdir(exist_ok=True)
        if not self.taken.exists() and self.served.exists():
            os.replace(self.served, self.taken)
        train, part = self.round / "train", self.round / "part"
        if train.is_dir():
            return
        new, new_held_out = split(texts_of(self.taken))
        older, older_held_out = split(texts_of(self.replay))
        older, older_held_out = without(older, new_held_out), without(older_held_out, new)
        chance = random.Random(len(new))
        older = chance.sample(older, min(len(older), len(new)))
        older_held_out = chance.sample(older_held_out, min(len(older_held_out), MAX_EVAL_TEXTS))
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        (part / "new.jsonl").write_bytes(b"".join(new))
        (part / "replay.jsonl").write_bytes(b"".join(older))
        for name, lines in zip(SETS, (new_held_out[-MAX_EVAL_TEXTS:], older_held_out), strict=True):
            (self.round / f"{name}.jsonl").write_bytes(b"".join(lines))
        part.rename(train)

    def judged(self, head: Path) -> dict[str, Any] | None:
        """Return the output of judge.py for a head; None if it failed."""
        output = self.round / f"{head.parent.name}-{head.name}.json"
        facts = {"target": self.target, "head": str(head), "output": str(output)}
        facts["files"] = {name: str(self.round / f"{name}.jsonl") for name in SETS}
        if not output.exists() and not self.run(["-m", "foredraft.train.judge", json.dumps(facts)]):
            return None
        return dict(json.loads(output.read_text()))

    def trained(self, parent: Path, arguments: list[str]) -> Path | None:
        """Return the directory of the trained head; None if training failed. arguments: of `foredraft train`."""
        run = self.round / f"from-{parent.name}"
        data = [f"data.path={self.round / 'train'}", f"+data.cache_dir={self.round / 'cache'}"]
        command = [*self.train_arguments, *arguments, *data, f"init_from={parent}", f"output_dir={run}"]
        return run / "head" if (run / METRICS).exists() or self.run(command) else None

    def finish(self) -> None:
        """Add the round's texts to those of earlier rounds, and remove its directory."""
        retained, size = list[bytes](), 0
        # Texts with the smallest hashes are a uniform subset of all texts so far.
        for line in sorted({*texts_of(self.replay), *texts_of(self.taken)}, key=zlib.crc32):
            if (size := size + len(line)) > MAX_REPLAY:
                break
            retained.append(line)
        write_atomically(self.replay, b"".join(retained))
        shutil.rmtree(self.round.rename(self.heads.folder / "ended"))


def texts_of(log: Path) -> list[bytes]:
    """Return the lines with token ids. The disk may have been full in the middle of one."""
    return [line for line in log.read_bytes().splitlines(keepends=True) if is_text(line)] if log.exists() else []


def is_text(line: bytes) -> bool:
    row = parsed(line)
    return bool(row.get("prompt_ids")) and bool(row.get("ids")) and line.endswith(b"\n")


def parsed(line: bytes) -> dict[str, Any]:
    """Return the JSON object of a line; an empty one for anything else, such as half a line."""
    try:
        row = json.loads(line)
    except ValueError:
        return {}
    return row if isinstance(row, dict) else {}


def prompt_hash(line: bytes) -> int:
    return zlib.crc32(json.dumps(json.loads(line)["prompt_ids"]).encode())


def without(lines: Sequence[bytes], others: Sequence[bytes]) -> list[bytes]:
    """Return the texts whose prompt none of the others has."""
    prompts = set(map(prompt_hash, others))
    return [line for line in lines if prompt_hash(line) not in prompts]


def split(lines: Sequence[bytes]) -> tuple[list[bytes], list[bytes]]:
    """Split into texts for training and held-out ones by their prompt, so that equal prompts are in the same part. Of a
    single prompt nothing is held out."""
    keys = list(map(prompt_hash, lines))
    every = sorted({*keys})
    held_out = {key for key in every if not key % HELD_OUT}
    if len(held_out) in (0, len(every)):
        held_out = {*every[1::HELD_OUT]}
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for line, key in zip(lines, keys, strict=True):
        parts[key in held_out].append(line)
    return parts


def compare(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Return the verdict on a new head: its outcome, and the acceptance lengths of both heads on both sets of texts."""
    difference, error = acceptance_difference(old["recent"], new["recent"])
    facts: dict[str, Any] = {"outcome": "better" if difference > ERRORS * error else "no better"}
    facts["error"] = error if np.isfinite(error) else None  # JSON has no infinity
    facts |= {name: [acceptance(counts[name])[0] for counts in (old, new)] for name in SETS if old[name]}
    if facts["outcome"] == "better" and old["replay"]:
        before, now = facts["replay"]
        facts["outcome"] = "forgot too much" if now < (1 - MAX_REGRESSION) * before else "better"
    return facts


def acceptance(texts: TokenCounts) -> tuple[float, np.ndarray]:
    """Return the acceptance length over all texts, and each text's part in its error: the steps of a text are correlated."""
    emitted, forwards = np.array(texts, dtype=np.float64).T
    value = emitted.sum() / forwards.sum()
    return float(value), (emitted - value * forwards) / forwards.mean()


def acceptance_difference(old: TokenCounts, new: TokenCounts) -> tuple[float, float]:
    """Return the difference of the acceptance lengths of two heads on the same texts, and its standard error."""
    if len(old) < 2:
        return 0.0, float("inf")
    (before, old_parts), (now, new_parts) = acceptance(old), acceptance(new)
    return now - before, float((new_parts - old_parts).std(ddof=1) / len(old) ** 0.5)


if __name__ == "__main__":
    main()
