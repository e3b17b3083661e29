"""Heads that were trained alike, side by side, by what each forward gains, which no other program on the machine can change:

    python scripts/bench/matched.py TARGET PROMPTS.jsonl HEAD [HEAD ...] [limit=12] [new_tokens=64] [chain=4]
        [temperatures=0,1]

Every head drafts for the same prompts with the same seeds. "likeliest" and "sampled" are sample and match, as serving engines
draft: a chain of the head's likeliest tokens, or of tokens that it samples, which the target's own samples may hit. "chain"
and "tree" share the target's noise. All write the same text. Brackets hold the standard error over the texts.
"""

import math
import sys
from collections import defaultdict

import torch
from torch import Tensor

from foredraft import Engine, Request, SamplingParams, Target
from foredraft.inference.drafters import Drafter, chain_of, load_drafter, tree_of
from foredraft.inference.drafters.base import Accepted, Wrapper
from foredraft.inference.tree import TokenTree
from foredraft.train.data.prompt_sets import Prompt, questions, tokenize

Gains = list[tuple[int, int]]  # of each text: its forwards, and what they added


class Likeliest(Wrapper):
    def propose(self, accepted: Accepted, gumbel: Tensor | None) -> TokenTree:
        return self.inner.propose(accepted, None)


class Sampled(Wrapper):
    """By noise of its own."""

    def propose(self, accepted: Accepted, gumbel: Tensor | None) -> TokenTree:
        own = None if gumbel is None else -torch.empty_like(gumbel).exponential_().log()
        return self.inner.propose(accepted, own)


def decode(
    target: Target, drafter: Drafter, prompts: list[Prompt], new_tokens: int, temperature: float
) -> tuple[Gains, list[list[int]]]:
    """What each text gained, and the texts. Prompt i has seed i."""
    engine = Engine(target, drafter, max_num_seqs=16)
    gains: dict[int, tuple[int, int]] = defaultdict(lambda: (0, 0))
    texts: dict[int, list[int]] = defaultdict(list)
    for number, prompt in enumerate(prompts):
        ends = frozenset(target.eos_token_ids if prompt.ends else ())
        engine.add(Request(prompt.tokens, SamplingParams(temperature), new_tokens, number, ends))
    while engine.has_work:
        for output in engine.step():
            number = output.request.seed
            texts[number] += output.tokens
            if output.accepted is not None:
                steps, added = gains[number]
                gains[number] = steps + output.forwards, added + len(output.tokens)
    engine.close()
    return [gains[number] for number in range(len(prompts))], [texts[number] for number in range(len(prompts))]


def figure(gains: Gains, error: bool = False) -> str:
    """Tokens per forward over all texts, and by `error` its standard error, that of a ratio."""
    steps, added = (sum(column) for column in zip(*gains, strict=True))
    ratio = added / max(1, steps)
    if not error:
        return f"{ratio:.2f}"
    spread = sum((gained - ratio * taken) ** 2 for taken, gained in gains)
    return f"{ratio:.2f} ({math.sqrt(spread * len(gains) / max(1, len(gains) - 1)) / max(1, steps):.2f})"


def main() -> None:
    options = {"limit": "12", "new_tokens": "64", "chain": "4", "temperatures": "0,1"}
    given = [argument for argument in sys.argv[1:] if argument.split("=")[0] not in options]
    options |= dict(argument.split("=", 1) for argument in sys.argv[1:] if argument not in given)
    if len(given) < 3:
        sys.exit(__doc__)
    new_tokens, length = int(options["new_tokens"]), int(options["chain"])
    target = Target.from_pretrained(given[0])
    first = [one._replace(turns=one.turns[:1]) for one in questions(given[1], int(options["limit"]))]
    most = (target.context or 1 << 30) - new_tokens
    prompts = list(tokenize(first, target.text_tokenizer, most, lambda ids: []))
    categories = list(dict.fromkeys(prompt.category for prompt in prompts))
    print(f"{len(prompts)} prompts of {given[1]}, up to {new_tokens} tokens each, chains of {length}, {target.dtype}\n")
    print(f"| head | T | likeliest | sampled | chain | tree | tree: {' | '.join(categories)} |")
    print("|---" * (6 + len(categories)) + "|", flush=True)
    for head in given[2:]:
        fixed = load_drafter(head, target, tree="fixed")
        tree = tree_of(fixed)
        assert tree is not None, f"{head} drafts no tree"
        chain = chain_of(tree, target, length)
        for temperature in map(float, options["temperatures"].split(",")):
            ways: list[Drafter] = (
                [chain, fixed] if temperature == 0 else [Likeliest(chain), Sampled(chain), chain, fixed]
            )
            found = [decode(target, one, prompts, new_tokens, temperature) for one in ways]
            same = all(texts == found[0][1] for _, texts in found)
            assert same or target.dtype != torch.float32, f"{head} changed a text"
            cells = [""] * (4 - len(found)) + [figure(gains, error=True) for gains, _ in found]
            for category in categories:
                cells.append(figure([g for g, p in zip(found[-1][0], prompts, strict=True) if p.category == category]))
            print("| " + " | ".join([head, f"{temperature:g}", *cells]) + " |", flush=True)


if __name__ == "__main__":
    main()
