"""Spread the head over processes: each strategy is one set of arguments for transformers' Trainer."""

import importlib.util
import os
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import torch
from accelerate.utils import DistributedType
from omegaconf import OmegaConf
from torch import nn
from transformers import TrainingArguments

from foredraft.heads.base import DraftHead
from foredraft.train.runtime import distributed


class Strategy(NamedTuple):
    """Describe an entry of the table of strategies; `--help` shows its description."""

    description: str
    arguments: dict[str, Any] = {}  # noqa: RUF012 -- of transformers.TrainingArguments


def zero(stage: int, **more: Any) -> dict[str, Any]:
    """Return the arguments of DeepSpeed's ZeRO; "auto" is filled in from the trainer's settings."""
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    return {"deepspeed": dict.fromkeys(sizes, "auto") | {"zero_optimization": {"stage": stage, **more}}}


FSDP = {
    "version": 2,
    "auto_wrap_policy": "NO_WRAP",  # heads call into the middle of their layers, past the hooks of a wrapped one
    "state_dict_type": "SHARDED_STATE_DICT",  # every process writes its part; any number of processes can read them
    "cpu_offload": False,
}
# Every weight is used in every step, and a pruned vocabulary never changes.
DDP = {"ddp_find_unused_parameters": False, "ddp_broadcast_buffers": False}
# Saved weights are whole and keep their dtype; smaller weights (norms) are not cut.
ZERO3 = {"stage3_gather_16bit_weights_on_model_save": True, "stage3_param_persistence_threshold": 10000}
STRATEGIES = {
    "auto": Strategy("ddp in processes that torchrun starts, else single"),
    "single": Strategy("one process on one device"),
    "ddp": Strategy("one copy of the head per process, gradients averaged (start with torchrun)", DDP),
    "fsdp": Strategy(
        "FSDP2: weights, gradients and optimizer state in shards (start with torchrun)",
        {"fsdp": True, "fsdp_config": FSDP},
    ),
    "zero1": Strategy("DeepSpeed ZeRO-1: optimizer state in shards (start with torchrun)", zero(1)),
    "zero2": Strategy("DeepSpeed ZeRO-2: optimizer state and gradients in shards (start with torchrun)", zero(2)),
    "zero3": Strategy("DeepSpeed ZeRO-3: weights, gradients and optimizer state in shards", zero(3, **ZERO3)),
}

# Variables of Slurm, Open MPI and MPICH: the number of processes that they start. Batch scripts do not have them.
TASKS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


def arguments_of(strategy: str, more: Any) -> dict[str, Any]:
    """Return the arguments of a strategy, of which `strategy_args` replaces some."""
    return cast(dict[str, Any], OmegaConf.to_container(OmegaConf.merge(STRATEGIES[strategy].arguments, more or {})))


def check_not_set(trainer: Mapping[Any, Any]) -> None:
    """Raise ValueError for an argument of Trainer that a strategy sets."""
    for name in ("deepspeed", "fsdp", "fsdp_config"):
        if trainer.get(name):
            raise ValueError(
                f"trainer.{name}={trainer[name]} is part of a strategy: set strategy=fsdp, zero2 or zero3, and what differs "
                "from its usual options in strategy_args"
            )


def choose(strategy: str, optim: str) -> str:
    """Return the strategy that `auto` stands for here, or the named one. Raise ValueError if it cannot work here."""
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy={strategy} is not one of {', '.join(STRATEGIES)}")
    # Of one process, too: accelerate opens a process group for it.
    launched = "LOCAL_RANK" in os.environ or distributed.world_size() > 1
    if strategy == "auto":
        tasks = max(int(os.environ.get(name, "1")) for name in TASKS)
        if not launched and tasks > 1:
            raise ValueError(
                f"{tasks} tasks of srun or mpirun run this program without torchrun, and each would train alone: start "
                "torchrun once per node, as scripts/slurm.sh does, or set strategy=single for separate runs"
            )
        return "ddp" if launched else "single"
    if strategy == "single" and launched:
        raise ValueError(
            f"strategy=single is one process, and torchrun started {distributed.world_size()}: set strategy=ddp or auto, or "
            "start it without torchrun"
        )
    if strategy != "single" and "RANK" not in os.environ:
        raise ValueError(
            f"strategy={strategy} works in processes that torchrun starts: torchrun --nproc-per-node 8 train/run.py "
            f"strategy={strategy} ..."
        )
    if strategy.startswith("zero"):
        if optim == "muon":
            raise ValueError(
                f"strategy={strategy} cuts matrices into pieces and Muon updates whole ones: set trainer.optim=adamw "
                "trainer.learning_rate=6e-4, or strategy=fsdp"
            )
        if importlib.util.find_spec("deepspeed") is None:
            raise ValueError(f"strategy={strategy} needs DeepSpeed: pip install 'foredraft[deepspeed]'")
    return strategy


def choose_device() -> None:
    """Choose one accelerator for each process of a machine, which "cuda" names from here on."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    elif not torch.accelerator.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or DeepSpeed, where installed, warns that it sees none


def shard_on_cpus_too(args: TrainingArguments) -> None:
    """Let accelerate shard on CPUs too: it shards only on accelerators, and would silently run DDP in several CPU processes.
    It takes the kind of the processes from this state, and puts FSDP in its place."""
    state = args.distributed_state
    if args.fsdp and state is not None and state.distributed_type == DistributedType.MULTI_CPU:
        state.distributed_type = DistributedType.MULTI_GPU


def check_distributed_type(strategy: str, kind: DistributedType) -> None:
    """Raise ValueError if accelerate fell back to DDP, or if `accelerate launch` was told something else."""
    wanted = {
        "single": DistributedType.NO,
        "fsdp": DistributedType.FSDP,
        **{f"zero{stage}": DistributedType.DEEPSPEED for stage in (1, 2, 3)},
    }
    several = (DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
    fits = kind in several if strategy == "ddp" else kind == wanted[strategy]
    if not fits:
        raise ValueError(
            f"strategy={strategy} became {kind.value}: with accelerate launch take --multi_gpu, which starts processes and "
            "no more, and strategy= for the rest"
        )


def forget_sharding(strategy: str) -> None:
    """Undo ZeRO-3's settings, by which transformers would cut up every model that is loaded from here on."""
    if strategy == "zero3":
        from transformers.integrations.deepspeed import unset_hf_deepspeed_config  # brings DeepSpeed, seconds

        unset_hf_deepspeed_config()


def without_weights(module: DraftHead) -> DraftHead:
    """Return the module with empty parameters. Buffers stay: a state does not hold all of them (rotary frequencies)."""
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            setattr(part, name, nn.Parameter(parameter.to("meta"), parameter.requires_grad))
    return module
