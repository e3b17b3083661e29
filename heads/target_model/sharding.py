"""Spread a target that is too large for one device over several, independently of how the head is trained.

    layers   one process; whole layers on its devices one after the other, and the rest on the host (accelerate)
    fsdp     every process has a shard of every weight and gathers a layer when it runs; each has its own sequences
    tensor   every process computes its slice of every layer, and its experts; all process the same sequences, those of all

Shards and slices are spread over one node, whose devices are close to each other; every node has a full copy.

With the latter two every process must take part in every forward, in the same order. So decisions about a forward must be the
same in all of them, and must not depend on a clock. Both are transformers' own.
"""

import functools
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from foredraft.heads.target_model.config_names import settings_of
from foredraft.heads.target_model.loading import model_class, read_config

if TYPE_CHECKING:
    from foredraft.heads.target_model.model import Target

T = TypeVar("T")
COLLECTIVE = ("fsdp", "tensor")
KINDS = ("layers", *COLLECTIVE)


def arguments(path: str, sharding: str, quantization: str | None) -> dict[str, Any]:
    """Return arguments of transformers' `from_pretrained` for the model at `path`. Joins the processes that torchrun
    started."""
    if sharding not in KINDS:
        raise ValueError(f"sharding={sharding} is not one of {', '.join(KINDS)}")
    if sharding == "layers":
        return {"device_map": "auto"}
    if quantization is not None:
        raise ValueError(
            f"sharding={sharding} splits weights, which quantization={quantization} packs: use one of them"
        )
    if "RANK" not in os.environ:
        raise ValueError(
            f"sharding={sharding} needs processes that torchrun starts: torchrun --nproc-per-node 8 train/run.py ..."
        )
    from transformers.distributed import DistributedConfig  # takes seconds, and is only needed here

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    node = node_size()
    if sharding == "tensor":
        check_divides(path, node)
    shape: dict[str, Any] = {"fsdp_size": node}
    if sharding == "tensor":
        shape = {"tp_plan": replicated_params(path), "tp_size": node}
        if read_config(path).get_text_config().base_model_ep_plan is not None:
            shape["ep_size"] = node  # whole experts: gpt-oss has no plan for slices, and slices are thin
    return {"distributed_config": DistributedConfig(**shape, dp_replicate_size=dist.get_world_size() // node)}


def check_divides(path: str, node: int) -> None:
    """Raise ValueError unless the heads and experts of the model at `path` can be divided among the processes of a node."""
    config = read_config(path).get_text_config()
    experts = () if config.base_model_ep_plan is None else ("num_local_experts", "num_experts", "n_routed_experts")
    for name in ("num_attention_heads", "num_key_value_heads", *experts):
        if (count := settings_of(config).get(name)) is not None and count % node:
            raise ValueError(
                f"target.sharding=tensor splits the {name}={count} of {path} equally among the processes of a node, and "
                f"{node} processes do not divide it: start another number of them, or use target.sharding=fsdp"
            )


def node_size() -> int:
    """Return the number of processes of this node; all nodes have as many. Raises ValueError if it does not divide the
    total."""
    size, node = dist.get_world_size(), int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    if size % node:
        raise ValueError(
            f"target.sharding spreads a target over the {node} processes of a node, which do not divide {size}"
        )
    return node


@functools.cache
def node_group() -> dist.ProcessGroup:
    """Return the process group of this node. Every process of the run must call this at the same time."""
    return dist.new_subgroups(node_size())[0]


def largest(count: int) -> int:
    """Return the largest `count` of all processes."""
    counts = torch.tensor(count)
    dist.all_reduce(counts, dist.ReduceOp.MAX)
    return int(counts)


def gather_rows(tensors: Sequence[Tensor]) -> tuple[list[Tensor], slice]:
    """Concatenate the rows of each tensor over all processes of the node, and return the slice of this process's rows."""
    group, gathered = node_group(), []
    for tensor in tensors:
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, tensor.contiguous(), group=group)
        gathered.append(torch.cat(parts))
    first = len(tensors[0]) * dist.get_rank(group)
    return gathered, slice(first, first + len(tensors[0]))


def replicated_params(path: str) -> dict[str, str]:
    """Return the plan's exceptions: embedding and lm_head, which heads use for each process's own sequences."""
    with torch.device("meta"):
        config = read_config(path)
        model = model_class(config).from_config(config)
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    return {name: "replicate" for name, module in model.named_modules() if module in ends}


def full_tensor(weight: Tensor) -> Tensor:
    """Return a weight with all its shards. Every process must call this."""
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def weight_of(module: Any) -> Tensor:
    """Return a module's weight like `full_tensor`, also one that accelerate keeps elsewhere between forwards."""
    if "_hf_hook" not in vars(module):
        return full_tensor(module.weight)
    from accelerate.utils import align_module_device

    with align_module_device(module):
        return module.weight


def device_of(module: Any) -> torch.device:
    """Return the device that a module with a weight computes on."""
    hook = vars(module).get("_hf_hook") if module.weight.is_meta else None
    return torch.device(getattr(hook, "execution_device", None) or module.weight.device)


def broadcast(target: "Target", value: T) -> T:
    """Return the first process's picklable `value` if all processes take part in every forward, otherwise `value`. A measured
    value that decides about the next forward must come from here."""
    if not target.is_collective:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def all_equal(value: Any) -> bool:
    """Return whether all processes have the same picklable value. Every process must call this."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return all(other == values[0] for other in values)
