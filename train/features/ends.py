"""The target of a run: all of it, or its ends alone where its hidden states come from elsewhere."""

from pathlib import Path

from hydra.utils import get_method, instantiate
from omegaconf import DictConfig

from foredraft.heads.target import Target
from foredraft.train.features import disk, server


def load_target(cfg: DictConfig) -> Target:
    """Its ends alone with features=server, and with features=disk once all is stored, unless `features.whole_target`."""
    settings = cfg.features
    if "whole_target" not in settings:
        return instantiate(cfg.target)
    stored = "path" in settings
    loads = get_method(cfg.target._target_) == Target.from_pretrained  # others are made here, and lie nowhere
    if settings.whole_target or not loads or (stored and not (Path(settings.path) / disk.MANIFEST).exists()):
        return instantiate(cfg.target)
    if cfg.target.get("sharding") is not None:
        raise ValueError(
            f"target.sharding={cfg.target.sharding} is for a target's layers, and with features.whole_target=false none are "
            "loaded: give target.sharding=null"
        )
    target = instantiate(cfg.target, ends_only=True)
    if stored:
        target.states_elsewhere = disk.StoredProbe(target, Path(settings.path))
    else:
        client, urls = server.connect(settings.url, settings.run, settings.timeout, settings.patience)
        target.states_elsewhere = server.EngineStates(target, client, urls)
    return target
