"""An OpenAI-compatible server for one machine, and a page at /:  python scripts/serve.py target=ORG/NAME drafter=DIRECTORY

With FOREDRAFT_API_KEY in the environment, clients must give it. Defaults of sampling are OpenAI's (temperature 1).
"""

import os
from pathlib import Path

from hydra.utils import instantiate
from omegaconf import DictConfig

from train.cli import entry


@entry("serve")
def main(cfg: DictConfig) -> None:
    try:
        from inference.serve.app import create_app, run
        from inference.serve.worker import Worker
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is not installed: pip install 'foredraft[serve]'") from None
    target = instantiate(cfg.target)
    drafter = instantiate(cfg.drafter, target=target)
    limits = cfg.max_rows, cfg.max_waiting, cfg.timeout, cfg.cache_gib
    worker = Worker(target, drafter, *limits, cfg.prefill_chunk, cfg.prefix_cache_gib)
    name = cfg.model or (Path(target.name).name if Path(target.name).exists() else target.name)
    api_key = os.environ.get("FOREDRAFT_API_KEY") or None  # not a setting: those show in ps, and in --help
    run(create_app(worker, name, cfg.max_tokens, cfg.max_body, api_key), cfg.host, cfg.port, cfg.drain)


if __name__ == "__main__":
    main()
