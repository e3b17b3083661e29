"""What happens between the Trainer's steps: signals, progress, measurements, checkpoints."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from foredraft.heads.hub.card import duration
from foredraft.inference.evaluation import progress
from foredraft.train.runtime import checkpoints, distributed
from foredraft.train.runtime.run_state import seconds_of


class StopOnSignal(TrainerCallback):
    """Stop on Ctrl-C, SIGTERM, SIGUSR1 (Slurm) or a closed terminal: finish the step, save a checkpoint. A second Ctrl-C
    stops at once; a second SIGTERM, of a scheduler that signals both torchrun and its processes, changes nothing."""

    def __init__(self) -> None:
        self.signalled = False  # has this process had a signal?
        self.before: dict[int, Any] = {}

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]  # the last of `#SBATCH --signal=USR1@120`
        # With nohup a run outlives its terminal. torchrun does not: it passes the signal on, and kills half a minute later.
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN or "TORCHELASTIC_RUN_ID" in os.environ:
            numbers.append(signal.SIGHUP)
        self.before = {number: signal.getsignal(number) for number in numbers}
        self.terminals = [stream for stream in (1, 2) if os.isatty(stream) or Path(f"/dev/fd/{stream}").is_fifo()]
        for number in self.before:
            signal.signal(number, self.note)

    def note(self, number: int, frame: FrameType | None) -> None:
        self.signalled = True
        signal.signal(signal.SIGINT, self.before[signal.SIGINT])
        for other in self.before.keys() - {signal.SIGINT}:
            signal.signal(other, signal.SIG_IGN)
        if number == signal.SIGHUP:  # no write to it, or to a `tee` that ends with it, may fail before the save
            for stream in self.terminals:
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        # Not `print`: the signal may have come in the middle of one, and Python's streams refuse to be entered twice.
        with contextlib.suppress(OSError):
            os.write(2, b"\nstopping after this step ...\n")

    def restore(self) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def stopped(self) -> bool:
        """Return whether any process has had a signal: it does not reach all in the same step, and they must stop in the same
        one. Every process must call this. A signal that comes while it waits for the others counts the next time."""
        return distributed.all_reduce(torch.tensor(float(self.signalled))).item() > 0

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.stopped():
            # Logged too: losses since the last entry are in no checkpoint.
            control.should_log = control.should_save = control.should_training_stop = True


class FitToTime(TrainerCallback):
    """Set `max_steps`, and the steps over which the learning rate falls, to what can be done in `minutes`.

    Steps FIRST to LAST are timed. The learning rate should still rise then, or stand at its highest, as
    conf/preset/test_model.yaml has it: so the steps before belong to either schedule. A machine may be busier or freer later,
    so after each quarter more the newest steps are timed again, with what was measured and saved between them. A tenth of the
    steps stays in any case, over which the learning rate falls."""

    FIRST, LAST = 2, 10  # the first step also allocates and compiles

    def __init__(self, minutes: float, reschedule: Callable[[int], None]):
        """Set the limit. reschedule: called with the new number of steps."""
        self.minutes, self.reschedule = minutes, reschedule
        self.start = self.since = 0.0

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.begun, self.start = state.global_step, time.perf_counter() - seconds_of(state)
        self.all_steps, self.timed, self.next = state.max_steps, self.FIRST, self.LAST

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        done = state.global_step - self.begun
        if done == self.FIRST:
            self.since = time.perf_counter()
        if done != self.next or state.global_step >= state.max_steps:
            return
        now = time.perf_counter()
        times = [(now - self.since) / (done - self.timed), 60 * self.minutes - (now - self.start)]
        self.since, self.timed, self.next = now, done, done + max(self.LAST, done // 4)
        each, left = distributed.broadcast(times)
        steps = min(self.all_steps, state.global_step + max(1, done // 10, int(left / each)))
        if state.max_steps <= steps <= 1.05 * state.max_steps:
            return
        if steps < 0.95 * state.max_steps or steps > state.max_steps:
            less = f"; acceptance may be lower than with trainer.max_steps={self.all_steps}"
            print(
                f"a step takes {each:.2f} s: trainer.max_minutes={self.minutes:g} allows {steps} of {self.all_steps}"
                + (less if steps < self.all_steps else ""),
                flush=True,
            )
        # Where the run is resumed, and in what it reports.
        record = {"step": state.global_step, "fitted_steps": steps, "all_steps": self.all_steps}
        state.log_history.append(record | {"minutes": self.minutes})
        state.max_steps = steps
        self.reschedule(steps)


def time_limit_record(state: TrainerState) -> dict[str, Any]:
    """Return what FitToTime logged when it set `max_steps`: `fitted_steps`, `all_steps`, `minutes`; empty if all steps are
    done."""
    record: dict[str, Any] = next(
        (entry for entry in reversed(state.log_history) if entry.get("fitted_steps") == state.max_steps), {}
    )
    return record if record and record["fitted_steps"] < record["all_steps"] else {}


class Progress(TrainerCallback):
    """Print one line per log entry: step, loss, accuracy per depth, tokens/s, learning rate, norm of the gradient, time
    left; on a terminal a bar, and lines for what is measured. It adds the time to the entry."""

    def __init__(self) -> None:
        self.figures = ""
        self.bar: progress.Progress | None = None

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.start, self.first, self.earlier = time.perf_counter(), state.global_step, seconds_of(state)
        if sys.stderr.isatty():  # elsewhere the log entries are the lines
            self.bar = progress.Progress("training", state.max_steps, "steps", done=state.global_step)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.bar is not None:
            self.bar.total = state.max_steps
            self.bar.add(state.global_step - self.bar.done, self.figures)

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if self.bar is not None:
            self.bar.close()
        self.note_seconds(state)

    def note_seconds(self, state: TrainerState) -> float:
        seconds = time.perf_counter() - self.start
        state.log_history[-1]["train_seconds"] = round(self.earlier + seconds, 3)
        return seconds

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Any = None, **kwargs: Any) -> None:
        logs, step = logs or {}, f"step {state.global_step}/{state.max_steps}"
        if "acceptance_length" in logs:
            error = f" \u00b1 {logs['acceptance_error']:.2f}" if "acceptance_error" in logs else ""
            progress.report(
                f"{step}  acceptance length {logs['acceptance_length']:.2f}{error} (validation)", sys.stdout
            )
        if "held_out_loss" in logs:
            depths = [f"{logs[key]:.3f}" for key in logs if key.startswith("held_out_acc_")]
            progress.report(
                f"{step}  held out: loss {logs['held_out_loss']:.3f}  accuracy by depth {' '.join(depths)}  which predicts "
                f"an acceptance length of {logs['predicted_acceptance_length']:.2f} in chains of {len(depths)}",
                sys.stdout,
            )
        if "loss" not in logs:
            return
        depths = [f"{logs[key]:.3f}" for key in logs if key.startswith("acc_")]
        self.figures = f"loss {logs['loss']:.3f}" + (f"  accuracy by depth {' '.join(depths)}" if depths else "")
        self.figures += f"  {logs['tokens_per_second']:,.0f} tokens/s" if "tokens_per_second" in logs else ""
        self.figures += f"  lr {logs['learning_rate']:.1e}"
        self.figures += f"  grad {logs['grad_norm']:.2g}" if "grad_norm" in logs else ""
        each = self.note_seconds(state) / max(1, state.global_step - self.first)
        if self.bar is None or not sys.stdout.isatty():
            left = duration(each * (state.max_steps - state.global_step))
            progress.report(f"{step}  {self.figures}  {left} left", sys.stdout)


class Profile(TrainerCallback):
    """Run torch.profiler over steps 3 to 6 of a run, because the first steps also allocate and compile: profile.json in its
    directory, for Perfetto (ui.perfetto.dev), and on the screen what took longest."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.profiler = torch.profiler.profile(
            schedule=torch.profiler.schedule(wait=1, warmup=1, active=4, repeat=1), on_trace_ready=self.show
        )

    def show(self, profiler: torch.profiler.profile) -> None:
        profiler.export_chrome_trace(str(self.directory / "profile.json"))
        device = "device" if torch.cuda.is_available() else "cpu"
        print(profiler.key_averages().table(sort_by=f"{device}_time_total", row_limit=20), flush=True)

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.profiler.start()

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.profiler.step()

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.profiler.stop()


class Measure(TrainerCallback):
    """Start `HeadTrainer.evaluate` every `every` steps (0: never), and after the last step. `eval_strategy` would need a
    data set, which prompts are not."""

    def __init__(self, every: int):
        self.every = every

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.every and (state.global_step % self.every == 0 or state.global_step == state.max_steps):
            control.should_evaluate = True


class KeepCheckpoints(TrainerCallback):
    """Give the Trainer's checkpoint its final name once it is complete, and delete what is no longer needed.
    (`load_best_model_at_end` would keep whole checkpoints, and only of steps that save.)"""

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        state.compute_steps(args, state.max_steps)  # a checkpoint has logging_steps and save_steps of the run before

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # A loss that is not finite is found before it is saved, and the history has the last steps.
        control.should_log |= control.should_save or state.global_step >= state.max_steps

    on_epoch_end = on_step_end  # trainer.save_strategy=epoch

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        directory = Path(args.output_dir).parent
        checkpoints.complete(directory, state.global_step)
        if distributed.rank() == 0:
            checkpoints.rotate(directory, args.save_total_limit, checkpoints.best_step(state.log_history))
