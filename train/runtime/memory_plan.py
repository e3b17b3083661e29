"""What train/runtime/cost.py counted of a step, divided over the GPUs of a run: the memory of each."""

from omegaconf import DictConfig

from foredraft.heads.target import Target
from foredraft.train.runtime.cost import BITS, Body, Head

GIB = 2**30
NODE = 8  # GPUs of a node, over which a target is spread
RESERVE = 1.5  # GiB per GPU for the driver's context, NCCL's buffers and the allocator's gaps
SHARDS = {  # of a head's weights, gradients and optimizer state: which lie in pieces, one per process?
    "single": (False, False, False),
    "ddp": (False, False, False),
    "zero1": (False, False, True),
    "zero2": (False, True, True),
    "zero3": (True, True, True),
    "fsdp": (True, True, True),
}


def strategy_of(cfg: DictConfig) -> str:
    """Return the strategy of a plan, with `auto` resolved. Raise ValueError for an unknown one."""
    strategy = ("ddp" if cfg.gpus > 1 else "single") if cfg.strategy == "auto" else cfg.strategy
    if strategy not in SHARDS:
        raise ValueError(f"strategy={strategy} is not one of auto, {', '.join(SHARDS)}")
    return strategy


def memory_per_gpu(
    cfg: DictConfig, head: Head, body: Body, layers: int, target: Target
) -> dict[str, tuple[float, str]]:
    """Return GiB per GPU and how each was counted."""
    pieces = SHARDS[strategy_of(cfg)]
    n = cfg.gpus

    def part(size: int, cut: bool, what: str) -> tuple[float, str]:
        return size / GIB / (n if cut else 1), what + (f", one of {n} shards" if cut and n > 1 else "")

    bits = (
        f"{BITS[cfg.target.quantization]} bits per weight"
        if cfg.target.quantization
        else str(target.dtype).removeprefix("torch.")
    )
    whole = cfg.hidden_states.get("load_full_target", True)
    sharding = cfg.target.sharding if n > 1 and whole else None
    node = min(n, NODE)
    batch = cfg.trainer.per_device_train_batch_size
    rows = batch * (node if sharding == "tensor" else 1)  # a slice of a layer has the rows of all
    captured = rows * cfg.max_length * (layers + 1) * target.hidden_size * 2
    held = {
        "fsdp": ((body.weights + body.ends) / node, f"one of {node} pieces on every GPU"),
        "tensor": (body.weights / node + body.ends, f"one of {node} slices on every GPU, embedding and lm_head whole"),
    }.get(str(sharding), (body.weights + body.ends, "whole on every GPU"))
    if not whole:
        held = body.ends, "of which embedding and lm_head are loaded"
    found = {
        "target weights": (
            held[0] / GIB,
            f"{body.parameters / 1e9:.2f}B parameters in {bits}, {held[1]}",
        ),
        "target at work": (
            body.working * rows / batch / GIB,
            f"one layer on {rows} x {cfg.max_length} tokens",
        ),
        "aux hidden states": (
            captured / GIB,
            f"{layers} layers and the last, {rows} x {cfg.max_length} x {target.hidden_size}",
        ),
        "head weights": part(head.weights, pieces[0], "float32"),
        "gradients": part(head.gradients, pieces[1], "float32"),
        "optimizer state": part(head.optimizer, pieces[2], cfg.trainer.optim),
        "activations": (head.activations / GIB, "counted in one forward and backward"),
        "reserve": (RESERVE, "driver, NCCL, gaps"),
    }
    if pieces[0] and n > 1:
        found["gathered weights"] = (head.weights / GIB, "whole during a batch")
    if not whole:
        del found["target at work"]
    if sharding == "fsdp":
        gathered = 2 * body.weights / target.num_layers + body.ends
        found["gathered target"] = (gathered / GIB, "a layer at work and the next one, embedding and lm_head")
    return found
