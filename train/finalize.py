"""What a run ends with: the best weights, saved, checked and measured as they were saved, and the report."""

import json
import shutil
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import send_to_device
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from transformers import TrainerState

from foredraft.heads import lora
from foredraft.heads.base import DraftHead, PackedBatch, ParallelHead
from foredraft.heads.checkpoint import published_dtype, read_head
from foredraft.heads.hub.card import model_card
from foredraft.heads.target import Target
from foredraft.inference.drafters import load_drafter
from foredraft.inference.drafters.base import Drafter
from foredraft.inference.evaluation.measure import NOT_CHECKED, check_identical, evaluate, length_settings
from foredraft.inference.evaluation.measure import run as decode
from foredraft.inference.evaluation.report import RunRecord, Sample, table, write_report
from foredraft.inference.generation import generate, tokens_per_forward
from foredraft.train import held_out, publish
from foredraft.train.checks import save_checked
from foredraft.train.data import data_card
from foredraft.train.data.corpus import Corpus, Held, Packed, has_chats, has_prompts, prompts
from foredraft.train.data.packing import collate
from foredraft.train.module import DistillationModel
from foredraft.train.runtime import checkpoints, distributed, loggers, strategy
from foredraft.train.runtime.callbacks import time_limit_record
from foredraft.train.runtime.environment import facts_of_run
from foredraft.train.runtime.run_state import CHECKPOINTS, METRICS, rows_per_step, seconds_of, write_atomically
from foredraft.train.trainer import HeadTrainer

# A run of few minutes is measured for at least MIN_MINUTES. PROBE: new tokens that show how long a text takes.
MIN_MINUTES, PROBE = 5, 16


def finalize(
    cfg: DictConfig, trainer: HeadTrainer, data: Corpus, rows: list[dict[str, Tensor]], directory: Path
) -> None:
    """Choose the best weights, save them, measure the files, and report. Processes that only help with the target's
    forwards leave no files.
    rows: of held-out text (train/held_out.py)."""
    distillation, history = trainer.distillation, trainer.state.log_history
    head, target = distillation.head, distillation.target
    strategy.forget_sharding(cfg.strategy)
    step = trainer.state.global_step
    best = checkpoints.best_step(history) if cfg.eval.keep_best else None
    if best is not None and best != step:
        print(f"the weights of step {best}, which drafted best on validation prompts, are kept", flush=True)
        head = read_head(checkpoints.best_head(directory / CHECKPOINTS, best), target).float().to(target.device)
        distillation.head = head
    metrics: dict[str, Any] = {}
    samples: list[Sample] = []
    if not target.embeddings_only:
        rows = held_out.for_run(rows, trainer.state.max_steps * rows_per_step(cfg) * cfg.max_length)
        apart = held_out.agreement(trainer.criterion.with_head(head.eval()), rows)
        metrics = apart.final_figures
    with tempfile.TemporaryDirectory() as scratch:
        saved = (directory if distributed.rank() == 0 else Path(scratch)) / "head"
        save_final(distillation, saved, data, cfg.max_length)
        if not target.embeddings_only and has_prompts(data.test):
            decoded, shown = measure(target, saved, data, cfg.eval, cfg.trainer.max_minutes)
            metrics, samples = decoded | metrics, [shown]
    if distributed.rank() > 0:
        return
    rates = [entry["tokens_per_second"] for entry in history if "tokens_per_second" in entry]
    metrics["train_tokens_per_second"] = round(sum(rates) / max(1, len(rates)), 1)
    metrics["train_seconds"] = round(seconds_of(trainer.state), 3)
    metrics["step"] = best or step
    metrics |= trained(trainer.state)
    metrics |= facts_of_run(head, target)
    config = OmegaConf.to_yaml(cfg, resolve=True)
    (directory / "head" / "config.yaml").write_text(config)
    (directory / "history.json").write_text(json.dumps(history, indent=1) + "\n")
    record = RunRecord(f"{head.kind} for {target.name}", metrics, history, samples, config)
    write_results(directory, head, target, data, record)
    if target.embeddings_only:
        print(
            "nothing was measured, because only the target's ends are loaded here: foredraft evaluate "
            f"target={target.name} drafter={directory / 'head'}",
            flush=True,
        )
    elif not has_prompts(data.test):
        print(
            "nothing was decoded, because every held-out conversation has an image and prompts are text alone: what is said "
            "of acceptance is predicted along the held-out answers",
            flush=True,
        )
    if cfg.push_to_hub is not None:
        print(publish.push(directory / "head", target, cfg.push_to_hub, private=cfg.push_private), flush=True)
    loggers.log_results(trainer.args.report_to, directory, config, metrics)
    if not cfg.keep_checkpoints:
        shutil.rmtree(directory / CHECKPOINTS)


def trained(state: TrainerState) -> dict[str, int]:
    """Return how much the head has learned from, and how many steps a time limit removed."""
    tokens = sum(entry["tokens"] for entry in state.log_history if "tokens" in entry)
    print(f"trained {state.global_step} steps on {tokens:,} tokens in {seconds_of(state):.0f} s", flush=True)
    limit = time_limit_record(state.log_history)
    if limit:
        print(
            f"trainer.max_minutes left out {limit['all_steps'] - limit['fitted_steps']} of {limit['all_steps']} steps: "
            f"acceptance may be lower than published figures (trainer.max_steps={limit['all_steps']} trains them all)",
            flush=True,
        )
    found = {"train_steps": state.global_step, "train_tokens": tokens}
    return found | ({"train_steps_unlimited": limit["all_steps"]} if limit else {})


@torch.no_grad()
def rank_accuracies(distillation: DistillationModel, texts: Held, length: int, ranks: int = 8) -> list[list[float]]:
    """Measure [depth][rank]: how often the guess of this rank is the target's token, on held-out text; it shapes the tree."""
    target, head = distillation.target, distillation.head
    data = Packed(held_out.tokenized(target.text_tokenizer, texts, range(len(texts))), length, seed=0)
    hits, counts = torch.zeros(head.depth, ranks), torch.zeros(head.depth)
    for row in range(min(len(data), 24)):
        text = PackedBatch(**send_to_device(collate([data[row]]), target.device))
        for depth, guesses, best in distillation.guesses(text, *distillation.forward_target(text), ranks=ranks):
            hits[depth - 1] += (guesses == best[:, None]).sum(0).cpu()
            counts[depth - 1] += len(best)
    return [[round(value, 5) for value in row] for row in (hits / counts[:, None].clamp(min=1)).tolist()]


def save_final(distillation: DistillationModel, directory: Path, data: Corpus, length: int) -> float:
    """Write the head's files in the target's dtype and pass the parity gate; its largest difference."""
    head, target = distillation.head.eval(), distillation.target
    lora.merge(head)
    head.on_train_end()
    facts: dict[str, Any] = {}
    if isinstance(head, ParallelHead) and not target.embeddings_only:
        head.to(published_dtype(target))
        facts["accuracies"] = rank_accuracies(distillation, data.validation, length)
    difference = save_checked(head, target, directory, data.train, **facts)
    print(f"parity gate: training forward, drafter and saved files agree to {difference:.1e}", flush=True)
    return difference


def measure(
    target: Target, directory: Path, data: Corpus, settings: Any, minutes: float
) -> tuple[dict[str, Any], Sample]:
    """Decode the held-out prompts with the saved files. settings: `eval` of conf/train.yaml. minutes: limit of the training,
    0 for none."""
    rows = prompts(target.text_tokenizer, data.test, settings.final_num_prompts, settings.prompt_tokens)
    count, timed = measured_prompts(target, rows, settings, minutes)
    rows = [rows[len(rows) * row // count] for row in range(count)]
    load = partial(load_drafter, str(directory), tree="fixed")
    drafter = load(target)
    ends = has_chats(data.test)
    metrics = evaluate(target, drafter, rows, settings.max_new_tokens, timed, ends)
    metrics |= (
        check_identical(target, load, rows, settings.max_new_tokens, ends) if settings.check_float32 else NOT_CHECKED
    )
    if data.test_sets:
        metrics["acceptance_length_by_set"] = by_set(target, drafter, data, settings, count)
    return metrics, sample(target, drafter, rows[len(rows) // 2], **length_settings(settings.max_new_tokens, ends))


def measured_prompts(target: Target, rows: list[list[int]], settings: Any, minutes: float) -> tuple[int, int]:
    """Return how many of the prompts to decode, and how many of these to time. A run with a limit of minutes decodes fewer
    than `settings` says, if all would take longer than the limit and than MIN_MINUTES."""
    wanted = len(rows), min(len(rows), settings.timed_prompts)
    if not minutes:
        return wanted
    started = time.perf_counter()
    generate(target, None, torch.tensor([rows[0]], device=target.device), max_new_tokens=PROBE, eos_token_id=-1)
    seconds = (time.perf_counter() - started) * settings.max_new_tokens / PROBE  # of one text
    # Six times in batches, which take a third of the time: greedy, sampled, and both with and without drafts in float32. Six
    # times alone: three decoders, greedy and sampled.
    share = 60 * max(minutes, MIN_MINUTES) / (6 * seconds * (wanted[0] / 3 + wanted[1]))
    counts = min(wanted[0], max(4, int(share * wanted[0]))), min(wanted[1], max(2, int(share * wanted[1])))
    # The processes that run a sharded target together must decode the same prompts. Of others, only one is left here.
    count, timed = distributed.broadcast(counts) if target.is_collective else counts
    if count < wanted[0]:
        print(
            f"{count} of {wanted[0]} held-out prompts are decoded, and {timed} timed: more would take longer than "
            f"{max(minutes, MIN_MINUTES):g} minutes (trainer.max_minutes; foredraft evaluate measures on more)",
            flush=True,
        )
    return count, timed


def by_set(target: Target, drafter: Drafter, data: Corpus, settings: Any, total: int) -> dict[str, float | None]:
    """Measure the acceptance length on each data set of a mix, over `total` prompts; None if all prompts of a set are too
    long."""
    found: dict[str, float | None] = {}
    count = -(-total // len(data.test_sets))
    for name, held in data.test_sets.items():
        try:
            rows = prompts(target.text_tokenizer, held, count, settings.prompt_tokens)
        except ValueError:
            found[name] = None
            continue
        decoded = decode(
            target,
            drafter,
            rows,
            what=f"measuring on {name}",
            **length_settings(settings.max_new_tokens, has_chats(held)),
        )
        found[name] = round(tokens_per_forward(decoded), 4)
    return found


def sample(target: Target, drafter: Any, row: list[int], **settings: Any) -> Sample:
    """Return one continuation and where each of its tokens came from: 0 the target's own choice, d drafted at depth d."""
    ids = torch.tensor([row], device=target.device)
    out = generate(target, drafter, ids, seed=0, **settings)
    accepted, emitted = [step.accepted[0] for step in out.steps], [step.emitted[0] for step in out.steps]
    return Sample.of(target.text_tokenizer, row, out.new_tokens[0], accepted, emitted)


def write_results(directory: Path, head: DraftHead, target: Target, data: Corpus, record: RunRecord) -> None:
    """Write the model card, report.html, metrics.json (last: it marks a run as finished), and the table on the terminal."""
    metrics = record.metrics
    facts = publish.head_metadata(head, target) | {"parameters": metrics["parameters"]}
    head_directory = directory / "head"
    (head_directory / "README.md").write_text(model_card(metrics, facts, dict(data_card.lines(data.card))))
    # Next to the weights too, where `scripts/push.py` makes the Hub's card of it.
    (head_directory / "metrics.json").write_text(
        json.dumps(metrics | {"about": facts, "data": data.card}, indent=2) + "\n"
    )
    write_report(directory / "report.html", record)
    write_atomically(directory / METRICS, json.dumps(metrics, indent=2) + "\n")
    print(table(metrics), flush=True)
    print(f"head: {head_directory}   report: {directory / 'report.html'}", flush=True)
