"""Serve a target by OpenAI's protocol, with a chat page at /:  python scripts/serve.py target=ORG/NAME drafter=DIRECTORY

If the variable FOREDRAFT_API_KEY is set, clients must send this key. The sampling defaults are OpenAI's (temperature 1).
engine=vllm starts vLLM with the exported head instead, and engine=llamacpp starts llama.cpp's server.
"""

import os
import re
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from foredraft.cli import entry
from foredraft.inference.serve.address import check_address, check_exposed
from foredraft.train.runtime.locks import hold

if TYPE_CHECKING:
    from foredraft.inference.serve.background import Background

ENGINES = {"foredraft": "foredraft", "vllm": "vLLM", "llamacpp": "llama.cpp"}


@entry("serve")
def main(cfg: DictConfig) -> None:
    if cfg.engine not in ENGINES:
        raise ValueError(f"engine={cfg.engine} is not one of {', '.join(ENGINES)}")
    if cfg.log_text and cfg.log_accepted is None:
        raise ValueError("log_text=true needs log_accepted=FILE, the log that gets the texts")
    api_key = os.environ.get("FOREDRAFT_API_KEY")  # not a key of the config, which ps and --help would show
    check_exposed(cfg.host, api_key, cfg.insecure)
    if cfg.learn.enabled and (cfg.engine != "foredraft" or "path" not in cfg.drafter):
        raise ValueError("learn=true trains the head that drafts: set drafter=DIRECTORY and engine=foredraft")
    check_tenants(cfg)
    if cfg.engine != "foredraft":
        return exec_engine(cfg, api_key)
    check_address(cfg.host, cfg.port)
    try:
        from foredraft.inference.serve.accepted_log import AcceptedLog
        from foredraft.inference.serve.app import create_app, run
        from foredraft.inference.serve.learned import head_of, newest_head, train_overrides
        from foredraft.inference.serve.learning import Learning, ServingHead
        from foredraft.inference.serve.worker import Worker
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is not installed: pip install 'foredraft[serve]'") from None
    log = None if cfg.log_accepted is None else AcceptedLog(cfg.log_accepted, cfg.log_text)
    reserve_event_loop_core()
    target = instantiate(cfg.target)
    names = list(cfg.learn.tenants) or [model_name(cfg, target.name)]
    folders = [Path(cfg.learn.output_dir, tenant) for tenant in cfg.learn.tenants or [""]]
    locks = [lock_folder(folder) for folder in folders] if cfg.learn.enabled else []
    heads = [newest_head(folder, cfg.drafter.path) for folder in folders] if cfg.learn.enabled else [None]
    load = partial(instantiate, cfg.drafter, target=target)
    drafter, *others = [load() if head is None else load(path=head) for head in heads]
    limits = cfg.max_num_seqs, cfg.max_waiting, cfg.timeout, cfg.cache_gib
    worker = Worker(target, drafter, *limits, cfg.max_num_batched_tokens, cfg.prefix_cache_gib, others)
    learning = list[Learning]()
    if cfg.learn.enabled:
        background = background_for(cfg, worker, str(target.device))
        train = trainer(cfg, train_overrides(head_of(drafter)))
        for number, (folder, head) in enumerate(zip(folders, heads, strict=True)):
            serving = ServingHead(worker, number, names[number] if others else "", load)
            learning.append(Learning(serving, background, str(head), *train, folder, **learning_limits(cfg)))
        worker.on_reserve = background.on_request
    local_only = api_key is None and not cfg.insecure
    served = worker, names, cfg.max_tokens, cfg.max_body, api_key, log, local_only
    app = create_app(*served, list(cfg.cors), learning)
    run(app, cfg.host, cfg.port, cfg.drain)
    for lock in locks:
        lock.close()


def lock_folder(folder: Path) -> IO[bytes]:
    """Create and lock the folder of learned heads. Raises ValueError if another server uses it."""
    folder.mkdir(0o700, parents=True, exist_ok=True)  # texts are private
    return hold(folder, "learn.output_dir")


def reserve_event_loop_core() -> None:
    """Leave a core to the event loop and the operating system. If all cores decode, each product of a step waits for the
    interrupted thread: two cores have 1.05 to 1.75 times the throughput with one thread (docs/results/serving.md)."""
    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() - 1))


def background_for(cfg: DictConfig, serving: Any, device: str) -> "Background":
    """Return the limits of background training. serving.open: number of unfinished requests. device: the default device."""
    from foredraft.inference.serve.background import Background

    on_gpu = (cfg.learn.device or device).startswith("cuda")
    return Background(lambda: serving.open > 0, on_gpu, cfg.learn.max_minutes, cfg.learn.device_share)


def learning_limits(cfg: DictConfig) -> dict[str, Any]:
    return {"rows": cfg.learn.num_samples, "keep": cfg.learn.keep, "limit_mib": cfg.learn.limit_mib}


def trainer(cfg: DictConfig, head: list[str]) -> tuple[list[str], dict[str, Any]]:
    """Return the command line that trains a head for this target, and the config of the target for another process."""
    target = cast(dict[str, Any], OmegaConf.to_container(cfg.target, resolve=True))
    overrides = HydraConfig.get().overrides.task
    typed = [word for word in overrides if word.lstrip("+").partition("=")[0].partition(".")[0] == "target"]
    if cfg.learn.device is not None:
        typed, target["device"] = [*typed, f"target.device={cfg.learn.device}"], cfg.learn.device
    return ["-m", "foredraft", "train", *typed, "data=accepted", "data.num_proc=1", *head, *cfg.learn.train], target


def check_tenants(cfg: DictConfig) -> None:
    names = list(cfg.learn.tenants)
    if names and (not cfg.learn.enabled or cfg.served_model_name is not None or len(set(names)) < len(names)):
        raise ValueError(
            f"learn.tenants={names} must be different names, with learn=true and without served_model_name="
        )
    if unusable := [name for name in names if not re.fullmatch(r"\w[\w.-]*", name)]:
        raise ValueError(
            f"learn.tenants={unusable}: names are also folders and may contain letters, digits, '_', '.' and '-'"
        )


def model_name(cfg: DictConfig, target: str) -> str:
    return cfg.served_model_name or (Path(target).name if Path(target).exists() else target)


def exec_engine(cfg: DictConfig, api_key: str | None) -> None:
    """Replace this process by the server of another engine."""
    from foredraft.inference.serve import llamacpp, vllm

    program = [vllm.find_vllm()] if cfg.engine == "vllm" else llamacpp.find_llamacpp()
    if cfg.log_accepted is not None:
        raise ValueError(
            f"log_accepted={cfg.log_accepted}: {ENGINES[cfg.engine]} does not report rejected drafts. "
            "Set engine=foredraft."
        )
    target = instantiate(cfg.target)
    drafter, where = cfg.drafter.path, (model_name(cfg, target.name), cfg.host, cfg.port, cfg.max_num_seqs)
    if cfg.engine == "vllm":
        vllm.exec_server(program[0], vllm.serve_command(target, drafter, *where), api_key)
    llamacpp.exec_server(program, llamacpp.serve_command(target, cfg.target_gguf, drafter, *where), api_key)


if __name__ == "__main__":
    main()
