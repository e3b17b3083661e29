"""Check on your own model that drafting does not change the text:

    python scripts/lossless.py target=ORG/NAME drafter=outputs/eagle3/head

inference/evaluation/lossless.py describes the levels L1 to L3. In half precision, the gap between the two best logits is
printed for each first token that differs.
"""

from hydra.utils import instantiate
from omegaconf import DictConfig

from foredraft.cli import entry
from foredraft.heads import Target
from foredraft.inference.drafters import NoDrafter
from foredraft.inference.evaluation.lossless import PaddedDrafter, divergences, identical_shares
from foredraft.train.data.corpus import prompts
from foredraft.train.data.loading import load_corpus


@entry("lossless")
def main(cfg: DictConfig) -> None:
    exact: Target = instantiate(cfg.target, dtype="float32")
    rows = prompts(exact.text_tokenizer, load_corpus(cfg.data, exact).test, cfg.num_prompts, cfg.prompt_tokens)
    print(
        f"{len(rows)} prompts of {cfg.prompt_tokens} tokens, {cfg.max_new_tokens} new tokens each, drafter {cfg.drafter.path}"
    )
    wrong = 0
    for name, share in identical_shares(
        exact, instantiate(cfg.drafter, target=exact), None, rows, cfg.max_new_tokens
    ).items():
        print(f"L1  float32, {name}: {share:.1%} identical")
        wrong += share < 1
    half: Target = instantiate(cfg.target, dtype=cfg.dtype)
    drafter, dtype = instantiate(cfg.drafter, target=half), str(half.dtype).removeprefix("torch.")
    padded = PaddedDrafter(drafter)
    nodes = padded.nodes
    if half.capabilities.prefers_chains and not drafter.branches:
        for name, share in identical_shares(half, drafter, None, rows, cfg.max_new_tokens).items():
            print(f"L2  {dtype}, {name}: {share:.1%} identical")
            wrong += share < 1
        return conclude(wrong)
    for name, share in identical_shares(
        half, padded, PaddedDrafter(NoDrafter(), nodes), rows, cfg.max_new_tokens
    ).items():
        print(f"L2  {dtype}, {name}: {share:.1%} identical to the baseline with {nodes} tokens per forward")
    for temperature in (0.0, 1.0):
        found = divergences(half, drafter, rows, cfg.max_new_tokens, temperature)
        print(f"L3  {dtype}, temperature {temperature}: {len(found)} of {len(rows)} texts differ")
        for place in found:
            kind = "arithmetic" if place.is_arithmetic else "NOT explained by rounding"
            print(
                f"      prompt {place.prompt}, token {place.token}: gap {place.gap:.4f}, "
                f"forwards differ by {place.difference:.4f}: {kind}"
            )
            wrong += not place.is_arithmetic
    conclude(wrong)


def conclude(wrong: int) -> None:
    """Print the verdict. Raises ValueError if a check failed."""
    if wrong:
        raise ValueError(f"{wrong} checks failed: with this target and drafter, drafting changes the text")
    print("lossless")


if __name__ == "__main__":
    main()
