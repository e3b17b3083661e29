"""What a run ends with: the best weights, saved, checked and measured as they were saved, and the report."""

import copy
import json
import shlex
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from transformers import TrainerState

from foredraft.heads import lora
from foredraft.heads.base import DraftHead, ParallelHead
from foredraft.heads.checkpoint import published_dtype, read_head
from foredraft.heads.hub import weights_sha256
from foredraft.heads.hub.card import aligned, measured, model_card
from foredraft.heads.target_model import Target
from foredraft.inference.drafters import AutoTree, Drafter, fixed_form, load_drafter, tree_of
from foredraft.inference.drafters.policy import HeadTree
from foredraft.inference.evaluation import results as benchmark_results
from foredraft.inference.evaluation.benchmark import BASELINE, Benchmark, Lines, System
from foredraft.inference.evaluation.measure import NOT_CHECKED, check_identical, run
from foredraft.inference.evaluation.report import Report, write_report
from foredraft.inference.evaluation.results import (
    ALL,
    LOOPS,
    Results,
    Sample,
    Spread,
    Table,
    acceptance,
    accepted_shares,
)
from foredraft.inference.generation import generate, tokens_per_forward
from foredraft.train import held_out, publish
from foredraft.train.checks import save_checked
from foredraft.train.data import data_card, long_prompts, prompt_sets
from foredraft.train.data.corpus import Corpus, Held, has_chats, has_prompts
from foredraft.train.data.packing import Packed
from foredraft.train.module import DistillationModel
from foredraft.train.runtime import checkpoints, distributed, loggers, strategy
from foredraft.train.runtime.callbacks import time_limit_record
from foredraft.train.runtime.environment import facts_of_measurement, facts_of_run
from foredraft.train.runtime.locks import write_atomically
from foredraft.train.runtime.run_state import CHECKPOINTS, METRICS, rows_per_step, seconds_of
from foredraft.train.trainer import HeadTrainer

AUTO = "head, tree=auto"
TEMPERATURES = [0.0, 1.0]
# A run of few minutes is measured for at least MIN_MINUTES. PROBE: new tokens that show how long a text takes.
MIN_MINUTES, PROBE = 5, 16


def finalize(
    cfg: DictConfig, trainer: HeadTrainer, data: Corpus, rows: list[dict[str, Tensor]], directory: Path
) -> None:
    """Choose the best weights, save them, measure the files, and report. Processes that only help with the target's
    forwards leave no files.
    rows: of held-out text (train/held_out.py)."""
    strategy.forget_sharding(cfg.strategy)
    step = keep_best_weights(cfg, trainer, directory)
    distillation, history = trainer.distillation, trainer.state.log_history
    head, target = distillation.head, distillation.target
    metrics: dict[str, Any] = {}
    results: Results | None = None
    samples: list[Sample] = []
    if not target.embeddings_only:
        rows = held_out.for_run(rows, trainer.state.max_steps * rows_per_step(cfg) * cfg.max_length)
        metrics = held_out.agreement(trainer.criterion.with_head(head.eval()), rows)
    with tempfile.TemporaryDirectory() as scratch:
        saved = (directory if distributed.rank() == 0 else Path(scratch)) / "head"
        save_final(distillation, saved, data, cfg.max_length)
        if not target.embeddings_only and has_prompts(data.test):
            lines, minutes = Lines(Path(scratch) / "lines.jsonl"), cfg.trainer.max_minutes
            figures, results, samples = measure(target, saved, data, cfg.eval, minutes, lines)
            metrics = figures | metrics
    if distributed.rank() > 0:
        return
    metrics |= {"step": step} | training_figures(trainer.state) | facts_of_run(head, target)
    config = OmegaConf.to_yaml(cfg, resolve=True)
    (directory / "head" / "config.yaml").write_text(config)
    (directory / "history.json").write_text(json.dumps(history, indent=1) + "\n")
    page = Report(f"{head.kind} for {target.name}", metrics, results, samples, history, config)
    write_results(directory, head, target, data, page)
    if target.embeddings_only:
        print(
            "nothing was measured, because only the target's ends are loaded here: "
            + shlex.join(["foredraft", "evaluate", f"target={target.name}", f"drafter={directory / 'head'}"]),
            flush=True,
        )
    elif results is None:
        print(
            "nothing was decoded, because every held-out conversation has an image: the acceptance is predicted along the "
            "held-out answers",
            flush=True,
        )
    loggers.log_results(trainer.args.report_to, directory, config, metrics)
    if not cfg.keep_checkpoints:
        shutil.rmtree(directory / CHECKPOINTS)


def keep_best_weights(cfg: DictConfig, trainer: HeadTrainer, directory: Path) -> int:
    """Replace the last head by the one that drafted best on validation prompts. Return its step."""
    distillation, state = trainer.distillation, trainer.state
    best = checkpoints.best_step(state.log_history) if cfg.eval.keep_best else None
    if best is not None and best != state.global_step:
        print(f"the weights of step {best}, which drafted best on validation prompts, are kept", flush=True)
        target = distillation.target
        head = read_head(checkpoints.best_head(directory / CHECKPOINTS, best), target)
        distillation.head = head.float().to(target.device)
    return best or state.global_step


def training_figures(state: TrainerState) -> dict[str, float]:
    """Return how fast and how much the head has learned, and how many steps a time limit removed."""
    tokens = sum(entry.get("tokens", 0) for entry in state.log_history)
    rates = [entry["tokens_per_second"] for entry in state.log_history if "tokens_per_second" in entry]
    print(f"trained {state.global_step} steps on {tokens:,} tokens in {seconds_of(state):.0f} s", flush=True)
    limit = time_limit_record(state)
    if limit:
        print(
            f"trainer.max_minutes left out {limit['all_steps'] - limit['fitted_steps']} of {limit['all_steps']} steps: "
            f"acceptance may be lower than published figures (trainer.max_steps={limit['all_steps']} trains them all)",
            flush=True,
        )
    return {
        "train_tokens_per_second": round(sum(rates) / max(1, len(rates)), 1),
        "train_seconds": round(seconds_of(state), 3),
        "train_steps": state.global_step,
        "train_tokens": tokens,
        **({"train_steps_unlimited": limit["all_steps"]} if limit else {}),
    }


@torch.no_grad()
def rank_accuracies(distillation: DistillationModel, texts: Held, length: int, ranks: int = 8) -> list[list[float]]:
    """Measure [depth][rank]: how often the guess of this rank is the target's token, on held-out text; it shapes the tree."""
    target, head = distillation.target, distillation.head
    ranks = ranks if head.draft_ids is None else min(ranks, len(head.draft_ids))
    data = Packed(held_out.tokenized(target.text_tokenizer, texts, range(len(texts))), length, seed=0)
    hits, counts = torch.zeros(head.depth, ranks), torch.zeros(head.depth)
    rows = (data[row] for row in range(min(len(data), 24)))
    for depth, guesses, best in distillation.guesses_of(rows, ranks):
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
    target: Target, directory: Path, data: Corpus, settings: Any, minutes: float, lines: Lines
) -> tuple[dict[str, Any], Results, list[Sample]]:
    """Run the benchmark on held-out prompts with the saved files: the baseline, the fixed tree or chain, and tree=auto.
    settings: `eval` of conf/train.yaml. minutes: limit of the training, 0 for none. lines: the benchmark's state. Returns the
    figures of metrics.json, and what the report shows.

    The fixed one decodes all prompts in batches, which measures acceptance. All three decode `timed_prompts` of them alone,
    which measures speed. Losslessness is checked on all prompts in float32, in batches.
    """
    rows = prompt_sets.held_out(target.text_tokenizer, data, settings.final_num_prompts, settings.prompt_tokens)
    count, timed = measured_prompts(target, [row.tokens for row in rows], settings, minutes)
    count = min(len(rows), max(count, len(data.test_sets)))  # each data set of a mix has a prompt
    rows = [rows[len(rows) * row // count] for row in range(count)]

    def load(target: Target) -> HeadTree:
        tree = tree_of(load_drafter(str(directory), target))
        assert tree is not None
        return tree

    fixed = load(target)
    auto = AutoTree(copy.copy(fixed), target)
    systems = [System(BASELINE, None), System(f"head, {fixed_form(fixed)}", fixed, batched=True), System(AUTO, auto)]
    benchmark = Benchmark(target, systems, rows, settings.max_new_tokens, lines, timed)
    metadata = {**facts_of_measurement(target), "prompts": prompt_sets.summary(rows)}
    results = benchmark_results.measure(benchmark, TEMPERATURES, 1, metadata)
    for error in benchmark.failed.values():
        raise error
    metrics = figures_of(benchmark, results, fixed) | NOT_CHECKED
    if settings.check_float32:
        tokens = [row.tokens for row in rows]
        metrics |= check_identical(target, load, tokens, settings.max_new_tokens, has_chats(data.test))
    if settings.lengths:
        metrics["acceptance_length_by_context"] = by_context(target, fixed, data, settings)
    if data.test_sets:  # of a mix, loops included
        drafted = Table(benchmark.lines.lines, benchmark.texts, TEMPERATURES[0]).batched[systems[1].name].values()
        metrics["acceptance_length_by_set"] = lengths = dict[str, float | None]()
        for name in data.test_sets:
            tau = acceptance([line for line in drafted if rows[line["text"]].category == name])
            lengths[name] = None if tau is None else round(tau, 4)
    return metrics, results, list(benchmark_results.samples(benchmark))


def by_context(target: Target, drafter: Drafter, data: Corpus, settings: Any) -> dict[str, float]:
    """Return the acceptance length after texts of each of the lengths."""
    texts = long_prompts.texts_of(target.text_tokenizer, data, settings.num_prompts, settings.lengths)
    prompts = long_prompts.continued(target.text_tokenizer, texts, settings.lengths)
    figures = {}
    for name in dict.fromkeys(prompt.category for prompt in prompts):
        rows = [prompt.tokens for prompt in prompts if prompt.category == name]
        generations = run(target, drafter, rows, settings.max_new_tokens, f"decoding after {name}")
        figures[name] = round(tokens_per_forward(generations), 4)
    return figures


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


def figures_of(benchmark: Benchmark, results: Results, drafter: HeadTree) -> dict[str, Any]:
    """Return the figures of metrics.json. drafter: the fixed one. Loops count only for `acceptance_length_all`,
    unless all texts are loops."""
    greedy, sampled = TEMPERATURES
    fixed = f"head, {fixed_form(drafter)}"
    rows = {(row["drafter"], row["temperature"], row["category"]): row for row in results.rows}

    def figure(drafter: str, temperature: float, name: str) -> float | None:
        values = [rows[key][name] for category in (ALL, LOOPS) if (key := (drafter, temperature, category)) in rows]
        value = next((value for value in values if value is not None), None)
        return None if value is None else round(value.median if isinstance(value, Spread) else value, 4)

    table = Table(benchmark.lines.lines, benchmark.texts, greedy)
    every_text = list(table.batched[fixed].values())
    shares = accepted_shares(table.lines(fixed, ALL) or every_text) + [0.0] * drafter.depth
    same = [row for row in results.identity if row["drafter"] == fixed]
    stages = next(row["seconds"] for row in results.stages if row["drafter"] == fixed)
    nodes = max((nodes for line in every_text for nodes in line["nodes"]), default=1)
    return {
        "acceptance_length": figure(fixed, greedy, "acceptance_length"),
        "acceptance_length_sampled": figure(fixed, sampled, "acceptance_length"),
        "acceptance_length_all": round(acceptance(every_text) or 0.0, 4),
        "accepted_per_depth": [round(share, 4) for share in shares[: drafter.depth]],
        "tokens_per_second": figure(fixed, greedy, "tokens_per_second"),
        "baseline_tokens_per_second": figure(BASELINE, greedy, "tokens_per_second"),
        "speedup": figure(fixed, greedy, "speedup"),
        "speedup_sampled": figure(fixed, sampled, "speedup"),
        "speedup_auto": figure(AUTO, greedy, "speedup"),
        "speedup_auto_sampled": figure(AUTO, sampled, "speedup"),
        "identical_in_dtype": round(sum(row["identical"] for row in same) / sum(row["texts"] for row in same), 4),
        "prompts": len(benchmark.texts),
        "timed_prompts": len(table.by_decoder[BASELINE]),
        "preempted_share": round(results.metadata["preempted_share"], 4),
        "new_tokens": benchmark.new_tokens,
        "repetitive_prompts": len(table.loops),
        "tree_nodes": nodes,
        "drafts": f"trees of at most {nodes} nodes" if drafter.branches else f"chains of at most {nodes - 1} drafts",
        "step_seconds": {stage: round(seconds, 6) for stage, seconds in stages.items()},
    }


def write_results(directory: Path, head: DraftHead, target: Target, data: Corpus, page: Report) -> None:
    """Write the model card, the report, metrics.json (last: it marks a run as finished), and the table on the terminal."""
    metrics = page.metrics
    facts = publish.head_metadata(head, target) | {"parameters": metrics["parameters"]}
    head_directory = directory / "head"
    (head_directory / "README.md").write_text(model_card(metrics, facts, dict(data_card.lines(data.card))))
    # Next to the weights too, where `scripts/push.py` makes the Hub's card of it.
    record = metrics | {"about": facts | {"sha256": weights_sha256(head_directory)}, "data": data.card}
    (head_directory / "metrics.json").write_text(json.dumps(record, indent=2) + "\n")
    write_report(directory, page)
    write_atomically(directory / METRICS, json.dumps(metrics, indent=2) + "\n")
    print(aligned(measured(metrics)), flush=True)
    print(f"head: {head_directory}   report: {directory / 'report.html'}", flush=True)
