"""Compare windows and ropes of an EAGLE-3 head by acceptance at different lengths of the text:

    python scripts/bench/by_context.py target=smollm2 drafter=scripts/smollm2/eagle3 data=text data.path=FOLDER \
        'lengths=[512,2048,8000]' 'windows=[null,2048,512]'

The target continues the last tokens of held-out raw texts once. Acceptance of chains along that text is then read from the
head's training forward, whose drafts are those of decoding, so each variant costs seconds and needs no training. Brackets
contain standard errors over the texts, of the ratio, and of the difference to the first length on the same texts.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from foredraft.cli import check_at_least, entry
from foredraft.heads import Target, llama_config, load_head
from foredraft.heads.base import PackedBatch
from foredraft.heads.eagle3 import Eagle3Head, check_window
from foredraft.heads.layers import Rotary
from foredraft.inference import generate, load_drafter
from foredraft.inference.evaluation.results import ratio_error
from foredraft.train import held_out
from foredraft.train.data import long_prompts
from foredraft.train.data.loading import load_corpus
from foredraft.train.losses import kl_div
from foredraft.train.module import DistillationModel


class Continued(NamedTuple):
    """Hold a text that the target has continued, with its hidden states."""

    category: str  # its length, for the table
    text: PackedBatch
    aux_hidden_states: Tensor
    last: Tensor


def continue_texts(cfg: DictConfig, model: DistillationModel) -> Iterator[Continued]:
    suffix, tokenizer = load_drafter("suffix", model.target), model.target.text_tokenizer
    texts = long_prompts.texts_of(tokenizer, load_corpus(cfg.data, model.target), cfg.limit, cfg.lengths)
    for category, prompt, *_ in long_prompts.continued(tokenizer, texts, cfg.lengths):
        ids = torch.tensor([prompt], device=model.target.device)
        new = generate(model.target, suffix, ids, max_new_tokens=cfg.max_new_tokens, eos_token_id=-1).new_tokens[0]
        tokens = torch.tensor([[*prompt, *new]], device=model.target.device)
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        text = PackedBatch(tokens, positions >= len(prompt), torch.zeros_like(tokens), positions)
        yield Continued(category, text, *model.forward_target(text))
        print(f"{category}: continued", flush=True)


def accepted(model: DistillationModel, continued: Continued, chain: int) -> tuple[int, int]:
    """Return the steps in which chains of this length write the continuation, and the tokens that they add."""
    states = continued.aux_hidden_states, continued.last
    hits = torch.stack([guesses[:, 0] == best for _, guesses, best in model.guesses(continued.text, *states, ranks=1)])
    added = held_out.steps(hits[:chain, 1:], torch.ones_like(hits[:chain, 1:]))
    return len(added), sum(added)


def cell(gains: list[tuple[int, int]], first: list[tuple[int, int]]) -> str:
    """Format the ratio of a length, and its mean difference to the first length."""
    count, spread, (steps, added) = len(gains), ratio_error(gains), (sum(column) for column in zip(*gains, strict=True))
    changes = [new / taken / (b / a) - 1 for (taken, new), (a, b) in zip(gains, first, strict=True)]
    ratio, mean = added / steps, sum(changes) / count
    if spread is None:  # one text has no standard error
        return f"{ratio:.2f}, {mean:+.0%}"
    error = math.sqrt(sum((change - mean) ** 2 for change in changes) / (count - 1) / count)
    return f"{ratio:.2f} ({spread:.2f}), {mean:+.0%} ({error:.0%})"


def variants(cfg: DictConfig, head: Eagle3Head) -> Iterator[str]:
    """Give the head each window with its own rope, then each rope without a window, and yield their names."""
    own = head.config.rope_parameters
    ropes: Any = OmegaConf.to_container(cfg.ropes)
    for window, rope in [*((window, {}) for window in cfg.windows), *((None, rope) for rope in ropes)]:
        head.window = check_window(window, cfg.chain, "windows")
        head.config.rope_parameters = llama_config.checked_rope(rope, own) if rope else own
        head.rotary = Rotary(head.config)
        yield f"window={window}" if not rope else f"rope={rope}"


@torch.no_grad()
@entry("by_context")
def main(cfg: DictConfig) -> None:
    check_at_least(cfg, 2, "max_new_tokens")
    check_at_least(cfg, 1, "chain", "limit")
    if not cfg.lengths or min(cfg.lengths) < 1:
        raise ValueError(f"lengths={list(cfg.lengths)} must be at least 1 each, and one or more")
    target: Target = instantiate(cfg.target)
    head = load_head(cfg.drafter, target, torch.float32)
    if not isinstance(head, Eagle3Head):
        raise ValueError(f"drafter={cfg.drafter} is a {head.kind} head, and only eagle3 has a window")
    head.depth = cfg.chain
    model = DistillationModel(head, target, kl_div)
    texts = list(continue_texts(cfg, model))
    categories = list(dict.fromkeys(text.category for text in texts))
    print(f"\n| head | {' | '.join(categories)} |" + "\n|---" + "|---:" * len(categories) + "|")
    for name in variants(cfg, head):
        gains = {
            category: [accepted(model, text, cfg.chain) for text in texts if text.category == category]
            for category in categories
        }
        cells = [cell(of_length, gains[categories[0]]) for of_length in gains.values()]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
