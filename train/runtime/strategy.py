"""How the head is spread over processes: conf/strategy, each of them one set of arguments for transformers' Trainer."""

import contextlib
import importlib.util
import os
from collections.abc import Iterator

import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch import Tensor, nn
from transformers import TrainingArguments

from heads.base import DraftHead
from train.runtime import distributed


def check(engine: str, optimizer: str) -> None:
    """Raise ValueError where this engine cannot work in the processes that there are. optimizer: path of its constructor."""
    if engine == "single" and distributed.world_size() > 1:
        raise ValueError(
            f"strategy=single is one process, and torchrun started {distributed.world_size()}: take strategy=ddp"
        )
    if engine != "single" and "RANK" not in os.environ:
        raise ValueError(
            f"strategy={engine} works in processes that torchrun starts: torchrun --nproc-per-node 8 train/run.py "
            f"strategy={engine} ..."
        )
    if engine.startswith("zero"):
        if optimizer.endswith(".muon"):
            raise ValueError(
                f"strategy={engine} cuts matrices into pieces and Muon updates whole ones: take optimizer=adamw, or "
                "strategy=fsdp"
            )
        if importlib.util.find_spec("deepspeed") is None:
            raise ValueError(f"strategy={engine} needs DeepSpeed: pip install -c constraints.txt '.[deepspeed]'")


def choose_device() -> None:
    """One accelerator for each process of a machine: "cuda" means this one from here on."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))


@contextlib.contextmanager
def sharded_on_cpus_too(args: TrainingArguments) -> Iterator[None]:
    """accelerate shards on accelerators only: told of several CPU processes it would run DDP and say nothing."""
    state = PartialState._shared_state
    if args.fsdp and state["distributed_type"] == DistributedType.MULTI_CPU:
        state["distributed_type"] = DistributedType.MULTI_GPU  # until Accelerator puts FSDP in its place
    yield


def check_distributed_type(engine: str, kind: DistributedType) -> None:
    """accelerate falls back to DDP in silence; here it must not."""
    wanted = {
        "single": DistributedType.NO,
        "fsdp": DistributedType.FSDP,
        **{f"zero{stage}": DistributedType.DEEPSPEED for stage in (1, 2, 3)},
    }
    several = (DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
    fits = kind in several if engine == "ddp" else kind == wanted[engine]
    assert fits, f"strategy={engine} became {kind}"


def forget_sharding(engine: str) -> None:
    """With ZeRO-3, transformers would cut up every model that is loaded from here on."""
    if engine == "zero3":
        from transformers.integrations.deepspeed import unset_hf_deepspeed_config  # brings DeepSpeed, seconds

        unset_hf_deepspeed_config()


def without_weights(module: DraftHead) -> DraftHead:
    """The module itself, its parameters emptied. Buffers stay: a state does not hold all of them (rotary frequencies)."""
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            setattr(part, name, nn.Parameter(parameter.to("meta"), parameter.requires_grad))
    return module


def load_full_weights(eval_head: nn.Module, state: dict[str, Tensor], device: torch.device) -> None:
    """Give `spare`, a copy without weights, the whole weights of a lesson's `state`; a tensor there may be shared."""
    head = {name.removeprefix("head."): tensor for name, tensor in state.items() if name.startswith("head.")}
    eval_head.load_state_dict(head, assign=True)
    eval_head.to(device)
