"""head=auto: search the fastest head for a target, a text and a device by successive halving (Jamieson and Talwalkar,
arXiv:1502.07943, algorithm 1).

    OUTPUT/round-1/NAME    a run of every candidate; half of the budget is divided equally among all rounds and their runs
    OUTPUT/round-2/NAME    runs of the faster half, which start from their heads of round 1, and so on
    OUTPUT                 the run of the winner, with the other half of the budget

A search that was stopped continues with the same command, because runs that are finished are not repeated.
"""

import copy
import gc
import json
import math
import re
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig
from transformers import set_seed

from foredraft.cli import user_message
from foredraft.config import check, without_hydra
from foredraft.heads.target_model import Target
from foredraft.train.data.corpus import Corpus, has_prompts
from foredraft.train.finalize import finalize
from foredraft.train.run import load, prepare, start_process, train, with_self_generated_text
from foredraft.train.runtime import distributed
from foredraft.train.runtime.run_state import METRICS, claim, done_before, unlock, written_tokens

OWN = ("head", "budget", "heads", "candidates", "output_dir")  # keys that do not go to the candidates
SHARED = ("target", "data", "max_length", "packing", "seed", "self_generated_tokens")  # the same for all candidates
UNITS = {"s": 1 / 60, "m": 1, "h": 60, "steps": 1}
Amount = tuple[float, bool]  # of training, in minutes or steps, and whether it is in steps


def search(cfg: DictConfig) -> None:
    """Run `foredraft train head=auto`."""
    if distributed.world_size() > 1:
        raise ValueError("head=auto runs in one process: start it without torchrun, which can train its winner then")
    amount, in_steps = parse_budget(cfg.budget)
    left = candidates(cfg)
    sizes = round_sizes(len(left))
    fewest = 2 * len(sizes) * len(left)
    if in_steps and amount < fewest:
        raise ValueError(
            f"budget={cfg.budget} has no step for each run: give at least {fewest}steps, or fewer heads=[...]"
        )
    start_process(cfg)
    for run in left.values():
        run.strategy = cfg.strategy
    if "load_full_target" in cfg.hidden_states:
        cfg.hidden_states.load_full_target = True  # candidates are compared by how fast they decode
    target, data = load(cfg)
    if not (has_prompts(data.validation) and has_prompts(data.test)):
        raise ValueError(
            "head=auto compares heads by how fast they decode held-out text, but no held-out sample is without images: add "
            "samples without images, or choose a head"
        )
    # The winner is measured on prompts that did not choose it.
    chosen_on = data._replace(test=data.validation, test_sets={})
    directory = Path(cfg.output_dir)
    with claim(directory):
        cfg.trainer.max_steps = -1  # as much text as is asked for, whatever each run reads
        with_self_generated_text(cfg, target, data, directory, written_tokens(cfg))
        for number, size in enumerate(sizes, 1):
            share, speeds = (amount / 2 / len(sizes) / size, in_steps), dict[str, float]()
            for name, run in left.items() if len(left) > 1 else ():  # a single one: the others failed
                print(f"round {number} of {len(sizes)}: {name}", flush=True)
                trial = copy.deepcopy(run)
                trial.eval.steps, trial.eval.check_float32 = 0, False
                trial.eval.final_num_prompts = trial.eval.timed_prompts
                folder = directory / f"round-{number}" / name
                try:
                    speeds[name] = speed(trial, share, folder, target, chosen_on, directory)
                except Exception as error:  # the figures of the others are worth more than this one's reason
                    said = user_message(error, str(folder)) or f"{type(error).__name__}: {error}"
                    print(f"{name} is dropped: {' '.join(said.split())[:500]}", flush=True)
                run.init_from = str(folder / "head")
            if len(left) > 1:
                left = fastest_half(left, speeds, f"round {number} of {len(sizes)}")
        ((name, run),) = left.items()
        print(f"{name} trains for the rest of the budget", flush=True)
        speed(run, (amount / 2, in_steps), directory, target, data, directory)


def parse_budget(text: str) -> Amount:
    """Raise ValueError for a text that is not an amount."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(h|m|s|steps)", text.strip())
    if match is None or float(match[1]) == 0:
        raise ValueError(f"budget={text} is not an amount: give a time such as 2h, 30m or 90s, or steps as 4000steps")
    return float(match[1]) * UNITS[match[2]], match[2] == "steps"


def round_sizes(count: int) -> list[int]:
    """Return the number of candidates in each round: 10 gives 10, 5, 3, 2. A single candidate needs no round."""
    return [] if count < 2 else [count, *round_sizes(math.ceil(count / 2))]


def candidates(cfg: DictConfig) -> dict[str, DictConfig]:
    """Return the config of each candidate. Raise ValueError or HydraException for one that cannot be compared."""
    main, typed, runs = HydraConfig.instance().cfg, HydraConfig.get().overrides.task, dict[str, DictConfig]()
    for override in reversed(typed):  # those of the user come after those that follow from them
        if re.match(r"\+*trainer\.max_(steps|minutes)=", override):
            raise ValueError(f"{override}: head=auto trains as long as budget={cfg.budget} says, leave it out")
    given = [override for override in typed if first_key(override) not in OWN]
    names = list(cfg.heads or cfg.candidates)
    if unknown := [name for name in names if name not in cfg.candidates]:
        raise ValueError(
            f"heads={unknown} are not among candidates, which has {', '.join(map(str, cfg.candidates))}; "
            f"\"+candidates.{unknown[0]}=['head={unknown[0]}']\" adds one"
        )
    for name in names:
        try:
            run = without_hydra(check("train", [*cfg.candidates[name], *given]))
        except HydraException as error:
            raise HydraException(f"candidates.{name}: {error}") from error
        finally:
            HydraConfig.instance().cfg = main  # which `check` replaces
        if "head" not in run:
            raise ValueError(f"candidates.{name} has head=auto, which is not a head")
        own = {*map(first_key, cfg.candidates[name])}
        if differ := [key for key in SHARED if key in own or run[key] != cfg[key]]:
            raise ValueError(f"candidates.{name} sets {differ[0]}, which must be the same for all candidates")
        run.output_dir = cfg.output_dir
        if "path" in run.hidden_states:  # heads read different layers
            path = f"{run.hidden_states.path}/{run.head._target_}"
            run.hidden_states.path, run.hidden_states.load_full_target = path, True
        runs[name] = run
    return runs


def first_key(override: str) -> str:
    """Return the first part of its key: trainer of +trainer.max_steps=3."""
    return re.split(r"[.=@]", override.lstrip("+~"))[0]


def speed(run: DictConfig, amount: Amount, directory: Path, target: Target, data: Corpus, text: Path) -> float:
    """Return the speed-up of a run's head with tree=auto, after training it for `amount` unless the run is finished. text:
    where the text is that the target wrote for all runs."""
    run.output_dir = str(directory)
    run.trainer.max_steps, run.trainer.max_minutes = (int(amount[0]), 0.0) if amount[1] else (-1, amount[0])
    if not done_before(run):
        directory.mkdir(parents=True, exist_ok=True)
        for file in (*text.glob("self_generated.*"), *text.glob("held_out.*")):
            if not (directory / file.name).exists():
                (directory / file.name).symlink_to(file.resolve())
        set_seed(run.seed)
        try:
            prepared = prepare(run, target, data)
            trainer = train(run, prepared)
            finalize(run, trainer, prepared.data, prepared.held_out, directory)
        finally:
            unlock()
            gc.collect()  # a trainer refers to itself
    return json.loads((directory / METRICS).read_text())["speedup_auto"]


def fastest_half(left: dict[str, DictConfig], speeds: dict[str, float], when: str) -> dict[str, DictConfig]:
    """Return the faster half of the candidates, and print all, the fastest first. Raise ValueError if all have failed."""
    if not speeds:
        raise ValueError("no candidate is left: each line above that ends in a reason names one that failed")
    ranked = sorted(speeds, key=lambda name: -speeds[name])
    stay = ranked[: math.ceil(len(left) / 2)]
    print(f"\n{when}:")
    for name in ranked:
        print(f"  {name:<14} {speeds[name]:>5.2f}x  {'stays' if name in stay else 'is dropped'}")
    print(flush=True)
    return {name: left[name] for name in stay}
