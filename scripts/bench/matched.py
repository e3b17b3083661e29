"""Compare heads by acceptance length, which other programs on the machine cannot change:

    python scripts/bench/matched.py target=smollm2 prompts=FILE.jsonl 'drafter=[outputs/eagle3/head,outputs/dflash/head]'

Every head drafts for the same prompts with the same seeds. "likeliest" and "sampled" draft as serving engines do: a chain of
the head's most probable tokens, or of tokens that it samples, each accepted if the target samples the same token. "chain" and
"tree" share the target's noise. All give the same text. Brackets contain the standard error over the texts.
"""

from collections import defaultdict

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, ListConfig
from torch import Tensor

from foredraft import Engine, Request, SamplingParams, Target
from foredraft.cli import check_at_least, entry
from foredraft.inference.drafters import Drafter, Likeliest, chain_of, load_drafter, tree_of
from foredraft.inference.drafters.base import Accepted, NoDrafter, Wrapper
from foredraft.inference.evaluation.benchmark import Prompt
from foredraft.inference.evaluation.progress import report
from foredraft.inference.evaluation.results import ratio_error
from foredraft.inference.tree import TokenTree
from foredraft.train.data.prompt_sets import questions, tokenize

FIRST = 3  # steps whose time does not count
TokenCounts = list[tuple[int, int]]  # of each text: its forwards, and what they added


class Sampled(Wrapper):
    """Draft with separate noise."""

    def propose(self, accepted: Accepted, gumbel: Tensor | None) -> TokenTree:
        own = None if gumbel is None else -torch.empty_like(gumbel).exponential_().log()
        return self.inner.propose(accepted, own)


def decode(
    target: Target, drafter: Drafter, prompts: list[Prompt], new_tokens: int, temperature: float
) -> tuple[TokenCounts, list[list[int]]]:
    """Return forwards and accepted tokens of each text, and the texts. Prompt i has seed i."""
    torch.manual_seed(0)  # of the noise that `Sampled` draws
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
                gains[number] = steps + 1, added + len(output.tokens)
    engine.close()
    return [gains[number] for number in range(len(prompts))], [texts[number] for number in range(len(prompts))]


def figure(gains: TokenCounts, error: bool = False) -> str:
    """Format the acceptance length over all texts, with `error` including its standard error."""
    steps, added = (sum(column) for column in zip(*gains, strict=True))
    spread = ratio_error(gains) if error else None
    return f"{added / max(1, steps):.2f}" + ("" if spread is None else f" ({spread:.2f})")


def draft_cost(target: Target, drafter: Drafter, prompt: Prompt, new_tokens: int) -> float:
    """Return the time to draft a tree relative to a baseline step, on one greedy text without its first steps. The text is
    longer than `new_tokens` by what those may add."""
    seconds = {}
    for name, one in (("plain", NoDrafter()), ("drafted", drafter)):
        engine, steps, before = Engine(target, one, timings=True), 0, {}
        engine.add(Request(prompt.tokens, SamplingParams(), new_tokens + FIRST * (one.depth + 1)))
        while engine.has_work:
            steps += any(output.accepted is not None for output in engine.step())
            if steps == FIRST:
                before = dict(engine.clock.seconds)
        spent = {stage: total - before[stage] for stage, total in engine.clock.seconds.items()}
        seconds[name] = (spent["draft"] if name == "drafted" else sum(spent.values())) / (steps - FIRST)
        engine.close()
    return seconds["drafted"] / seconds["plain"]


def first_turns(target: Target, name: str, limit: int, new_tokens: int) -> list[Prompt]:
    """Return the first turns of `limit` questions of a set or a file. Raises ValueError if that is not at least 1."""
    if limit < 1:
        raise ValueError(f"limit={limit} must be at least 1")
    first = [one._replace(turns=one.turns[:1]) for one in questions(name, limit)]
    return list(tokenize(first, target.text_tokenizer, (target.context or 1 << 30) - new_tokens, lambda ids: []))


@entry("matched")
def main(cfg: DictConfig) -> None:
    check_at_least(cfg, 2, "max_new_tokens")
    check_at_least(cfg, 1, "chain")
    target: Target = instantiate(cfg.target)
    prompts = first_turns(target, cfg.prompts, cfg.limit, cfg.max_new_tokens)
    categories = list(dict.fromkeys(prompt.category for prompt in prompts))
    print(f"{len(prompts)} prompts, up to {cfg.max_new_tokens} tokens each, chains of {cfg.chain}, {target.dtype}\n")
    print(
        f"| head | drafting, baseline steps | T | likeliest | sampled | chain | tree | tree: {' | '.join(categories)} |"
    )
    print("|---" * (7 + len(categories)) + "|", flush=True)
    for head in cfg.drafter if isinstance(cfg.drafter, ListConfig) else [cfg.drafter]:
        fixed = load_drafter(head, target, tree="fixed")
        tree = tree_of(fixed)
        if tree is None:
            raise ValueError(f"drafter={head} is not a head")
        chain = chain_of(tree, target, cfg.chain)
        cost = draft_cost(target, fixed, prompts[0], cfg.max_new_tokens)
        for temperature in cfg.temperatures:
            ways: list[Drafter] = (
                [chain, fixed] if temperature == 0 else [Likeliest(chain), Sampled(chain), chain, fixed]
            )
            found = [decode(target, one, prompts, cfg.max_new_tokens, temperature) for one in ways]
            if target.dtype == torch.float32 and any(texts != found[0][1] for _, texts in found):
                report(
                    f"{head}, T={temperature:g}: texts differ; foredraft lossless says whether by more than a near-tie"
                )
            cells = [""] * (4 - len(found)) + [figure(gains, error=True) for gains, _ in found]
            for category in categories:
                cells.append(figure([g for g, p in zip(found[-1][0], prompts, strict=True) if p.category == category]))
            print("| " + " | ".join([head, f"{cost:.2f}", f"{temperature:g}", *cells]) + " |", flush=True)


if __name__ == "__main__":
    main()
