"""Runs train/run.py until it is done, and kills it on the way:  python tests/support/kill_probe.py SEED KILLS OVERRIDE ...

The runs are forks of this process, which spares each its imports. Where one dies is drawn with SEED among the moments that
matter (a step, the optimizer, a measurement, each file of a save, its renaming, the deletion of old ones); a file that is
being written then stays half written. Prints how each run ended, as JSON.
"""

import json
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from transformers import TrainerState

from foredraft.heads.formats import base as formats
from foredraft.train import finalize, run
from foredraft.train.runtime import run_state
from foredraft.train.trainer import HeadTrainer


class Fate:
    """Count moments, and act at one of them: by default it dies."""

    def __init__(self, moment: int, number: int, act: Callable[[], None] | None = None):
        """Set when to act. number: of the signal; with SIGKILL, a file that is being written then stays half written."""
        self.left, self.number = moment, number
        self.act = act or (lambda: os.kill(os.getpid(), number))

    def at(self, place: Any, name: str, writes: int | None = None) -> None:
        """Count calls of place.name as moments; `writes`: the number of its argument that is the written file."""
        original: Callable[..., Any] = getattr(place, name)

        def met(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                if writes is not None and self.number == signal.SIGKILL:
                    Path(args[writes]).write_bytes(b"half of")
                self.act()
            return original(*args, **kwargs)

        setattr(place, name, met)


def of_a_run(fate: Fate) -> None:
    """Mark the moments that matter in a run."""
    fate.at(HeadTrainer, "training_step")
    fate.at(HeadTrainer, "evaluate")
    fate.at(torch.optim.AdamW, "step")
    fate.at(torch, "save", writes=1)
    fate.at(safetensors.torch, "save_file", writes=1)
    fate.at(formats, "save_file", writes=1)
    fate.at(TrainerState, "save_to_json", writes=1)
    fate.at(Path, "rename")
    fate.at(shutil, "rmtree")
    fate.at(finalize, "write_report", writes=0)
    fate.at(run_state, "write_atomically")


def main() -> None:
    draw, kills = random.Random(int(sys.argv[1])), int(sys.argv[2])
    ends: list[int] = []
    for attempt in range(kills + 1):
        number = signal.SIGTERM if attempt % 2 == 1 else signal.SIGKILL
        moment = draw.randint(1, 16) if attempt < kills else 0
        pid = os.fork()
        if pid == 0:
            of_a_run(Fate(moment, number))
            sys.argv = ["train/run.py", *sys.argv[3:]]
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115 -- to its end
            run.main()
            raise SystemExit(0)  # runs what a process runs at its end, and does not return to the loop that forks
        ends.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        if ends[-1] == 0:
            break
    print(json.dumps(ends))


if __name__ == "__main__":
    main()
