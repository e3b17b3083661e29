"""The parity gate as a command:  python scripts/parity.py head=outputs/eagle3/head [exported=exports/eagle3]

Training forward, drafter and files must give the same draft logits, and trained head and export the same acceptance
length. Exit code 2 where they do not.
"""

from omegaconf import DictConfig

from foredraft.heads import hub
from foredraft.train import publish
from foredraft.train.cli import CONF, entry


@entry("parity", CONF / "publish")
def main(cfg: DictConfig) -> None:
    target = publish.open_target(cfg.target, cfg.head)
    trained = hub.find(cfg.head)
    print(publish.gate(trained, target, hub.find(cfg.exported) if cfg.exported else trained))


if __name__ == "__main__":
    main()
