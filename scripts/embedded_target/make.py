"""Train the embedded target: a small Llama of Python code, on Python's own standard library, from scratch.

    python scripts/embedded_target/make.py --minutes 60

Two stages: plain language modelling, then a shorter one on its own text (`settle`). It writes the tokenizer,
the weights (bf16), log.jsonl and samples.md beside itself (or into --output). The target is
kept in the repository, so nobody has to run this; it is here so that anybody can, and can see what it was
trained on: the part `train` of train/data/stdlib.py, never a file of `validation` or `test`.

Small, deep and narrow on purpose: a draft head is one layer, so a shallow target would hide every gain. The matrices
are trained with Muon and the rest with AdamW, which at this size reaches a loss in about half of AdamW's steps.
"""

import argparse
import copy
import json
import math
import random
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from foredraft.heads import Target
from foredraft.heads.target.loading import has_bfloat16_products
from foredraft.inference import generate
from foredraft.inference.evaluation import measure
from foredraft.train.data import self_generated, stdlib
from foredraft.train.data.corpus import prompts, standard_library
from foredraft.train.data.pretraining import tokens_of, train_tokenizer

HERE = Path(__file__).parent
VOCAB, LENGTH, ROWS = 1024, 512, 16
OWN_TEXT = 1 << 20  # tokens that the target writes for heads to learn from
COOL = 0.5  # temperature of the continuations that the second stage learns from


def length_at(share: float) -> int:
    """Short rows first: on a CPU attention over 512 tokens takes over half of a step, and syntax is learnt from 128."""
    return LENGTH // 4 if share < 0.5 else LENGTH // 2 if share < 0.75 else LENGTH


def autocast() -> torch.autocast:
    """bfloat16 where this processor has it."""
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=has_bfloat16_products("cpu"))


def held_out_loss(model: PreTrainedModel, tokens: Tensor) -> float:
    """Mean negative log-likelihood, nats per token, over whole windows of `tokens`."""
    windows = tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)[::2]
    losses = []
    with torch.no_grad(), autocast():
        for rows in windows.split(ROWS):
            losses.append(model(input_ids=rows, labels=rows).loss.float() * len(rows))
    return (torch.stack(losses).sum() / len(windows)).item()


def new_model(layers: int) -> PreTrainedModel:
    """The embedded target, before it has learnt anything."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=layers,
        num_attention_heads=3,
        num_key_value_heads=1,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        initializer_range=0.02,
        use_cache=False,
        attn_implementation="eager",  # at these sizes faster than the fused kernel, whose backward is slow on a CPU
    )
    return LlamaForCausalLM(config)


class Texts(NamedTuple):
    """What it learns from and is measured on."""

    data: list[Tensor]  # ids of the library, and of its tests
    held_out: Tensor
    characters: float  # of a held-out token


def main() -> None:
    args = parse_arguments()
    random.seed(0)
    torch.manual_seed(0)
    args.output.mkdir(parents=True, exist_ok=True)
    tokenizer, texts = read_texts(args)
    model = new_model(args.layers)
    print(f"parameters: {sum(p.numel() for p in model.parameters()):,}", flush=True)
    log = (args.output / "log.jsonl").open("w")
    learn(model, texts, args, log)
    settle(model, tokenizer, texts.data[0], args.settle_minutes, log)
    note({"settled": True, "held_out_loss": round(held_out_loss(model, texts.held_out), 4)}, log)
    save(model, args.output)
    write_samples(args.output)
    self_generated_text(args.output)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--minutes", type=float, default=60, help="wall-clock budget of the training loop")
    parser.add_argument("--settle-minutes", type=float, default=15, help="budget of the second stage")
    parser.add_argument("--output", type=Path, default=HERE)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--compile", action="store_true", help="torch.compile the model: worth it from ten minutes on")
    return parser.parse_args()


def read_texts(args: argparse.Namespace) -> tuple[PreTrainedTokenizerFast, Texts]:
    library = [text for _, text in stdlib.documents("train", tests=False)]
    tests = [text for path, text in stdlib.documents("train") if stdlib.is_test(path)]
    validation = [text for _, text in stdlib.documents("validation", tests=False)]
    tokenizer = train_tokenizer(library + tests, VOCAB)
    tokenizer.save_pretrained(args.output)
    random.shuffle(library), random.shuffle(tests)
    data = [tokens_of(tokenizer, library), tokens_of(tokenizer, tests)]
    held_out = tokens_of(tokenizer, validation)
    print(f"tokens: library {len(data[0]):,}, its tests {len(data[1]):,}, held out {len(held_out):,}", flush=True)
    return tokenizer, Texts(data, held_out, sum(map(len, validation)) / len(held_out))


def optimizers_of(model: PreTrainedModel) -> list[torch.optim.Optimizer]:
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    # Muon multiplies in bfloat16, whatever the weights are in.
    return [
        torch.optim.Muon(matrices, lr=0.02, momentum=0.95, weight_decay=0.01)
        if has_bfloat16_products("cpu")
        else torch.optim.AdamW(matrices, lr=2e-3, betas=(0.9, 0.95), weight_decay=0.01),
        torch.optim.AdamW(others, lr=4e-3, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def learn(model: PreTrainedModel, texts: Texts, args: argparse.Namespace, log: TextIO) -> None:
    """The first stage: language modelling of rows of text."""

    def loss_of(rows: Tensor) -> Tensor:
        return model(input_ids=rows, labels=rows).loss

    optimizers, step_loss = optimizers_of(model), torch.compile(loss_of) if args.compile else loss_of
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    start, step, running = time.time(), 0, []

    def facts() -> dict[str, float]:
        return {"step": step, "tokens": step * ROWS * LENGTH, "seconds": round(time.time() - start, 1)}

    while (share := (time.time() - start) / (60 * args.minutes)) < 1:
        # Warm up over 100 steps, hold, and fall linearly to zero in the last 40 % of the time.
        scale = min(1.0, (step + 1) / 100, (1 - share) / 0.4)
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = scale * peak
        with autocast():
            loss = step_loss(draw_rows(texts.data, length_at(share)))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        running.append(loss.item())
        step += 1
        if step % 100 == 0 or (step == 10):
            entry = facts() | {"loss": round(sum(running) / len(running), 4)}
            if step % 500 == 0:
                entry["held_out_loss"] = round(held_out_loss(model, texts.held_out), 4)
                save(model, args.output)
            note(entry, log)
            running = []
    save(model, args.output)
    final = held_out_loss(model, texts.held_out)
    bits = final / math.log(2) / texts.characters
    note(facts() | {"held_out_loss": round(final, 4), "bits_per_character": round(bits, 4)}, log)


def draw_rows(data: list[Tensor], length: int) -> Tensor:
    """As many tokens as ROWS rows of LENGTH have, in rows of `length`."""
    # Two thirds of the text are tests; the library itself is closer to what users write, so it gets more.
    corpora = [data[0] if random.random() < 0.6 else data[1] for _ in range(ROWS * LENGTH // length)]
    starts = [random.randrange(len(corpus) - length) for corpus in corpora]
    return torch.stack([corpus[at : at + length] for corpus, at in zip(corpora, starts, strict=True)])


def note(entry: dict[str, Any], log: TextIO) -> None:
    print(json.dumps(entry), file=log, flush=True)
    print(entry, flush=True)


def repeats(rows: Tensor, n: int = 4) -> Tensor:
    """(batch, length) bool: is the n-gram that ends at this token in the row before?"""
    grams = rows.unfold(1, n, 1)
    equal = (grams[:, :, None] == grams[:, None, :]).all(-1)
    again = equal.tril(-1).any(-1)
    return torch.cat([torch.zeros_like(rows[:, : n - 1], dtype=torch.bool), again], dim=1)


def settle(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tokens: Tensor, minutes: float, log: TextIO
) -> None:
    """The second stage, on the model's own continuations of training text; half of each step stays plain text so
    that it forgets little.

    A model this small, trained on text alone, is unlike the targets that people decode with in two ways. Decoded greedily it
    falls into loops, which flatter every drafter: every token of a greedy continuation that completes a 4-gram written before
    is made less likely (sequence-level unlikelihood, Welleck et al., arXiv:1908.04319, section 5.2). And it is unsure of the
    next word, where targets that were tuned on chosen answers are not: of its continuations at temperature `COOL`, those
    that do not repeat themselves are learnt as if they were text (rejection sampling, as in arXiv:2307.09288, section 3.2.3).
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.0)
    start, step, begun, new, rows = time.time(), 0, 64, 128, 32
    while (share := (time.time() - start) / (60 * minutes)) < 1:
        optimizer.param_groups[0]["lr"] = 6e-4 * min(1.0, (step + 1) / 20, 2 * (1 - share))
        starts = [random.randrange(len(tokens) - LENGTH) for _ in range(2 * rows)]
        text = torch.stack([tokens[at : at + LENGTH] for at in starts[:8]])
        beginnings = torch.stack([tokens[at : at + begun] for at in starts])
        # A bf16 copy writes: autocast would cast every weight again for each of the many short forwards.
        writer = Target(copy.deepcopy(model).to(torch.bfloat16).eval(), tokenizer, "the embedded target")
        greedy, cool = (
            generate(
                writer, None, part, max_new_tokens=new, temperature=heat, seed=step * rows, eos_token_id=-1
            ).sequences
            for heat, part in zip((0.0, COOL), beginnings.split(rows), strict=True)
        )
        again = repeats(greedy[:, begun:])
        cool = cool.clone()
        chosen = repeats(cool[:, begun:]).float().mean(1) < 0.2
        with autocast():
            likely = model(input_ids=text, labels=text).loss
            written = torch.cat([greedy, cool[chosen]]).clone()
            logits = model(input_ids=written, use_cache=False).logits[:, begun - 1 : -1].float()
        chance = logits[:rows].softmax(-1).gather(-1, written[:rows, begun:, None])[..., 0]
        unlikely = -(torch.log1p(-chance.clamp(max=1 - 1e-5)) * again).sum() / again.sum().clamp(min=1)
        own = torch.nn.functional.cross_entropy(
            logits[rows:].flatten(0, 1), written[rows:, begun:].flatten(), reduction="sum"
        )
        (likely + unlikely + own / (rows * new)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % 10 == 0:
            entry = {"settling_step": step, "seconds": round(time.time() - start), "loss": round(likely.item(), 4)}
            entry |= {"loss_of_own": round(own.item() / (chosen.sum().item() * new), 4), "chosen": chosen.sum().item()}
            entry |= {"repeated_4grams": round(again.float().mean().item(), 4)}
            note(entry, log)


def write_samples(directory: Path) -> None:
    """samples.md: greedy continuations of held-out text, and how much all of them repeat themselves."""
    target = Target.from_pretrained(directory, dtype="float32", device="cpu")
    assert target.tokenizer is not None
    texts = [text for _, text in stdlib.documents("test", tests=False)]
    rows = prompts(target.tokenizer, texts, 64, 96)
    found = measure.texts(measure.run(target, None, rows, max_new_tokens=128, eos_token_id=-1))
    shares = [measure.distinct(row) for row in found]
    loops = sum(share < measure.REPETITIVE for share in shares)
    lines = [
        "# Greedy continuations of held-out files",
        "",
        f"Of {len(rows)} prompts of 96 tokens, continued by 128 tokens, {loops} run into a loop (fewer than half of their "
        f"4-grams distinct); the mean share of distinct 4-grams is {sum(shares) / len(shares):.2f}.",
    ]
    for number in (3, 17, 30, 41, 55):
        lines += ["", f"## Prompt {number} (distinct 4-grams {shares[number]:.2f})", "", "```python"]
        lines += [
            target.tokenizer.decode(rows[number][-48:]),
            "# ---- the target goes on:",
            target.tokenizer.decode(found[number]),
        ]
        lines += ["```"]
    (directory / "samples.md").write_text("\n".join(lines) + "\n")


def self_generated_text(directory: Path) -> None:
    """Text for heads to learn from, which the target writes (train/data/self_generated.py)."""
    target = Target.from_pretrained(str(directory))
    assert target.tokenizer is not None
    library = standard_library(target.tokenizer)
    with tempfile.TemporaryDirectory() as scratch:
        own = self_generated.self_generate(target, library, OWN_TEXT, 0, Path(scratch) / "self_generated.safetensors")
    self_generated.store(own.train, library.card["source"], target, directory)


def save(model: PreTrainedModel, output: Path) -> None:
    """A bf16 copy; training itself stays in float32."""
    copied = copy.deepcopy(model).to(torch.bfloat16)
    copied.config.use_cache = copied.generation_config.use_cache = True
    copied.save_pretrained(output)


if __name__ == "__main__":
    main()
