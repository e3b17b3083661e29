"""Put a head on the Hugging Face Hub:  python scripts/push.py checkpoint=outputs/eagle3/head repo=org/name dry_run=true

This needs a login (`hf auth login`, or HF_TOKEN). Nothing is sent unless the head passes the parity gate.
"""

from pathlib import Path

from omegaconf import DictConfig

from foredraft.cli import entry
from foredraft.train import publish


@entry("push")
def main(cfg: DictConfig) -> None:
    target = publish.open_target(cfg.target, cfg.checkpoint)
    print(publish.push(Path(cfg.checkpoint), target, cfg.repo, cfg.private, cfg.replace, cfg.dry_run, cfg.license))


if __name__ == "__main__":
    main()
