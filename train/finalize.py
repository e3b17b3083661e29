"""What a run ends with: the head's files, checked and measured as they were saved, and all that tells of them."""

import datetime
import importlib.metadata
import json
import platform
import sys
from pathlib import Path
from typing import Any

import torch

from heads import adapter
from heads.base import DraftHead, ParallelHead
from heads.checkpoint import save_head
from heads.hub.card import model_card
from heads.target import Target
from inference.drafters import load_drafter
from inference.evaluation.measure import evaluate, identical
from inference.evaluation.report import RunRecord, Sample, table, write_report
from inference.generation import generate
from train import parity_gate
from train.data import data_card
from train.data.corpus import Corpus, Held, Packed, prompts, tokenized
from train.module import DistillationModel
from train.runtime.memory import peak_memory
from train.runtime.run_state import METRICS, write_whole


def check_settings(target: Target, data: Corpus, settings: Any, packed: int) -> None:
    """Raise ValueError, before anything is trained, for what would stop the run later. settings: conf/evaluate; packed: the
    length of the training rows."""
    assert target.tokenizer is not None
    if target.context is not None and packed > target.context:
        raise ValueError(f"length={packed}: the target {target.name} reads {target.context} tokens at most")
    for name in ("prompts", "timed_prompts", "prompt_tokens", "new_tokens"):
        if settings[name] < 1:
            raise ValueError(f"evaluate.{name}={settings[name]} must be at least 1")
    length = settings.prompt_tokens
    if target.context is not None and length >= target.context:
        raise ValueError(
            f"evaluate.prompt_tokens={length}: the target reads {target.context} tokens, its answer included"
        )
    longest = max(map(len, prompts(target.tokenizer, data.test, settings.prompts, length)))
    if target.context is not None and longest >= target.context:
        raise ValueError(
            f"a held-out conversation has a prompt of {longest} tokens, the target reads {target.context}, its answer "
            f"included: lower evaluate.prompt_tokens={length}, which lets prompts of 8 times as many in"
        )
    if settings.eval_steps:
        prompts(target.tokenizer, data.validation, settings.eval_prompts, length)


@torch.no_grad()
def rank_accuracies(distillation: DistillationModel, texts: Held, length: int, ranks: int = 8) -> list[list[float]]:
    """[depth][rank]: how often the guess of this rank is the target's token, on held-out text; it shapes the tree."""
    target, head = distillation.target, distillation.head
    assert target.tokenizer is not None
    data = Packed(tokenized(target.tokenizer, texts), length, seed=0)
    hits, counts = torch.zeros(head.depth, ranks), torch.zeros(head.depth)
    for row in range(min(len(data), 24)):
        batch = {name: value[None].to(target.device) for name, value in data[row].items()}
        for depth, guesses, answers in distillation.guesses(**batch, ranks=ranks):
            hits[depth - 1] += (guesses == answers[:, None]).sum(0).cpu()
            counts[depth - 1] += len(answers)
    return [[round(value, 5) for value in row] for row in (hits / counts[:, None].clamp(min=1)).tolist()]


def save_final(distillation: DistillationModel, directory: Path, data: Corpus, length: int) -> float:
    """Round the head to the target's dtype, write its files, pass the parity gate; its largest difference.

    The rounding comes first, so that what is measured and checked is what is shipped.
    """
    head, target = distillation.head.eval(), distillation.target
    head.on_train_end()
    shipped = torch.float32 if not target.dtype.is_floating_point else target.dtype
    head.to(shipped)
    facts: dict[str, Any] = {}
    if isinstance(head, ParallelHead):
        facts["accuracies"] = rank_accuracies(distillation, data.validation, length)
    save_head(head, directory, target, **facts)
    prompt = max((document.tokens for document in data.train), key=len)[:48]  # a gate, no measure: any text will do
    exact = float32(target)
    difference = parity_gate.check(head.to(torch.float32), exact, prompt, saved=directory)
    print(f"parity gate: training forward, drafter and saved files agree to {difference:.1e}", flush=True)
    return difference


def float32(target: Target) -> Target:
    """The same target in float32: itself, or loaded once more (a cast in place would not come back exactly). A quantised one
    stays quantised and computes in float32: its features are its own."""
    if target.dtype == torch.float32:
        return target
    same: dict[str, Any] = {"device": target.device, "quantization": target.quantization, "sharding": target.sharding}
    return Target.from_pretrained(target.name, dtype="float32", **same)


def measure(target: Target, directory: Path, data: Corpus, settings: Any) -> tuple[dict[str, Any], Sample]:
    """Decode the held-out prompts with the saved files. settings: conf/evaluate."""
    assert target.tokenizer is not None
    rows = prompts(target.tokenizer, data.test, settings.prompts, settings.prompt_tokens)
    drafter = load_drafter(str(directory), target)
    metrics = evaluate(target, drafter, rows, settings.new_tokens, settings.timed_prompts)
    metrics |= {"identical_greedy": None, "identical_sampled": None}
    if settings.proof:
        exact = float32(target)
        prover = load_drafter(str(directory), exact)
        limits: dict[str, Any] = {"max_new_tokens": settings.new_tokens, "eos_token_id": -1}
        metrics["identical_greedy"] = identical(exact, prover, rows, **limits)
        metrics["identical_sampled"] = identical(exact, prover, rows, temperature=1.0, **limits)
    return metrics, sample(target, drafter, rows[len(rows) // 2], settings.new_tokens)


def sample(target: Target, drafter: Any, row: list[int], new_tokens: int) -> Sample:
    """One continuation whose tokens know how they came: 0 the target's own choice, d drafted at depth d."""
    assert target.tokenizer is not None
    ids = torch.tensor([row], device=target.device)
    out = generate(target, drafter, ids, max_new_tokens=new_tokens, eos_token_id=-1)
    depths = [0]
    for step in out.steps:
        depths += [*range(1, step.accepted[0] + 1), 0][: step.emitted[0]]
    # A token may hold part of a character, so a piece is what the text grows by with each token.
    text, pieces = "", []
    for number, depth in enumerate(depths, start=1):
        longer = target.tokenizer.decode(out.new_tokens[0][:number]).rstrip("\ufffd")
        pieces.append((longer[len(text) :], depth))
        text = longer
    return Sample(target.tokenizer.decode(row), pieces)


def versions() -> dict[str, str]:
    names = ("torch", "transformers", "accelerate", "safetensors")
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in names}


def device_name(target: Target) -> str:
    if target.device.type == "cuda":
        return torch.cuda.get_device_name(target.device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor() or platform.machine()
    return f"{model}, {torch.get_num_threads()} threads"


def facts_of_run(head: DraftHead, target: Target) -> dict[str, Any]:
    trained = [*head.parameters(), *adapter.lora_layers(target).parameters()]
    return {
        "head": head.kind,
        "target": target.name,
        "parameters": sum(parameter.numel() for parameter in trained),
        "peak_memory_bytes": peak_memory(target.device),
        "device": device_name(target),
        "dtype": str(target.dtype).removeprefix("torch."),
        "versions": versions(),
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
    }


def publish(
    directory: Path,
    metrics: dict[str, Any],
    head: DraftHead,
    data: Corpus,
    history: list[dict],
    shown: Sample,
    config: str,
) -> None:
    """The model card, report.html, metrics.json (last: it marks a run as finished), and the table on the terminal."""
    facts = {
        "kind": head.kind,
        "target": metrics["target"],
        "parameters": metrics["parameters"],
        "depth": head.depth,
        "layers": head.layers,
        "draft_vocab_size": None if head.draft_ids is None else len(head.draft_ids),
        "license": None,
        "format": head.format,
        "adapter": (directory / "head" / adapter.CONFIG).is_file(),
    }
    head_directory = directory / "head"
    (head_directory / "README.md").write_text(model_card(metrics, facts, dict(data_card.lines(data.card))))
    # Beside the weights too, where `scripts/push.py` makes the Hub's card of it.
    (head_directory / "metrics.json").write_text(
        json.dumps(metrics | {"about": facts, "data": data.card}, indent=2) + "\n"
    )
    title = f"{head.kind} for {metrics['target']}"
    write_report(directory / "report.html", RunRecord(title, metrics, history, [shown], config))
    write_whole(directory / METRICS, json.dumps(metrics, indent=2) + "\n")
    print(table(metrics), flush=True)
    print(f"head: {directory / 'head'}   report: {directory / 'report.html'}", flush=True)
