"""How the head is spread over processes: each of conf/strategy is one set of arguments for transformers' Trainer."""

import importlib.util
import os

import torch
from accelerate.utils import DistributedType
from torch import Tensor, nn
from transformers import TrainingArguments

from foredraft.heads.base import DraftHead
from foredraft.train.runtime import distributed


def check(strategy: str, optimizer: str) -> None:
    """Raise ValueError where this strategy cannot work in the processes of this run. optimizer: path of its constructor."""
    if strategy == "single" and distributed.world_size() > 1:
        raise ValueError(
            f"strategy=single is one process, and torchrun started {distributed.world_size()}: take strategy=ddp"
        )
    if strategy != "single" and "RANK" not in os.environ:
        raise ValueError(
            f"strategy={strategy} works in processes that torchrun starts: torchrun --nproc-per-node 8 train/run.py "
            f"strategy={strategy} ..."
        )
    if strategy.startswith("zero"):
        if optimizer.endswith(".muon"):
            raise ValueError(
                f"strategy={strategy} cuts matrices into pieces and Muon updates whole ones: take optimizer=adamw, or "
                "strategy=fsdp"
            )
        if importlib.util.find_spec("deepspeed") is None:
            raise ValueError(f"strategy={strategy} needs DeepSpeed: pip install 'foredraft[deepspeed]'")


def choose_device() -> None:
    """One accelerator for each process of a machine, which "cuda" names from here on."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))


def shard_on_cpus_too(args: TrainingArguments) -> None:
    """accelerate shards on accelerators only, and would run DDP in several CPU processes without a word. It takes the kind
    of the processes from this state, and puts FSDP in its place."""
    state = args.distributed_state
    if args.fsdp and state is not None and state.distributed_type == DistributedType.MULTI_CPU:
        state.distributed_type = DistributedType.MULTI_GPU


def check_distributed_type(strategy: str, kind: DistributedType) -> None:
    """accelerate falls back to DDP without a word; here it must not. Raises ValueError where what `accelerate launch` was
    told to do is at odds with the strategy."""
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
    """With ZeRO-3, transformers would cut up every model that is loaded from here on."""
    if strategy == "zero3":
        from transformers.integrations.deepspeed import unset_hf_deepspeed_config  # brings DeepSpeed, seconds

        unset_hf_deepspeed_config()


def without_weights(module: DraftHead) -> DraftHead:
    """The module with empty parameters. Buffers stay: a state does not hold all of them (rotary frequencies)."""
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            setattr(part, name, nn.Parameter(parameter.to("meta"), parameter.requires_grad))
    return module


def load_full_weights(eval_head: nn.Module, state: dict[str, Tensor], device: torch.device) -> None:
    """Give `eval_head`, a copy without weights, the full weights of a distillation's `state`, whose tensors it shares."""
    head = {name.removeprefix("head."): tensor for name, tensor in state.items() if name.startswith("head.")}
    eval_head.load_state_dict(head, assign=True)
    eval_head.to(device)
