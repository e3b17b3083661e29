"""head=auto: search the fastest head for a target, a text and a device by successive halving (Jamieson and Talwalkar,
arXiv:1502.07943, algorithm 1).

    OUTPUT/round-1/NAME    a run of every candidate; half of the budget is divided equally among all rounds and their runs
    OUTPUT/round-2/NAME    runs of the faster half, which start from their heads of round 1, and so on
    OUTPUT                 the run of the winner, with the other half of the budget

A search that was stopped continues with the same command, because runs that are finished are not repeated.
"""

import gc
import json
import math
import re
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig
from transformers import set_seed

from foredraft.cli import user_message
from foredraft.config import check
from foredraft.heads.target_model import Target
from foredraft.train.data.corpus import Corpus
from foredraft.train.finalize import finalize
from foredraft.train.run import load, prepare, start_process, train, with_self_generated_text
from foredraft.train.runtime import distributed
from foredraft.train.runtime.locks import hold
from foredraft.train.runtime.run_state import METRICS, done_before, keep_finished, unlock

OWN = ("head", "budget", "heads", "candidates", "output_dir")  # keys that do not go to the candidates
SHARED = ("target", "data", "max_length", "packing", "seed", "self_generated_tokens")  # the same for all candidates
MINUTES = {"s": 1 / 60, "m": 1, "h": 60}


def search(cfg: DictConfig) -> None:
    """Run `foredraft train head=auto`."""
    if distributed.world_size() > 1:
        raise ValueError(
            "head=auto runs in one process: start it without torchrun, then train its winner with torchrun"
        )
    amount, unit = parse_budget(cfg.budget)
    left = candidates(cfg)
    sizes = round_sizes(len(left))
    fewest = 2 * len(sizes) * len(left)
    if unit == "steps" and amount < fewest:
        raise ValueError(
            f"budget={cfg.budget} has no step for each run: give at least {fewest}steps, or fewer heads=[...]"
        )
    start_process(cfg)
    if "load_full_target" in cfg.hidden_states:
        cfg.hidden_states.load_full_target = True  # candidates are compared by how fast they decode
    target, data = load(cfg)
    directory = Path(cfg.output_dir)
    directory.mkdir(parents=True, exist_ok=True)
    lock = hold(directory, "output_dir")
    if keep_finished(directory):
        directory.mkdir()
        lock.close()
        lock = hold(directory, "output_dir")
    with lock:
        cfg.trainer.max_steps = -1  # as much text as is asked for, whatever each run reads
        with_self_generated_text(cfg, target, data, directory)
        # The winner is measured on prompts that did not choose it.
        chosen_on = data._replace(test=data.validation, test_sets={})
        before: dict[str, Path] = {}
        for number, size in enumerate(sizes, 1):
            if len(left) == 1:  # the others failed
                break
            share = amount / 2 / len(sizes) / size
            speeds = {}
            for name in list(left):
                run = compose_run(left[name], directory / f"round-{number}" / name, share, unit, before.get(name), cfg)
                run.eval.steps, run.eval.check_float32, run.eval.final_num_prompts = 0, False, run.eval.timed_prompts
                run.push_to_hub = None  # the winner is pushed
                print(f"round {number} of {len(sizes)}: {name}", flush=True)
                try:
                    speeds[name] = measured_speed(run, target, chosen_on, directory)
                except Exception as error:  # the figures of the others are worth more than this one's reason
                    said = user_message(error, run.output_dir) or f"{type(error).__name__}: {error}"
                    print(f"{name} is dropped: {' '.join(said.split())[:500]}", flush=True)
                before[name] = Path(run.output_dir) / "head"
            if not speeds:
                raise ValueError("no candidate is left: each line above that ends in a reason names one that failed")
            left = kept(left, speeds, f"round {number} of {len(sizes)}")
        (name,) = left
        print(f"{name} trains for the rest of the budget", flush=True)
        measured_speed(
            compose_run(left[name], directory, amount / 2, unit, before.get(name), cfg), target, data, directory
        )


def parse_budget(text: str) -> tuple[float, str]:
    """Return an amount and its unit, minutes or steps. Raise ValueError for another text."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(h|m|s|steps)", text.strip())
    if match is None or float(match[1]) == 0:
        raise ValueError(
            f"budget={text} is not an amount: give a time such as 2h, 30m or 90s, or steps such as 4000steps"
        )
    return (float(match[1]), "steps") if match[2] == "steps" else (float(match[1]) * MINUTES[match[2]], "minutes")


def round_sizes(count: int) -> list[int]:
    """Return the number of candidates in each round: 10 gives 10, 5, 3, 2. A single candidate needs no round."""
    return [] if count < 2 else [count, *round_sizes(math.ceil(count / 2))]


def candidates(cfg: DictConfig) -> dict[str, list[str]]:
    """Return the overrides of each candidate. Raise ValueError or HydraException for one that cannot be compared."""
    typed = HydraConfig.get().overrides.task
    for override in typed:
        if re.match(r"\+*trainer\.max_(steps|minutes)=", override):
            raise ValueError(f"{override}: head=auto trains as long as budget={cfg.budget} says, leave it out")
    given = [override for override in typed if first_key(override) not in OWN]
    names = list(cfg.heads or cfg.candidates)
    if unknown := [name for name in names if name not in cfg.candidates]:
        raise ValueError(f"heads={unknown} are not among candidates, which has {', '.join(map(str, cfg.candidates))}")
    for name in names:
        if not re.fullmatch(r"[\w.-]+", name):
            raise ValueError(f"candidates.{name} names a folder: use letters, digits and underscores")
        check_candidate(cfg, name, [*cfg.candidates[name], *given])
    return {name: [*cfg.candidates[name], *given] for name in names}


def first_key(override: str) -> str:
    """Return the first part of its key: trainer of +trainer.max_steps=3."""
    return re.split(r"[.=@]", override.lstrip("+~"))[0]


def check_candidate(cfg: DictConfig, name: str, overrides: list[str]) -> None:
    main = HydraConfig.instance().cfg  # which `check` replaces
    try:
        own = check("train", overrides)
    except HydraException as error:
        raise HydraException(f"candidates.{name}: {error}") from error
    finally:
        HydraConfig.instance().cfg = main
    if "candidates" in own:
        raise ValueError(f"candidates.{name} has head=auto, which is not a head")
    typed = [key for key in map(first_key, cfg.candidates[name]) if key in SHARED]
    if differ := [*typed, *(key for key in SHARED if own[key] != cfg[key])]:
        raise ValueError(f"candidates.{name} sets {differ[0]}, which must be the same for all candidates")


def compose_run(
    overrides: list[str], directory: Path, amount: float, unit: str, head: Path | None, cfg: DictConfig
) -> DictConfig:
    """Return the config of a run that trains for `amount` and starts from `head`."""
    run = hydra.compose("train", overrides)
    run.output_dir, run.strategy = str(directory), cfg.strategy
    run.init_from = run.init_from if head is None else str(head)
    run.trainer.max_steps = int(amount) if unit == "steps" else -1
    run.trainer.max_minutes = 0.0 if unit == "steps" else amount
    if "path" in run.hidden_states:  # heads read different layers
        run.hidden_states.path, run.hidden_states.load_full_target = (
            f"{run.hidden_states.path}/{run.head._target_}",
            True,
        )
    return run


def measured_speed(run: DictConfig, target: Target, data: Corpus, text: Path) -> float:
    """Return the speed-up of a run's head with tree=auto, after training it unless the run is finished. text: where the text
    is that the target wrote for all runs."""
    directory = Path(run.output_dir)
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


def kept(left: dict[str, list[str]], speeds: dict[str, float], when: str) -> dict[str, list[str]]:
    """Return the faster half of the candidates, and print all, the fastest first."""
    ranked = sorted(speeds, key=lambda name: -speeds[name])
    stay = ranked[: math.ceil(len(left) / 2)]
    print(f"\n{when}:")
    for name in ranked:
        print(f"  {name:<14} {speeds[name]:>5.2f}x  {'stays' if name in stay else 'is dropped'}")
    print(flush=True)
    return {name: left[name] for name in stay}
