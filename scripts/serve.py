"""Serve a target by OpenAI's protocol, with a chat page at /:  python scripts/serve.py target=ORG/NAME drafter=DIRECTORY

If the variable FOREDRAFT_API_KEY is set, clients must send this key. The sampling defaults are OpenAI's (temperature 1).
engine=vllm starts vLLM with the exported head instead, and engine=llamacpp starts llama.cpp's server.
"""

import json
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from foredraft.cli import check_at_least, entry
from foredraft.inference.serve.address import check_address, check_exposed
from foredraft.train import learn
from foredraft.train.learned_heads import LearnedHeads
from foredraft.words import DRAFTERS, quoted

ENGINES = {"foredraft": "foredraft", "vllm": "vLLM", "llamacpp": "llama.cpp"}
MAX_LEARN_LOG = 2**26  # bytes of texts that wait for the next training
NEEDS_HEAD = "learn=true trains the head that drafts: set drafter=DIRECTORY and engine=foredraft"
log = logging.getLogger("foredraft.serve")


@entry("serve")
def main(cfg: DictConfig) -> None:
    if cfg.engine not in ENGINES:
        raise ValueError(f"engine={cfg.engine} is not one of {', '.join(ENGINES)}")
    if cfg.log_text and cfg.log_accepted is None:
        raise ValueError("log_text=true needs log_accepted=FILE, the log that gets the texts")
    check_at_least(cfg, 1, "max_num_seqs", "max_num_batched_tokens", "timeout")
    check_at_least(cfg, 0, "max_waiting")
    # Not a key of the config, which ps and --help would show. A secret from a file often ends with a newline.
    api_key = None if (key := os.environ.get("FOREDRAFT_API_KEY")) is None else key.strip()
    check_exposed(cfg.host, api_key, cfg.insecure)
    check_learning(cfg)
    if cfg.engine != "foredraft":
        return exec_engine(cfg, api_key)
    check_address(cfg.host, cfg.port)
    try:
        from foredraft.inference.drafters import tree_of
        from foredraft.inference.serve.accepted_log import AcceptedLog
        from foredraft.inference.serve.app import create_app, run
        from foredraft.inference.serve.followed_head import FollowedHead
        from foredraft.inference.serve.worker import Worker
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is not installed: pip install 'foredraft[serve]'") from None
    logs = [] if cfg.log_accepted is None else [AcceptedLog(cfg.log_accepted, cfg.log_text)]
    reserve_event_loop_core()
    target = instantiate(cfg.target)
    names = list(cfg.learn.tenants) or [model_name(cfg, target.name)]
    load = partial(instantiate, cfg.drafter, target=target)
    folders = learn.folders_of(cfg.learn.output_dir, cfg.learn.tenants) if cfg.learn.enabled else []
    learned = list(map(LearnedHeads, folders))
    first = [heads.first(cfg.drafter.path) for heads in learned]
    drafter, *others = [load(path=head) for head in first] or [load()]
    if learned and tree_of(drafter) is None:
        raise ValueError(NEEDS_HEAD)
    limits = cfg.max_num_seqs, cfg.max_waiting, cfg.timeout, cfg.cache_gib
    worker = Worker(target, drafter, *limits, cfg.max_num_batched_tokens, others)
    followed = []
    for number, (heads, head) in enumerate(zip(learned, first, strict=True)):
        heads.start(head)
        followed.append(FollowedHead(worker, number, heads.current_file, load, names[number] if others else ""))
    app = create_app(
        worker,
        names,
        max_tokens=cfg.max_tokens,
        max_body=cfg.max_body,
        api_key=api_key,
        logs=[[*logs, AcceptedLog(folder / "served.jsonl", True, MAX_LEARN_LOG)] for folder in folders] or [logs],
        local_only=api_key is None and not cfg.insecure,
        cors=list(cfg.cors),
        heads=followed,
    )
    with learning(cfg):
        run(app, cfg.host, cfg.port, cfg.drain)


def check_learning(cfg: DictConfig) -> None:
    learn.check_settings(cfg.learn, "learn.")
    if cfg.learn.enabled and (cfg.engine != "foredraft" or cfg.drafter.path in DRAFTERS):
        raise ValueError(NEEDS_HEAD)
    names = list(cfg.learn.tenants)
    if names and (not cfg.learn.enabled or cfg.served_model_name is not None or len(set(names)) < len(names)):
        raise ValueError(
            f"learn.tenants={names} must be different names, with learn=true and without served_model_name="
        )
    if unusable := [name for name in names if not re.fullmatch(r"\w[\w.-]*", name)]:
        raise ValueError(
            f"learn.tenants={unusable}: names are also folders and may contain letters, digits, '_', '.' and '-'"
        )


@contextmanager
def learning(cfg: DictConfig) -> Iterator[None]:
    """Run `foredraft learn` in the meantime, if learn=true."""
    if not cfg.learn.enabled:
        yield
        return
    keys = ("output_dir", "num_samples", "max_minutes", "device_share", "keep")
    words = [f"{key}={'null' if (value := cfg.learn[key]) is None else quoted(str(value))}" for key in keys]
    words += [f"{key}={json.dumps(OmegaConf.to_container(cfg.learn[key]))}" for key in ("tenants", "train")]
    words += [] if cfg.learn.device is None else [f"target.device={cfg.learn.device}"]
    output, is_over = Path(cfg.learn.output_dir, "learn.log"), threading.Event()
    process = learn.start_process(["-m", "foredraft", "learn", *learn.typed_target(), *words], output)
    log.warning(
        "learn=true: token ids of prompts and answers are stored in %s, and the head learns from them. A request with "
        '"store": false is excluded.',
        cfg.learn.output_dir,
    )

    def watch() -> None:
        if (code := process.wait()) is not None and not is_over.is_set():
            log.warning("learning ended with %s: see %s", code, output)

    threading.Thread(target=watch, daemon=True).start()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # uvicorn raises it again at its end
    try:
        yield
    finally:
        is_over.set()
        process.terminate()
        process.wait()


def reserve_event_loop_core() -> None:
    """Leave a core to the event loop and the operating system. If all cores decode, each product of a step waits for the
    interrupted thread: two cores have 1.05 to 1.75 times the throughput with one thread (docs/results/serving.md)."""
    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() - 1))


def model_name(cfg: DictConfig, target: str) -> str:
    return cfg.served_model_name or (Path(target).name if Path(target).exists() else target)


def exec_engine(cfg: DictConfig, api_key: str | None) -> None:
    """Replace this process by the server of another engine."""
    from foredraft.inference.serve import other_engines as engines

    if cfg.drafter.window is not None:
        raise ValueError(
            f"drafter.window={cfg.drafter.window}: {ENGINES[cfg.engine]} uses the window of a head's config.json, if it "
            "supports one. Set engine=foredraft, or leave it out."
        )
    program = engines.find_vllm() if cfg.engine == "vllm" else engines.find_llamacpp()
    if cfg.log_accepted is not None:
        raise ValueError(
            f"log_accepted={cfg.log_accepted}: {ENGINES[cfg.engine]} does not report rejected drafts. "
            "Set engine=foredraft."
        )
    target = instantiate(cfg.target)
    drafter, where = cfg.drafter.path, (model_name(cfg, target.name), cfg.host, cfg.port, cfg.max_num_seqs)
    if cfg.engine == "vllm":
        command = engines.vllm_command(target, drafter, *where)
    else:
        command = engines.llamacpp_command(target, cfg.target_gguf, drafter, *where)
    engines.exec_server(cfg.engine, [*program, *command], api_key)


if __name__ == "__main__":
    main()
