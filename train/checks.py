"""What would stop a run at its end is found before its first step: settings, data, and a head that cannot be saved."""

import copy
import inspect
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import NoneType
from typing import Any, cast, get_args, get_origin

import torch
from hydra.utils import get_method
from omegaconf import DictConfig, OmegaConf

from foredraft.cli import check_at_least
from foredraft.heads.base import BlockHead, DraftHead
from foredraft.heads.checkpoint import published_dtype, save_head
from foredraft.heads.dflash import DFlashHead
from foredraft.heads.eagle import HiddenStateHead
from foredraft.heads.formats.native import subclasses
from foredraft.heads.hub import client
from foredraft.heads.target_model import Target
from foredraft.heads.target_model.images import reads_images
from foredraft.train import losses, parity_gate
from foredraft.train.data import long_prompts, prompt_sets
from foredraft.train.data.corpus import Corpus, has_prompts, prompts
from foredraft.train.data.documents import Document
from foredraft.train.data.row_order import check_sockets
from foredraft.train.runtime import distributed

ONLINE = "foredraft.train.hidden_states.online.online"
# Smallest values of a head's whole numbers, if it is not 1; those without a largest one; and the largest of the others.
LEAST = {"blocks": 0, "mask_token_id": 0, "pure_draft_prefix_len": 0}
UNLIMITED = ("draft_vocab_size", "mask_token_id", "window")
MOST = 2**16
GATE_TOKENS = 48  # of the text that the parity gate drafts from


def check_config(cfg: DictConfig) -> None:
    """Raise ValueError for settings that cannot work, whatever the target and the data are."""
    if cfg.trainer.max_steps == 0:
        raise ValueError(
            "trainer.max_steps=0 trains nothing: give a number of steps, or -1 for trainer.num_train_epochs"
        )
    if cfg.trainer.max_steps < 0 and cfg.trainer.num_train_epochs <= 0:
        raise ValueError(f"trainer.num_train_epochs={cfg.trainer.num_train_epochs} must be above 0")
    batch = "trainer.per_device_train_batch_size", "trainer.gradient_accumulation_steps"
    measured = "final_num_prompts", "timed_prompts", "prompt_tokens", "max_new_tokens"
    check_at_least(cfg, 1, *batch, *(f"eval.{name}" for name in measured))
    if cfg.eval.steps:
        check_at_least(cfg, 1, "eval.num_prompts")
    check_at_least(cfg, 0, "seed", "data_seed", "self_generated_tokens", "eval.steps")
    check_at_least(cfg, 0, "trainer.learning_rate", "trainer.max_minutes")
    if cfg.lora_r is not None and cfg.init_from is None:
        raise ValueError(f"lora_r={cfg.lora_r} adapts a head that was trained before: give it as init_from")
    rank = cfg.lora_r or cfg.get("head", {}).get("lora_r")  # head=auto has no head of the run
    if rank is not None and cfg.strategy not in ("single", "ddp"):
        raise ValueError(f"lora_r={rank} works with strategy=single or ddp, and this is {cfg.strategy}")
    check_loss(cfg)
    check_head_settings(cfg)
    check_context_parallel(cfg, distributed.world_size(), cfg.strategy)
    if cfg.init_from is not None:
        client.find(cfg.init_from)  # before data and text take their time
    if workers := cfg.trainer.get("dataloader_num_workers"):
        check_sockets()
    if not cfg.fresh_text:
        return
    if not cfg.self_generated_tokens:
        raise ValueError("fresh_text=true writes text anew, and self_generated_tokens=0 lets the target write none")
    if cfg.hidden_states._target_ != ONLINE:
        raise ValueError("fresh_text=true trains on text that is not there at the start: set hidden_states=online")
    if workers:
        raise ValueError(
            f"trainer.dataloader_num_workers={workers}: with fresh_text=true the process that reads rows runs the target, "
            "which a worker cannot. Set 0"
        )


def head_class(cfg: DictConfig) -> type:
    """Return the class of the run's head: NoneType if a function makes the head, and with head=auto."""
    make: Any = get_method(cfg.head._target_) if "_target_" in cfg.get("head", {}) else None
    return cast(type, make.__self__) if inspect.ismethod(make) else NoneType


def check_head_settings(cfg: DictConfig) -> None:
    """Raise ValueError for a value of the section `head` that is not of the type or size that its constructor takes."""
    if "_target_" not in cfg.get("head", {}):  # head=auto
        return
    make, kind = get_method(cfg.head._target_), head_class(cfg)
    annotations = {name: parameter.annotation for name, parameter in inspect.signature(make).parameters.items()}
    if issubclass(kind, DFlashHead):
        annotations |= {name: type(value) for name, value in kind.own_defaults.items()}
    ours = make.__module__.startswith("foredraft.")  # a head of another module may count from any number
    given: Any = OmegaConf.to_container(cfg.head, resolve=True)
    for name, value in given.items():
        types = get_args(annotations.get(name)) or (annotations.get(name),)
        kinds = {get_origin(each) or each for each in types}
        least, most = LEAST.get(name, 1), math.inf if name in UNLIMITED else MOST
        setting = f"head.{name}={value}"
        if (value is None and NoneType in kinds) or (not ours and type(value) in kinds):
            continue
        if int in kinds and not (type(value) is int and least <= value <= most):
            limit = f"of at least {least}" if name in UNLIMITED else f"from {least} to {most:,}"
            raise ValueError(f"{setting} must be a whole number {limit}")
        if float in kinds and type(value) not in (int, float):
            raise ValueError(f"{setting} is not a number")
        if list in kinds and not (isinstance(value, list) and all(type(number) is int for number in value)):
            raise ValueError(f"{setting} is not a list of whole numbers, such as [2,16,29]")
        if dict in kinds and not isinstance(value, dict):
            raise ValueError(f"{setting} is not a group of settings, such as {{rope_type: default}}")


def check_loss(cfg: DictConfig) -> None:
    """Raise ValueError for a loss that does not exist or that heads of this kind cannot learn from."""
    kind = head_class(cfg)  # before the loss: the head's own module may add one to the table
    losses.build(cfg.loss, cfg.loss_args)
    used = losses.parts(cfg.loss, cfg.loss_args)
    if kind is NoneType:
        return
    if "label" in used and not issubclass(kind, BlockHead):
        raise ValueError(
            f"loss={cfg.loss} learns from the tokens of the text, and only heads that draft in blocks are given them: set "
            "loss=ce"
        )
    ours = kind.__module__.startswith("foredraft.")  # a head of another module may draft from any
    if used & {"regression", "hass"} and ours and not issubclass(kind, HiddenStateHead):
        raise ValueError(
            f"loss={cfg.loss} compares hidden states that the target's lm_head reads, and {kind.__name__} drafts from other "
            "ones: set loss=kl_div, or head=eagle"
        )


def check_context_parallel(cfg: DictConfig, processes: int, strategy: str) -> None:
    """Raise ValueError unless these processes can share rows as cfg.context_parallel says."""
    count = cfg.context_parallel
    if count == 1:
        return
    setting = f"context_parallel={count}"
    if not isinstance(count, int) or count < 1 or processes % count:
        raise ValueError(f"{setting} must divide the {processes} processes of the run (torchrun --nproc-per-node)")
    if strategy not in ("ddp", "fsdp"):
        raise ValueError(f"{setting} works with strategy=ddp or fsdp, and this is {strategy}")
    if cfg.max_length % (2 * count):
        raise ValueError(
            f"{setting} cuts rows into {2 * count} equal parts: max_length={cfg.max_length} must be a multiple of that"
        )


def check_target(cfg: DictConfig, target: Target) -> None:
    """Raise ValueError for settings that do not suit the target."""
    target.capabilities.check_draftable()
    width = getattr(target.model.get_input_embeddings(), "embedding_dim", target.hidden_size)
    if width != target.hidden_size:
        raise ValueError(
            f"{target.name} has embeddings of width {width} and hidden states of width {target.hidden_size}, and a head "
            "needs one width: choose another target, or a drafter without a head, such as suffix or ngram"
        )
    reads_rows = target.capabilities.packed_rows and target.sharding != "tensor"
    reads_rows &= target.sharding != "fsdp" or not reads_images(target.model.config)
    if cfg.context_parallel > 1 and cfg.hidden_states._target_ == ONLINE and not reads_rows:
        raise ValueError(
            f"context_parallel={cfg.context_parallel}: {target.name} with target.sharding={target.sharding} cannot read "
            "parts of rows: take hidden_states=offline or server"
        )
    if target.context is not None and cfg.max_length > target.context:
        raise ValueError(f"max_length={cfg.max_length}: the target {target.name} reads {target.context} tokens at most")
    if target.context is not None and cfg.eval.prompt_tokens >= target.context:
        raise ValueError(
            f"eval.prompt_tokens={cfg.eval.prompt_tokens}: the target reads {target.context} tokens, its answer included"
        )
    if target.is_collective and cfg.fresh_text:
        raise ValueError(
            f"target.sharding={target.sharding} lets all processes write together, and they come to the end of a text one by "
            "one: fresh_text=true needs target.sharding=null"
        )


def check_data(cfg: DictConfig, target: Target, data: Corpus) -> None:
    """Raise ValueError for data that the run cannot learn from or be measured on."""
    settings, tokens = cfg.eval, cfg.eval.prompt_tokens
    if data.train.reader is not None and cfg.context_parallel > 1:
        raise ValueError(
            f"context_parallel={cfg.context_parallel} cuts rows at any token, and an image is whole: training on images "
            "needs context_parallel=1"
        )
    if data.train.reader is not None and target.is_collective:
        raise ValueError(
            f"target.sharding={target.sharding} lets all processes run the target together, and not all have images at a "
            "time: training on images needs target.sharding=null, or layers"
        )
    if data.train.weights is not None and cfg.self_generated_tokens:
        raise ValueError(
            f"self_generated_tokens={cfg.self_generated_tokens} would put other text in the place of what was logged: "
            "give 0, or data.rejection_weight=1"
        )
    if data.train.reader is not None and cfg.self_generated_tokens:
        raise ValueError(
            f"self_generated_tokens={cfg.self_generated_tokens}: the target writes after text alone: give 0"
        )
    if settings.lengths:
        if target.context is not None and max(settings.lengths) + settings.max_new_tokens > target.context:
            raise ValueError(
                f"eval.lengths={list(settings.lengths)}: the target reads {target.context}, its answer included"
            )
        long_prompts.texts_of(target.text_tokenizer, data, settings.num_prompts, settings.lengths)
    tested = []
    if has_prompts(data.test):
        tested = prompt_sets.held_out(target.text_tokenizer, data, settings.final_num_prompts, tokens)
    longest = max((len(prompt.tokens) for prompt in tested), default=0)
    if target.context is not None and longest >= target.context:
        raise ValueError(
            f"a held-out conversation has a prompt of {longest} tokens, the target reads {target.context}, its answer "
            f"included: lower eval.prompt_tokens={tokens}, which admits prompts of 8 times as many"
        )
    if settings.steps and has_prompts(data.validation):
        prompts(target.text_tokenizer, data.validation, settings.num_prompts, tokens)


def check_head(head: DraftHead) -> None:
    """Raise ValueError for what a new kind of head lacks. Python finds missing methods itself."""
    name = type(head).__name__
    if not isinstance(head, DraftHead):
        raise ValueError(
            f"the head's yaml builds {name}, not a DraftHead: its _target_ is a for_target that returns one"
        )
    needed = ("kind", "layers", "depth", *(("width", "block_entries") if isinstance(head, BlockHead) else ()))
    if missing := [attribute for attribute in needed if not hasattr(head, attribute)]:
        raise ValueError(f"{name} does not set {', '.join(missing)}, which heads/base.py explains: set it in __init__")
    if type(head.depth) is not int or head.depth < 1:
        raise ValueError(f"head.{head.depth_key}={head.depth} must be a whole number of at least 1")
    for other in subclasses(DraftHead):  # type: ignore[type-abstract]
        related = isinstance(head, other) or issubclass(other, type(head))
        if not related and getattr(other, "kind", None) == head.kind:
            raise ValueError(
                f"{name}.kind={head.kind} is the kind of {other.__module__}.{other.__name__}: set another one"
            )


@torch.no_grad()
def disturb(head: DraftHead) -> None:
    """Add noise to the weights that train. A new head passes the target's own guess through, so a layer with weights of zero
    or one would hide what is wrong behind it."""
    for weight in head.parameters():
        if weight.requires_grad:
            weight.add_(torch.randn_like(weight), alpha=0.1 / (weight.shape[-1] if weight.dim() > 1 else 1) ** 0.5)


def check_saving(head: DraftHead, target: Target, documents: Sequence[Document]) -> None:
    """Save a copy of the untrained head with other weights, read it back, and pass the parity gate. The head's own weights
    and random numbers stay."""
    with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng():
        trial = copy.deepcopy(head, {id(target): target}).eval()
        trial.on_train_end()
        disturb(trial)
        save_checked(trial, target, Path(folder), documents)


def save_checked(
    head: DraftHead, target: Target, directory: Path, documents: Sequence[Document], **facts: Any
) -> float:
    """Round the head to the target's dtype, write its files, pass the parity gate; its largest difference. The head is in
    float32 afterwards.

    The rounding comes first, so that what is checked and measured is what is published.
    """
    head.to(published_dtype(target))
    save_head(head, directory, target, **facts)
    long = (document.tokens for document in documents if len(document.tokens) >= GATE_TOKENS)
    text = next(long, None) or max((document.tokens for document in documents), key=len)
    return parity_gate.check(head.to(torch.float32), target, text[:GATE_TOKENS], saved=directory)
