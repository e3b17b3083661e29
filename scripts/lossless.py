"""Check on your own model that drafting does not change the text:

    python scripts/lossless.py target=ORG/NAME drafter=outputs/eagle3/head

inference/evaluation/lossless.py describes the levels L1 to L3. For each text that differs, the gap between the scores of the
first two tokens that differ is printed.
"""

from hydra.utils import instantiate
from omegaconf import DictConfig

from foredraft.cli import check_at_least, entry
from foredraft.heads import Target
from foredraft.inference.drafters import AutoTree, Chain, Drafter, NoDrafter, Union
from foredraft.inference.evaluation.lossless import SETTINGS, PaddedDrafter, compare_bits, divergences
from foredraft.train.data.corpus import prompts
from foredraft.train.data.loading import load_corpus


@entry("lossless")
def main(cfg: DictConfig) -> None:
    check_at_least(cfg, 1, "num_prompts", "prompt_tokens", "max_new_tokens", "batch")
    exact: Target = instantiate(cfg.target, dtype="float32")
    rows = prompts(exact.text_tokenizer, load_corpus(cfg.data, exact).test, cfg.num_prompts, cfg.prompt_tokens)
    longest = max(map(len, rows)) + cfg.max_new_tokens
    if longest > (exact.context or longest):
        raise ValueError(
            f"prompt_tokens={cfg.prompt_tokens} and max_new_tokens={cfg.max_new_tokens} make texts of {longest} tokens, more "
            f"than the context of {exact.context}: lower one of them"
        )
    print(
        f"{len(rows)} prompts of {cfg.prompt_tokens} tokens, {cfg.max_new_tokens} new tokens each, drafter {cfg.drafter.path}"
    )
    drafter = in_every_step(instantiate(cfg.drafter, target=exact), exact)
    wrong = compare_texts("L1  float32", exact, drafter, rows, cfg)
    if keeps_bits(exact, drafter):
        wrong += check_bits("L2  float32", exact, drafter, rows, cfg)
    half: Target = instantiate(cfg.target, dtype=cfg.dtype)
    if half.dtype == exact.dtype:
        return conclude(wrong)
    drafter, dtype = in_every_step(instantiate(cfg.drafter, target=half), half), str(half.dtype).removeprefix("torch.")
    if keeps_bits(half, drafter):
        wrong += compare_texts(f"L2  {dtype}", half, drafter, rows, cfg, audit=False)
        return conclude(wrong + check_bits(f"L2  {dtype}", half, drafter, rows, cfg))
    padded = PaddedDrafter(drafter)
    compare_texts(f"L2  {dtype}", half, padded, rows, cfg, False, PaddedDrafter(NoDrafter(), padded.nodes))
    conclude(wrong + compare_texts(f"L3  {dtype}", half, drafter, rows, cfg))


def keeps_bits(target: Target, drafter: Drafter) -> bool:
    """Return whether the target's logits should not change in any bit with these drafts."""
    return target.capabilities.keeps_bits or (target.capabilities.prefers_chains and not drafter.branches)


def in_every_step(drafter: Drafter, target: Target) -> Drafter:
    """Return what drafts in every step, not only when it pays: steps without drafts would prove nothing. Raises ValueError
    for a drafter that never drafts."""
    if isinstance(drafter, NoDrafter):
        raise ValueError("drafter=none drafts nothing, so there is nothing to check: give the drafter that you serve")
    if not isinstance(drafter, AutoTree):
        return drafter
    parts = [part for part in drafter.parts if not isinstance(part, NoDrafter)]
    if len(parts) == 1:
        return parts[0]
    return Chain(Union(parts)) if target.capabilities.prefers_chains else Union(parts)


def compare_texts(
    label: str,
    target: Target,
    drafter: Drafter,
    rows: list[list[int]],
    cfg: DictConfig,
    audit: bool = True,
    baseline: Drafter | None = None,
) -> int:
    """Print the share of texts of each setting that equal the baseline's; return the number of those that do not. audit:
    print the first difference of each of these, and count only those that rounding does not explain."""
    note, wrong = "" if baseline is None else f" to the baseline with {baseline.nodes} tokens per forward", 0
    for name, settings in SETTINGS.items():
        found = divergences(target, drafter, rows, cfg.max_new_tokens, baseline, **settings)
        print(f"{label}, {name}: {1 - len(found) / len(rows):.1%} identical{note}")
        wrong += 0 if audit else len(found)
        for place in found if audit else ():
            kind = "rounding" if place.is_arithmetic else "NOT explained by rounding"
            print(
                f"      prompt {place.prompt}, token {place.token}: gap {place.gap:.2g}, forwards differ by "
                f"{place.difference:.2g}: {kind}"
            )
            wrong += not place.is_arithmetic
    return wrong


def check_bits(label: str, target: Target, drafter: Drafter, rows: list[list[int]], cfg: DictConfig) -> int:
    """Print how many texts and rows of logits keep their bits, greedy and at temperature 1; return how many counts say that
    some do not."""
    wrong = 0
    for temperature in (0.0, 1.0):
        for how, bits in compare_bits(target, drafter, rows, cfg.max_new_tokens, temperature, cfg.batch):
            print(f"{label}, temperature {temperature:g}, {how}: {bits}", flush=True)
            wrong += not bits.is_equal
    return wrong


def conclude(wrong: int) -> None:
    """Print the verdict. Raises ValueError if a check failed."""
    if wrong:
        raise ValueError(f"{wrong} checks failed: with this target and drafter, drafting changes the text")
    print("lossless")


if __name__ == "__main__":
    main()
