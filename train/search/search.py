"""head=auto: which head is best for this target, text and device?

Successive halving (train/search/plan.py): all candidates train on the same text, are judged by measured tokens/s on held-out
prompts, and the slower half is dropped, round after round; the last one trains to the end of the budget and is finished
like any other run. All in one process, with the functions of train/run.py, so the target is loaded once.

    OUTPUT/search.json       what every candidate measured in each round and why it was dropped (train/search/state.py)
    OUTPUT/candidates/NAME   checkpoints while it is in the race, and its head as it was judged last
    OUTPUT                   otherwise what every run leaves, of the winner
"""

import contextlib
import gc
import shutil
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from omegaconf import DictConfig
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments, set_seed

from foredraft.heads.target import Target
from foredraft.train.cli import user_message
from foredraft.train.data.corpus import Corpus
from foredraft.train.finalize import finalize, save_final
from foredraft.train.run import Prepared, load, prepare, start_process, train, with_self_generated_text
from foredraft.train.runtime import checkpoints, distributed
from foredraft.train.runtime.locks import hold
from foredraft.train.runtime.run_state import CHECKPOINTS, CONFIG, as_saved, keep_finished, seconds_of, unlock
from foredraft.train.search.candidates import check_numbers, chosen, composed
from foredraft.train.search.judge import Judge
from foredraft.train.search.plan import (
    FEWEST_PROMPTS,
    Judged,
    check_enough,
    goal,
    parse_budget,
    prompts_within,
    round_sizes,
    shares,
    verdicts,
)
from foredraft.train.search.report import announce
from foredraft.train.search.state import FILE, Round, State
from foredraft.train.trainer import HeadTrainer

PROBE = 6  # steps that tell what a step costs; the first is left out


def search(cfg: DictConfig) -> None:
    """Run `python train/run.py head=auto`."""
    if distributed.world_size() > 1:
        raise ValueError(
            "head=auto trains one candidate after the other in one process: start it without torchrun, and train its winner "
            "with torchrun if you like"
        )
    candidates = chosen(cfg)
    budget = parse_budget(cfg.budget)
    check_numbers(cfg)
    if budget.in_steps and (sizes := round_sizes(len(candidates))):
        share, _ = shares(sizes, 0, cfg.search_share)
        check_enough(budget, share, 0.0, 0.0, dict.fromkeys(candidates, 1.0), sizes[0])
    start_process(cfg)
    directory = Path(cfg.output_dir)
    directory.mkdir(parents=True, exist_ok=True)
    locks = [hold(directory, "output_dir")]  # the candidates' own directories lie in it
    if keep_finished(directory):
        directory.mkdir()
        locks.append(hold(directory, "output_dir"))
    if (directory / CHECKPOINTS).exists() and not (directory / FILE).exists():
        raise ValueError(f"output_dir={directory} holds an unfinished run of one head: give another output_dir")
    state = State.open(directory, as_saved(cfg), candidates)
    if "load_full_target" in cfg.hidden_states:
        cfg.hidden_states.load_full_target = True  # candidates are compared by what they decode
    target, data = load(cfg)
    state.started = time.perf_counter()  # what it takes to get a target is no part of the budget
    try:
        Search(cfg, state, target, data).run()
    finally:
        state.save()
        unlock()  # the newest candidate's directory
        for lock in locks:
            lock.close()


class StopAt(TrainerCallback):
    """End this part of a training after a step, with a checkpoint to resume from."""

    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step >= self.step:
            control.should_log = control.should_save = control.should_training_stop = True


class Search:
    def __init__(self, cfg: DictConfig, state: State, target: Target, data: Corpus):
        self.cfg, self.state, self.target, self.data = cfg, state, target, data
        self.directory, self.budget = Path(cfg.output_dir), parse_budget(cfg.budget)
        self.sizes = round_sizes(len(state.candidates))
        self.judging = Judge(cfg.judge, target, data)

    def run(self) -> None:
        self.write_text()
        if not self.state.rounds and self.state.final is None:
            self.probe()
            self.check_budget()
        for number in range(len(self.sizes)):
            self.round(number)
        self.finish()

    @property
    def left(self) -> float:
        """Return the rest of the budget."""
        steps = sum(one.steps for one in self.state.candidates.values())
        return self.budget.amount - (steps if self.budget.in_steps else self.state.seconds)

    # One candidate

    def config(self, name: str, directory: Path, steps: int) -> DictConfig:
        """Return the config of a candidate's training of this number of steps."""
        cfg = composed(self.state.candidates[name].overrides)
        cfg.output_dir = str(directory)
        cfg.trainer.max_steps, cfg.trainer.max_minutes, cfg.strategy = steps, 0.0, self.cfg.strategy
        return cfg

    def train(self, cfg: DictConfig, *callbacks: TrainerCallback) -> tuple[Prepared, HeadTrainer]:
        """Continue a candidate's training from its newest checkpoint."""
        folder = Path(cfg.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        for text in self.directory.glob("*.safetensors"):  # that the target wrote, for all alike
            if folder != self.directory and not (folder / text.name).exists():
                (folder / text.name).symlink_to(text.resolve())
        set_seed(cfg.seed)
        if "path" in cfg.hidden_states:  # stored aux hidden states: one store for all heads that take the same layers
            cfg.hidden_states.path, cfg.hidden_states.load_full_target = self.cfg.hidden_states.path, True
        prepared = prepare(cfg, self.target, self.data)
        if "path" in cfg.hidden_states:
            cfg.hidden_states.path += "/" + "-".join(map(str, prepared.head.layers))
        return prepared, train(cfg, prepared, *callbacks)

    @contextlib.contextmanager
    def drop_on_error(self, name: str) -> Iterator[None]:
        """Drop a candidate that fails, and keep the figures of the others."""
        try:
            yield
        except Exception as error:
            said = user_message(error, str(self.folder(name))) or f"{type(error).__name__}: {error}"
            reason = f"failed: {' '.join(said.split())[:500]}"
            print(f"{name} is dropped: {reason}", flush=True)
            self.state.candidates[name].dropped = reason
            self.state.save()
            if not self.state.left:
                raise ValueError(f"no candidate is left; the last one {reason}") from error
        finally:  # a trainer refers to itself
            gc.collect()

    def folder(self, name: str) -> Path:
        return self.directory / "candidates" / name

    # Before the rounds

    def write_text(self) -> None:
        """Let the target write text to learn from, once for all candidates."""
        self.cfg.trainer.max_steps = -1  # all that is asked for
        with_self_generated_text(self.cfg, self.target, self.data, self.directory)

    def probe(self) -> None:
        """Measure what a step of each candidate costs, by some that are thrown away, and what decoding a text costs."""
        folder = self.directory / "probe"
        for name in self.state.left if not self.budget.in_steps else ():
            if self.state.candidates[name].step_seconds is not None:
                continue
            shutil.rmtree(folder, ignore_errors=True)
            with self.drop_on_error(name):
                cfg = self.config(name, folder, PROBE)
                cfg.eval.steps, cfg.trainer.logging_steps = 0, 1
                _, trainer = self.train(cfg)
                ends = [entry["train_seconds"] for entry in trainer.state.log_history if "loss" in entry]
                self.state.candidates[name].step_seconds = max(1e-3, median(b - a for a, b in pairwise(ends)))
                self.state.save()
        shutil.rmtree(folder, ignore_errors=True)
        self.state.decode_seconds = self.judging.decode_seconds()

    def cost(self, name: str) -> float:
        """Return the cost of a step, in units of the budget."""
        seconds = self.state.candidates[name].step_seconds
        if self.budget.in_steps:
            return 1.0
        assert seconds is not None, "a round before the probe"
        return seconds

    def judging_cost(self, size: int, prompts: int) -> float:
        """Return the cost of a round of `size` candidates on `prompts` prompts, in units of the budget."""
        seconds = self.state.decode_seconds
        assert seconds is not None, "a round before the probe"
        return 0.0 if self.budget.in_steps else self.judging.decodes(size, prompts) * seconds

    def check_budget(self) -> None:
        """Check the budget before the first round."""
        if not self.sizes:
            return
        share, _ = shares(self.sizes, 0, self.cfg.search_share)
        costs = {name: self.cost(name) for name in self.state.left}
        size = self.sizes[0]
        spent = self.budget.amount - self.left
        prompts = min(FEWEST_PROMPTS, self.cfg.judge.num_prompts)
        check_enough(self.budget, share, spent, self.judging_cost(size, prompts) / size, costs, size)

    # Rounds

    def round(self, number: int) -> None:
        """Train, judge and drop; whatever of it was done before is not done again."""
        if len(self.state.left) < 2:
            return
        if number == len(self.state.rounds):
            self.plan_round(number)
        this = self.state.rounds[number]
        if this.judged:
            return
        for name in self.state.left:
            if self.state.candidates[name].steps < this.goals[name].until:
                print(f"round {number + 1} of {len(self.sizes)}: {name} to step {this.goals[name].until}", flush=True)
                with self.drop_on_error(name):
                    self.train_to(name, this)
        self.judge(number, this)
        keep = self.sizes[number + 1] if number + 1 < len(self.sizes) else 1
        found = {name: Judged(**this.found[name]["texts"]) for name in self.state.left}
        for name, reason in verdicts(found, keep).items():
            self.state.candidates[name].dropped = f"round {number + 1}: {reason}"
        this.judged = True
        self.state.save()
        for name in self.state.candidates.keys() - self.state.left:
            shutil.rmtree(self.folder(name) / CHECKPOINTS, ignore_errors=True)
        announce(self.state, number)

    def plan_round(self, number: int) -> None:
        this, afterwards = shares(self.sizes, number, self.cfg.search_share)
        names, left = self.state.left, max(0.0, self.left)
        prompts = self.cfg.judge.num_prompts
        if not self.budget.in_steps:
            fixed = self.judging_cost(len(names), 0)
            each = self.judging_cost(len(names), 1) - fixed
            prompts = prompts_within(this * left * len(names), fixed, each, prompts)
        train = this * left - self.judging_cost(len(names), prompts) / len(names)
        goals = {
            name: goal(self.state.candidates[name].steps, self.cost(name), train, afterwards * left) for name in names
        }
        self.state.rounds.append(Round(goals, prompts))
        self.state.save()

    def train_to(self, name: str, this: Round) -> None:
        candidate, until = self.state.candidates[name], this.goals[name].until
        newest = checkpoints.newest(self.folder(name) / CHECKPOINTS)
        # It may have been stopped before it was saved as a head.
        there = newest is not None and checkpoints.step_of(Path(newest)) >= until
        cfg = self.config(name, self.folder(name), until if there else this.goals[name].of)
        cfg.eval.steps = 0
        prepared, trainer = self.train(cfg, StopAt(until))
        save_final(trainer.distillation, self.folder(name) / "head", prepared.data, cfg.max_length)
        candidate.steps = trainer.state.global_step
        if not self.budget.in_steps:
            candidate.step_seconds = seconds_of(trainer.state) / candidate.steps
        self.state.save()

    def judge(self, number: int, this: Round) -> None:
        heads = {name: self.folder(name) / "head" for name in self.state.left}
        start = time.perf_counter()
        file = self.directory / f"round-{number + 1}.jsonl"
        this.found, this.note, failed = self.judging.measure(heads, this.prompts, file)
        self.state.decode_seconds = (time.perf_counter() - start) / self.judging.decodes(len(heads), this.prompts)
        for name, reason in failed.items():
            with self.drop_on_error(name):
                raise ValueError(reason)

    # The winner

    def finish(self) -> None:
        """Finish the winner's training, as every run ends."""
        (name,) = self.state.left
        candidate = self.state.candidates[name]
        if self.state.final is None:
            self.state.final = goal(candidate.steps, self.cost(name), max(0.0, self.left), 0.0)
            self.state.save()
        own = self.folder(name)
        if (own / CHECKPOINTS).exists():
            shutil.copy(own / CONFIG, self.directory / CONFIG)
            (own / CHECKPOINTS).rename(self.directory / CHECKPOINTS)
        until = self.state.final.until
        print(f"{name} trains to step {until}, which ends the budget", flush=True)
        cfg = self.config(name, self.directory, until)
        prepared, trainer = self.train(cfg)
        finalize(cfg, trainer, prepared.data, prepared.held_out, prepared.directory)
        candidate.steps = trainer.state.global_step
        print(f"how it was chosen: {self.state.file}", flush=True)
