"""What noise that draft and target share gains at a temperature, over drafts that do not know the target's:

    python scripts/bench/coupled.py TARGET PROMPTS.jsonl HEAD [HEAD ...] [limit=16] [new_tokens=64] [chain=4]

Tokens per forward on the same prompts and seeds at T = 0.3, 0.7 and 1. The first two columns are "sample and match", as
serving engines draft: a chain of the head's likeliest tokens, or of sampled ones, which the target's own samples may hit. All
columns write the same text.
"""

import sys

import torch
from torch import Tensor

from foredraft import Target
from foredraft.inference.drafters import Drafter, chain_of, load_drafter, tree_of
from foredraft.inference.drafters.base import Accepted, Wrapper
from foredraft.inference.evaluation.measure import acceptance, run, texts
from foredraft.inference.tree import TokenTree
from foredraft.train.data.prompt_sets import questions, tokenize

TEMPERATURES = (0.3, 0.7, 1.0)


class Likeliest(Wrapper):
    def propose(self, accepted: Accepted, gumbel: Tensor | None) -> TokenTree:
        return self.inner.propose(accepted, None)


class Sampled(Wrapper):
    """By noise of its own."""

    def propose(self, accepted: Accepted, gumbel: Tensor | None) -> TokenTree:
        own = None if gumbel is None else -torch.empty_like(gumbel).exponential_().log()
        return self.inner.propose(accepted, own)


def main() -> None:
    options = {"limit": 16, "new_tokens": 64, "chain": 4}
    given = [argument for argument in sys.argv[1:] if "=" not in argument]
    options |= {name: int(value) for name, value in (a.split("=") for a in sys.argv[1:] if "=" in a)}
    if len(given) < 3 or len(options) > 3:
        sys.exit(__doc__)
    name, prompts, *heads = given
    target = Target.from_pretrained(name)
    first = [one._replace(turns=one.turns[:1]) for one in questions(prompts, options["limit"])]
    most = (target.context or 1 << 30) - options["new_tokens"]
    rows = [prompt.tokens for prompt in tokenize(first, target.text_tokenizer, most, lambda ids: [])]
    print(f"{len(rows)} prompts of {prompts}, {options['new_tokens']} tokens each, chains of {options['chain']}\n")
    print(
        "| head | T | likeliest, chain | sampled, chain | coupled, chain | coupled, tree | tree over the best of both |"
    )
    print("|---|---|---|---|---|---|---|", flush=True)
    for head in heads:
        tree = load_drafter(head, target, tree="fixed")
        inner = tree_of(tree)
        assert inner is not None
        chain = chain_of(inner, target, options["chain"])
        columns: list[Drafter] = [Likeliest(chain), Sampled(chain), chain, tree]
        for temperature in TEMPERATURES:
            settings = {"temperature": temperature, "eos_token_id": -1}
            generations = [run(target, one, rows, options["new_tokens"], head, **settings) for one in columns]
            figures = [acceptance(one) for one in generations]
            same = sum(a == b for one in generations for a, b in zip(texts(one), texts(generations[0]), strict=True))
            assert same == len(rows) * len(columns) or target.dtype != torch.float32, "a drafter changed a text"
            ratio = figures[-1] / max(figures[:2])
            print(
                "| " + " | ".join([head, f"{temperature:g}", *(f"{one:.2f}" for one in figures), f"{ratio:.2f}"]) + " |"
            )
            sys.stdout.flush()


if __name__ == "__main__":
    main()
