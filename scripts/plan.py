"""Estimate memory and time of a training run before it starts:  python scripts/plan.py target=ORG/NAME head=eagle3 gpus=8

Nothing is loaded but the target's config. train/runtime/memory_plan.py computes what a step takes; this program prints next
to each line where the number comes from.
"""

from pathlib import Path
from typing import Any, cast

import torch
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf

from foredraft.cli import check_at_least, entry
from foredraft.heads.target_model import loading
from foredraft.heads.target_model.loading import resolve_dtype
from foredraft.heads.target_model.resolve_path import resolve_path
from foredraft.heads.target_model.sharding import COLLECTIVE
from foredraft.train.checks import check_context_parallel, check_head_settings, check_loss
from foredraft.train.runtime.memory_plan import memory_per_gpu, stored_quantization, strategy_of, study


def read_config(target: str, gguf_file: str | None = None, revision: str | None = None) -> Any:
    """Read the target's config: a file config.json, or what the run would load. A GGUF file is converted first, as there."""
    if not target.endswith(".json"):
        target = resolve_path(target, gguf_file=gguf_file, revision=revision)
    elif not Path(target).is_file():
        raise ValueError(f"target={target} does not exist: give a config.json, a directory that holds one, or a Hub id")
    return loading.read_config(target, revision)


def plan(cfg: DictConfig) -> dict[str, Any]:
    """Return gib: {line: (GiB per GPU, how)}; total; tokens_per_second and hours; disk (bytes of aux hidden states)."""
    if "head" not in cfg:
        raise ValueError("head=auto is a search, which only train/run.py does: name a head")
    if cfg.target.quantization not in (None, "4bit", "8bit"):
        raise ValueError(f"target.quantization={cfg.target.quantization} is not one of 4bit, 8bit")
    if cfg.target.sharding not in (None, *COLLECTIVE):
        raise ValueError(f"target.sharding={cfg.target.sharding}: a plan knows {', '.join(COLLECTIVE)}, or null")
    if cfg.head._target_.startswith("foredraft.heads.draft_model."):
        raise ValueError("head=draft_model is a separate model, and a plan counts heads: plan one of those")
    config = read_config(cfg.target.path, cfg.target.get("gguf_file"), cfg.target.revision)
    quantization, stored = cfg.target.quantization, getattr(config, "quantization_config", None)
    if quantization and stored:
        raise ValueError(f"target.quantization={quantization}: {cfg.target.path} is quantized already: leave it out")
    quantization = quantization or stored_quantization(config)
    cfg = cast(DictConfig, OmegaConf.merge(cfg, {"target": {"quantization": quantization}}))
    dtype = torch.bfloat16 if cfg.target.dtype == "auto" else resolve_dtype(cfg.target.dtype)
    head, body, target = study(cfg, config, dtype)
    found = memory_per_gpu(cfg, head, body, target)
    if not cfg.hidden_states.get("load_full_target", True):
        body = body._replace(flops=0.0)
    tokens = cfg.trainer.per_device_train_batch_size * cfg.max_length
    flops = (body.flops + head.flops * cfg.supervised_fraction) / tokens
    rate = cfg.gpus * cfg.gpu_tflops * 1e12 * cfg.efficiency / flops
    return {
        "gib": found,
        "total": sum(size for size, _ in found.values()),
        "flops_per_token": (body.flops / tokens, head.flops / tokens),
        "tokens_per_second": rate,
        "hours": cfg.tokens / rate / 3600,
        "disk": cfg.tokens * (head.layers + 1) * target.hidden_size * 2,
        "head_parameters": head.gradients // 4,
    }


def fitting(cfg: DictConfig) -> tuple[str, float] | None:
    """Return the first change with which the run fits, the cheapest first, and the GiB that it then needs."""
    rows = cfg.trainer.per_device_train_batch_size * cfg.trainer.gradient_accumulation_steps
    changes = [f"trainer.per_device_train_batch_size=1 trainer.gradient_accumulation_steps={rows}", "strategy=fsdp"]
    changes += ["head.draft_vocab_size=32000"] if cfg.head.get("draft_vocab_size", 0) is None else []
    changes += ["target.sharding=fsdp"]
    config = read_config(cfg.target.path, cfg.target.get("gguf_file"), cfg.target.revision)
    if getattr(config, "quantization_config", None) is None:
        changes += ["target.quantization=8bit", "target.quantization=4bit"]
    shares = strategy_of(cfg) in ("ddp", "fsdp") and cfg.target.sharding != "tensor"
    changes += [f"context_parallel={count}" for count in (2, 4, 8) if shares and cfg.gpus % count == 0]
    changes += [f"max_length={cfg.max_length // part}" for part in (2, 4) if cfg.max_length >= part]
    changes += ["hidden_states=server"]
    for change in changes:
        changed = cast(DictConfig, OmegaConf.merge(cfg, {}))
        OmegaConf.set_struct(changed, False)  # a change may bring a key of another choice
        changed.merge_with_dotlist(change.replace("_states=server", "_states.load_full_target=false").split())
        total = plan(changed)["total"]
        if total <= cfg.gpu_gib:
            return change, total
    return None


def check_run(cfg: DictConfig) -> None:
    """Raise ValueError for settings that the planned run would refuse."""
    strategy, sharding = strategy_of(cfg), cfg.target.sharding
    check_context_parallel(cfg, cfg.gpus, strategy)
    check_head_settings(cfg)
    check_loss(cfg)
    if strategy == "single" and cfg.gpus > 1:
        raise ValueError(f"strategy=single trains on one GPU, and gpus={cfg.gpus}: set gpus=1, or another strategy")
    if strategy.startswith("zero") and cfg.trainer.optim == "muon":
        raise ValueError(f"strategy={strategy} trains with AdamW: set trainer.optim=adamw, or strategy=fsdp")
    if is_offline(cfg) and sharding in COLLECTIVE:
        raise ValueError(
            f"hidden_states=offline writes with a whole target in every process, and target.sharding={sharding} splits it: "
            "set hidden_states=server, or target.sharding=null"
        )


def is_offline(cfg: DictConfig) -> bool:
    return cfg.hidden_states._target_.endswith(".offline")


@entry("plan")
def main(cfg: DictConfig) -> None:
    rows = "trainer.per_device_train_batch_size", "trainer.gradient_accumulation_steps"
    check_at_least(cfg, 1, "gpus", "tokens", "max_length", *rows)
    for name in ("gpu_gib", "gpu_tflops", "efficiency"):
        if cfg[name] <= 0:
            raise ValueError(f"{name}={cfg[name]} must be above 0")
    check_run(cfg)
    found = plan(cfg)
    kind = get_object(cfg.head._target_).__self__.kind  # of foredraft.heads.eagle3.Eagle3Head.for_target, the class's
    print(f"{kind} ({found['head_parameters'] / 1e6:.0f}M trained parameters) for {cfg.target.path}")
    print(f"on {cfg.gpus} GPU{'s' * (cfg.gpus > 1)} of {cfg.gpu_gib} GiB, strategy={strategy_of(cfg)}; GiB on each:")
    for name, (size, how) in found["gib"].items():
        print(f"  {name:17}{size:8.2f}  {how}")
    print(f"  {'sum':17}{found['total']:8.2f}  of {cfg.gpu_gib}")
    body, head = found["flops_per_token"]
    print(
        f"{body / 1e9:.1f} GFLOP per token in the target's forward, {head / 1e9:.1f} in the head (forward, backward, both "
        f"vocabularies' logits)\n{found['tokens_per_second']:,.0f} tokens/s = {cfg.gpus} x {cfg.gpu_tflops:g} TFLOP/s x "
        f"{cfg.efficiency} / {(body + head * cfg.supervised_fraction) / 1e9:.1f} GFLOP: {found['hours']:.1f} hours for "
        f"{cfg.tokens:,} tokens\n{found['disk'] / 1e12:.2f} TB to store the hidden states in bfloat16 (hidden_states=offline)"
    )
    if is_offline(cfg) and not cfg.hidden_states.load_full_target:
        whole = plan(cast(DictConfig, OmegaConf.merge(cfg, {"hidden_states": {"load_full_target": True}})))
        weights, hours = whole["gib"]["target weights"][0], whole["hours"] - found["hours"]
        print(
            f"the first run writes them with the whole target: {weights:.2f} GiB of weights on every GPU, and {hours:.1f} "
            "hours more"
        )
    if found["total"] > cfg.gpu_gib:
        largest = max(found["gib"], key=lambda name: found["gib"][name][0])
        print(f"warning: this does not fit; most of it is {largest}")
        better = fitting(cfg)
        print(
            f"         {better[0]} needs {better[1]:.1f} GiB"
            if better
            else "         nothing tried here makes it fit: take more GPUs, or larger ones"
        )


if __name__ == "__main__":
    main()
