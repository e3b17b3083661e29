"""What it costs to leave the loss mask unshifted:  python scripts/bench/ablate_mask.py [settings of train/run.py]

Trains the same head twice on the same rows: once supervised by the alignment rule (slot p counts if token p + 2, which
its draft names, is the target's to write), once by the common mistake (if token p is), which never trains the first
drafts after a prompt. Both heads then decode the same held-out prompts. Prints how many tokens the first step after the
prompt and all steps gain.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import Tensor

from foredraft.heads.base import PackedBatch, draft_loss_mask
from foredraft.inference.drafters import load_drafter
from foredraft.inference.evaluation.measure import acceptance, run
from foredraft.train import module, trainer
from foredraft.train import run as training
from foredraft.train.data.corpus import prompts

DIRECTORY = Path("outputs/ablate_mask")


def unshifted(text: PackedBatch, depth: int) -> Tensor:
    """`draft_loss_mask` with the loss mask of token p in place of that of token p + 2."""
    return draft_loss_mask(text._replace(loss_mask=text.loss_mask.roll(2, dims=1)), depth) & (text.documents >= 0)


def measure(directory: Path) -> dict[str, Any]:
    cfg: Any = OmegaConf.load(directory / "head" / "config.yaml")
    target = instantiate(cfg.target)
    data = instantiate(cfg.data, tokenizer=target.tokenizer)
    rows = prompts(target.tokenizer, data.test, cfg.evaluate.prompts, cfg.evaluate.prompt_tokens)
    drafter = load_drafter(str(directory / "head"), target, tree="fixed")
    found: dict[str, Any] = {}
    for temperature in (0.0, 1.0):
        limits: dict[str, Any] = {
            "max_new_tokens": cfg.evaluate.new_tokens,
            "temperature": temperature,
            "eos_token_id": -1,
        }
        generations = run(target, drafter, rows, **limits)
        first = [count for generation in generations for count in generation.steps[0].accepted]
        found[f"first step, T={temperature:g}"] = round(1 + sum(first) / len(first), 4)
        found[f"all steps, T={temperature:g}"] = round(acceptance(generations), 4)
    return found


def main() -> None:
    settings, results = sys.argv[1:], {}
    for name, rule in {"shifted": draft_loss_mask, "unshifted": unshifted}.items():
        for user in (module, trainer):  # the loss, and how many drafts it is averaged over
            vars(user)["draft_loss_mask"] = rule
        sys.argv = ["train/run.py", *settings, f"output_dir={DIRECTORY / name}"]
        training.main()
        with torch.inference_mode():
            results[name] = measure(DIRECTORY / name)
    (DIRECTORY / "results.json").write_text(json.dumps({"settings": settings, **results}, indent=2) + "\n")
    for name, found in results.items():
        print(f"{name:10}", "  ".join(f"{what}: {value:.2f}" for what, value in found.items()))


if __name__ == "__main__":
    main()
