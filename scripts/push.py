"""Put a head on the Hugging Face Hub:  python scripts/push.py head=outputs/eagle3/head repo=org/name dry_run=true

Needs a login (`hf auth login`, or HF_TOKEN). What is sent has passed the parity gate; else nothing is.
"""

from pathlib import Path

from omegaconf import DictConfig

from foredraft.train import publish
from foredraft.train.cli import CONF, entry


@entry("push", CONF / "publish")
def main(cfg: DictConfig) -> None:
    target = publish.open_target(cfg.target, cfg.head)
    print(publish.push(Path(cfg.head), target, cfg.repo, cfg.private, cfg.replace, cfg.dry_run, cfg.license))


if __name__ == "__main__":
    main()
