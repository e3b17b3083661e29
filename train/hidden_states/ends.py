"""The target of a run: all of it, or its ends alone where its hidden states come from elsewhere."""

from pathlib import Path

from hydra.utils import instantiate
from omegaconf import DictConfig

from foredraft.heads.target_model import Target
from foredraft.train.hidden_states import offline, server
from foredraft.train.hidden_states.engine import Client


def load_target(cfg: DictConfig) -> Target:
    """Return all of the target, or only its embedding and lm_head: with hidden_states=server, and with hidden_states=offline
    once all is stored, unless `hidden_states.load_full_target` is true."""
    settings, stored = cfg.hidden_states, "path" in cfg.hidden_states
    made = str(cfg.target.path).endswith(".json")  # random weights, which lie nowhere
    all_of_it = settings.get("load_full_target", True) or made
    if all_of_it or (stored and not (Path(settings.path) / offline.MANIFEST).exists()):
        return instantiate(cfg.target)
    if cfg.target.get("sharding") is not None:
        raise ValueError(
            f"target.sharding={cfg.target.sharding} is for a target's layers, and hidden_states.load_full_target=false loads "
            "none: set target.sharding=null"
        )
    target = instantiate(cfg.target, embeddings_only=True)
    if stored:
        target.remote_hidden_states = offline.stored_probe(target, Path(settings.path))
    else:
        client = Client(settings.url, settings.run, settings.timeout, settings.patience)
        target.remote_hidden_states = server.engine_states(target, client)
    return target
