"""A target too large for one device: how its weights lie on several, however the head beside it is trained.

    layers   one process, whole layers on its devices one after the other, and beyond them on the host (accelerate)
    fsdp     every process has a piece of every weight and gathers a layer when it is its turn; each has rows of its own
    tensor   every process computes its slice of every layer, of experts those that it has; all have the same rows, those of
             all of them

Pieces and slices are those of one node, whose devices are near each other; every node has the whole of them.

With the latter two every process must take part in every forward, in the same order, so that what decides about a forward
must be the same in all of them: a clock is not. Both are transformers' own.
"""

import functools
import os
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from foredraft.heads.target.loading import model_class, read_config
from foredraft.heads.target.support import settings_of

T = TypeVar("T")
COLLECTIVE = ("fsdp", "tensor")
KINDS = ("layers", *COLLECTIVE)


def arguments(path: str, sharding: str, quantization: str | None) -> dict[str, Any]:
    """Arguments of transformers' `from_pretrained` for the model at `path`. Joins the processes that torchrun started."""
    if sharding not in KINDS:
        raise ValueError(f"sharding={sharding} is not one of {', '.join(KINDS)}")
    if sharding == "layers":
        return {"device_map": "auto"}
    if quantization is not None:
        raise ValueError(
            f"sharding={sharding} cuts weights that quantization={quantization} has packed: choose one of both"
        )
    if "RANK" not in os.environ:
        raise ValueError(
            f"sharding={sharding} works in processes that torchrun starts: torchrun --nproc-per-node 8 train/run.py ..."
        )
    from transformers.distributed import DistributedConfig  # seconds, and only needed here

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    node = node_size()
    if sharding == "tensor":
        check_divides(path, node)
    shape: dict[str, Any] = {"fsdp_size": node}
    if sharding == "tensor":
        shape = {"tp_plan": left_whole(path), "tp_size": node}
        if read_config(path).get_text_config().base_model_ep_plan is not None:
            shape["ep_size"] = node  # whole experts: gpt-oss has no plan for slices, and slices are thin
    return {"distributed_config": DistributedConfig(**shape, dp_replicate_size=dist.get_world_size() // node)}


def check_divides(path: str, node: int) -> None:
    """Raise ValueError unless all processes of a node get as many heads, and as many experts, of the model at `path`."""
    config = read_config(path).get_text_config()
    experts = () if config.base_model_ep_plan is None else ("num_local_experts", "num_experts", "n_routed_experts")
    for name in ("num_attention_heads", "num_key_value_heads", *experts):
        if (count := settings_of(config).get(name)) is not None and count % node:
            raise ValueError(
                f"target.sharding=tensor cuts the {name}={count} of {path} into as many equal parts as a node has processes, "
                f"and {node} is no divisor: start another number of them, or take target.sharding=fsdp"
            )


def node_size() -> int:
    """Processes of this node, which torchrun starts as many of on every one; ValueError where they do not divide all."""
    size, node = dist.get_world_size(), int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    if size % node:
        raise ValueError(
            f"target.sharding spreads a target over the {node} processes of a node, which do not divide {size}"
        )
    return node


@functools.cache
def node_group() -> dist.ProcessGroup:
    """The processes of this node; every process of the run must ask at the same time."""
    return dist.new_subgroups(node_size())[0]


def largest(count: int) -> int:
    """Of this number in all processes."""
    counts = torch.tensor(count)
    dist.all_reduce(counts, dist.ReduceOp.MAX)
    return int(counts)


def gather_rows(tensors: Sequence[Tensor]) -> tuple[list[Tensor], slice]:
    """Each of the tensors with the rows of all processes of the node, and which of them are this process's."""
    group, found = node_group(), []
    for tensor in tensors:
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, tensor.contiguous(), group=group)
        found.append(torch.cat(parts))
    first = len(tensors[0]) * dist.get_rank(group)
    return found, slice(first, first + len(tensors[0]))


def left_whole(path: str) -> dict[str, str]:
    """The model's own plan, but for what heads use beside the model, each process for its own rows: embedding and lm_head."""
    with torch.device("meta"):
        config = read_config(path)
        model = model_class(config).from_config(config)
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    return {name: "replicate" for name, module in model.named_modules() if module in ends}


def full_tensor(weight: Tensor) -> Tensor:
    """A weight with all its pieces; every process must ask."""
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def broadcast(value: T) -> T:
    """The first process's `value`, which may be anything that can be pickled; every process must ask."""
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def all_equal(value: Any) -> bool:
    """Has every process the same, which may be anything that can be pickled? Every process must ask."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return all(one == values[0] for one in values)
