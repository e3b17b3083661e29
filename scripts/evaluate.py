"""What a drafter gains on held-out prompts:  python scripts/evaluate.py target=hf target.path=... drafter=outputs/mine/head

Acceptance length, speed over plain decoding, the parts of a step, and identity with plain decoding in float32, as at the end
of a training.
"""

import json
from pathlib import Path

from hydra.utils import instantiate
from omegaconf import DictConfig

from heads import Target
from inference.evaluation.measure import evaluate, prove
from inference.evaluation.report import table
from train.cli import entry
from train.data.corpus import prompts
from train.runtime.environment import device_name


@entry("evaluate")
def main(cfg: DictConfig) -> None:
    for name in ("prompts", "timed_prompts", "prompt_tokens", "new_tokens"):
        if cfg[name] < 1:
            raise ValueError(f"{name}={cfg[name]} must be at least 1")
    target: Target = instantiate(cfg.target)
    held_out = instantiate(cfg.data, tokenizer=target.text_tokenizer).test
    rows = prompts(target.text_tokenizer, held_out, cfg.prompts, cfg.prompt_tokens)
    drafter = instantiate(cfg.drafter, target=target)
    metrics = evaluate(target, drafter, rows, cfg.new_tokens, cfg.timed_prompts)
    if cfg.proof:
        metrics |= prove(target, lambda exact: instantiate(cfg.drafter, target=exact), rows, cfg.new_tokens)
    dtype = str(target.dtype).removeprefix("torch.")
    metrics |= {"target": target.name, "drafter": cfg.drafter.spec, "device": device_name(target), "dtype": dtype}
    print(table(metrics))
    if cfg.output is not None:
        Path(cfg.output).write_text(json.dumps(metrics, indent=2) + "\n")


if __name__ == "__main__":
    main()
