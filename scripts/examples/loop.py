"""Train a draft head with plain PyTorch and decode with it: the parts of the library without its trainer.

    python scripts/examples/loop.py                                       # the test model, on any CPU
    python scripts/examples/loop.py --target ORG/NAME --text FILE.txt --steps 2000 --save outputs/loop/head

Read it from the bottom: text -> batches -> the target's hidden states -> drafts per depth -> loss -> decoding.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from foredraft import Target, drafter_for, generate, save_head
from foredraft.heads.base import DraftHead, PackedBatch, draft_loss_mask
from foredraft.heads.eagle3 import Eagle3Head
from foredraft.train.data import stdlib
from foredraft.words import shipped

RATE = 5e-3  # the highest learning rate
DEPTH_DECAY = 0.8  # a deeper draft counts less: it is only used if all drafts before it were accepted


class Outcome(NamedTuple):
    accuracy: list[float]  # per depth: how often the head's best guess is the target's, in the last step
    acceptance_length: float  # tokens per target forward while decoding, the bonus token included
    speedup: float  # over autoregressive decoding
    identical: bool  # is the drafted text the text of the target alone?


def batches(ids: Tensor, rows: int, length: int, device: torch.device) -> Iterator[PackedBatch]:
    """Yield random windows of the text forever. Every window is one document, and every token counts in the loss."""
    while True:
        starts = torch.randint(len(ids) - length, (rows, 1))
        columns = torch.arange(length)
        tokens = ids[starts + columns].to(device)
        yield PackedBatch(
            tokens=tokens,
            loss_mask=torch.ones_like(tokens, dtype=torch.bool),
            documents=torch.zeros_like(tokens),
            positions=columns.expand_as(tokens).to(device),
        )


def learn(head: DraftHead, target: Target, text: PackedBatch) -> tuple[Tensor, list[float]]:
    """Return the loss of a batch, and per depth the share of drafts whose best guess is the target's."""
    layers = [*head.layers, target.num_layers]  # the hidden states that the head reads, and the last one
    with torch.no_grad():
        states = target.forward(text.tokens, text.positions, layers=layers, keep_logits=1).aux_hidden_states
        inputs, last = states[..., : -target.hidden_size], states[..., -target.hidden_size :]
        # The alignment rule (heads/base.py): label position p names token p + 2, which the target predicts at p + 1.
        teacher = target.logits(last.roll(-1, dims=1))
    loss, accuracy = torch.zeros((), device=target.device), []
    for depth, hidden in enumerate(head(inputs, target.embed(text.tokens), text), start=1):
        mask = draft_loss_mask(text, depth)  # drafts that were started inside the text and name a token of it
        draft, label = head.logits(hidden[mask], depth), teacher[mask]
        loss = loss + DEPTH_DECAY ** (depth - 1) * F.cross_entropy(draft.float(), label.float().softmax(-1))
        accuracy.append((draft.argmax(-1) == label.argmax(-1)).float().mean().item())
    return loss, accuracy


def train(head: DraftHead, target: Target, ids: Tensor, steps: int, rows: int, length: int) -> list[float]:
    """Train the head, whose target stays frozen, and return the accuracy of the last step."""
    optimizer = torch.optim.AdamW(head.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=RATE, total_steps=steps)
    head.train()
    for step, text in zip(range(1, steps + 1), batches(ids, rows, length, target.device)):
        loss, accuracy = learn(head, target, text)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == steps:
            print(f"step {step}: loss {loss.item():.3f}, accuracy {' '.join(f'{share:.2f}' for share in accuracy)}")
    return accuracy


def decode(head: DraftHead, target: Target, prompt: Tensor, tokens: int) -> tuple[float, float, bool]:
    """Return acceptance length, speed-up and whether the text is the target's own."""
    drafter = drafter_for(head.eval().requires_grad_(False), target)
    seconds, texts = [], []
    for proposes in (None, drafter):
        started = time.perf_counter()
        texts.append(generate(target, proposes, prompt, max_new_tokens=tokens, eos_token_id=-1))
        seconds.append(time.perf_counter() - started)
    return texts[1].acceptance_length, seconds[0] / seconds[1], torch.equal(texts[0].sequences, texts[1].sequences)


def main(arguments: Sequence[str] | None = None) -> Outcome:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=shipped("test_model"), help="directory or Hub id (default: the test model)")
    parser.add_argument("--text", help="file of training text (default: Python's standard library)")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps")
    parser.add_argument("--rows", type=int, default=8, help="sequences per step")
    parser.add_argument("--length", type=int, default=256, help="tokens per sequence")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens to decode")
    parser.add_argument("--save", help="folder for the head, which every engine of docs/heads/eagle3.md loads")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    target = Target.from_pretrained(options.target, dtype="float32")
    head = Eagle3Head.for_target(target, ttt_steps=3, draft_vocab_size=None)
    files = [Path(options.text).read_text()] if options.text else [text for _, text in stdlib.documents("train")]
    ids = torch.tensor(target.text_tokenizer("\n".join(files)[:2_000_000]).input_ids)
    text, prompt = ids[:-64], ids[-64:]  # the head does not learn the prompt that it is measured on
    accuracy = train(head, target, text, options.steps, options.rows, options.length)
    if options.save:
        save_head(head, options.save, target)
    outcome = Outcome(accuracy, *decode(head, target, prompt[None].to(target.device), options.tokens))
    print(f"acceptance length {outcome.acceptance_length:.2f}, {outcome.speedup:.2f} times the autoregressive speed")
    print(f"text identical to the target's own: {outcome.identical}")
    return outcome


if __name__ == "__main__":
    main()
