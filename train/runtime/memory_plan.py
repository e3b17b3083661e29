"""The memory and the work of a training step, by arithmetic on the shapes of head and target: nothing is loaded or computed.

    weights, gradients, optimizer state    of a head that is built on the meta device
    activations                            what autograd keeps of every position, and one chunk of logits
    target                                 its config's sizes

The sum is within 2 % of the bytes that the tensors of a step have at their peak, and the FLOP within 5 % of those that torch
counts (EAGLE-3, DFlash, Medusa; float32, a target of 63M parameters). tests/train/test_plan.py admits 15 and 6 %.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from transformers import PretrainedConfig

from foredraft.heads.base import BlockHead, DraftHead, RecurrentHead
from foredraft.heads.llama_config import shape_of
from foredraft.heads.target_model import Target
from foredraft.heads.target_model.config_names import settings_of
from foredraft.heads.target_model.loading import model_class
from foredraft.train.module import rows_at_a_time
from foredraft.train.start import new_head

GIB = 2**30
NODE = 8  # GPUs of a node, over which a target is spread
RESERVE = 1.5  # GiB per GPU for the driver's context, NCCL's buffers and the allocator's gaps
BITS = {"4bit": 4.5, "8bit": 8.0, "mxfp4": 4.25}  # bits per weight, including its scales
STORED = {"mxfp4": "mxfp4", "fp8": "8bit", "fbgemm_fp8": "8bit"}  # by the quant_method of configs that count no bits
SHARDS = {  # of a head's weights, gradients and optimizer state: which lie in pieces, one per process?
    "single": (False, False, False),
    "ddp": (False, False, False),
    "zero1": (False, False, True),
    "zero2": (False, True, True),
    "zero3": (True, True, True),
    "fsdp": (True, True, True),
}
# What configs call the experts that a token uses, and all that there are.
EXPERTS = (
    ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk"),
    ("num_local_experts", "num_experts", "n_routed_experts"),
)


class Head(NamedTuple):
    """Hold the needs of one step of one process, all but `flops` in bytes."""

    weights: int
    gradients: int
    optimizer: int
    activations: float
    flops: float
    layers: int  # number of hidden states that the head takes


class Body(NamedTuple):
    """Hold the needs of the target."""

    weights: float  # bytes, without its ends
    ends: float  # bytes of embedding and lm_head
    working: float  # bytes, while it runs over a batch
    flops: float  # per batch
    parameters: int


def stored_quantization(config: PretrainedConfig) -> str | None:
    """Return the key of `BITS` for a checkpoint that is quantized itself; None for one that is not, or not in this way. A
    GPU without the kernels holds these weights dequantized, which needs more."""
    about = config.to_dict().get("quantization_config") or {}
    if about.get("quant_method") in STORED:
        return STORED[about["quant_method"]]
    groups = about.get("config_groups") or {}  # compressed-tensors
    counted = [about.get("bits"), *((group.get("weights") or {}).get("num_bits") for group in groups.values())]
    counted += [bits for bits in (4, 8) if about.get(f"load_in_{bits}bit")]
    most = max((bits for bits in counted if isinstance(bits, int)), default=16)
    return "4bit" if most <= 4 else "8bit" if most <= 8 else None


def study(cfg: DictConfig, config: PretrainedConfig, dtype: torch.dtype) -> tuple[Head, Body, Target]:
    """Return what head and target need, and the target, which has no numbers. cfg: as conf/plan.yaml describes it."""
    with torch.device("meta"):
        model = model_class(config).from_config(config, dtype=dtype)
        model.tie_weights()
        target = Target(model, name=cfg.target.path)
        target.embeddings_only, target.remote_hidden_states = True, partial(shaped_states, target)
        head = new_head(cfg.head, target)
        head.on_train_begin(target)
    return head_needs(cfg, head, target), target_needs(cfg, target), target


def shaped_states(target: Target, tokens: Tensor, layers: Sequence[int]) -> Tensor:
    """Return hidden states that have a shape and no numbers."""
    return torch.empty(*tokens.shape, len(layers) * target.hidden_size, dtype=target.dtype, device="meta")


def head_needs(cfg: DictConfig, head: DraftHead, target: Target) -> Head:
    vocabulary = {id(p) for p in head.vocabulary_parameters}
    trained = [p for p in head.parameters() if p.requires_grad]
    one_moment = [p for p in trained if p.ndim == 2 and id(p) not in vocabulary] if cfg.trainer.optim == "muon" else []
    numbers = sum(p.numel() for p in trained)
    weights = sum(t.nbytes for t in [*head.parameters(), *head.buffers()])
    activations, flops = head_work(cfg, head, target, vocabulary)
    state = 8 * numbers - 4 * sum(p.numel() for p in one_moment)
    return Head(weights, 4 * numbers, state, activations, flops, len(head.layers))


def head_work(cfg: DictConfig, head: DraftHead, target: Target, vocabulary: set[int]) -> tuple[float, float]:
    """Return the bytes that live at the peak of a step's forward and backward, and its FLOP. A linear layer keeps its input
    and its output of every position that it is applied to. The logits of a chunk of positions live at a time, and their
    gradients are taken at once (train/gradients.py)."""
    rows, length, width = cfg.trainer.per_device_train_batch_size, cfg.max_length, target.hidden_size
    tokens, size = rows * length, 2 if cfg.trainer.bf16 else 4
    work, drafts = tokens, tokens * head.depth
    if isinstance(head, BlockHead):
        blocks = rows * max(1, round(cfg.objective.anchors * length))
        work, drafts = blocks * head.block_entries, blocks * head.depth
    elif isinstance(head, RecurrentHead) and head.limit is None:  # the same weights for all depths
        work = drafts
    kept = flops = 0.0
    for name, module in head.named_modules():
        if isinstance(module, nn.Linear) and id(module.weight) not in vocabulary:
            fuses = name == "fc" and module.in_features == len(head.layers) * width
            places = work + tokens * (isinstance(head, BlockHead) and name.endswith(("k_proj", "v_proj")))
            if fuses:
                places = tokens  # hidden states of the text are fused once, and have no gradient
            kept += places * size * (module.in_features + module.out_features)
            flops += (4 if fuses else 6) * places * module.weight.numel()
    if head.config is not None:  # a decoder layer also keeps the residual stream and its norms, in float32
        layers = max(1, head.cache_layers)
        kept += work * layers * 3 * 4 * width
        flops += 6 * work * layers * length * width
    if cfg.context_parallel > 1:
        kept /= cfg.context_parallel
        if head.config is not None:  # keys and values of whole rows
            of_layer = 2 * head.config.num_key_value_heads * head.config.head_dim
            kept += tokens * head.cache_layers * of_layer * size
    drafted = target.vocab_size if head.draft_ids is None else len(head.d2t)
    compared = drafts if isinstance(head, BlockHead) else tokens  # at a time, and label positions with a teacher
    chunk = min(rows_at_a_time(target.vocab_size, "cuda"), compared)
    kept += chunk * (6 * target.vocab_size + 12 * drafted)
    kept += 2 * drafts * 4 * width / cfg.context_parallel  # drafts and their gradients
    if cfg.trainer.bf16:  # autocast's copies of the weights
        kept += 2 * sum(p.numel() for p in head.parameters() if p.requires_grad)
    # Gradients of the projections are summed over the chunks, apart from .grad.
    learned = [p for module in head.projections for p in module.parameters() if p.requires_grad]
    kept += 4 * sum(p.numel() for p in learned)
    flops += 2 * compared * target.vocab_size * width
    flops += (6 if learned else 4) * drafts * drafted * width  # 4: rows that do not learn
    return kept, flops


def target_needs(cfg: DictConfig, target: Target) -> Body:
    """Count by arithmetic on the config; working memory is that of one layer, since no gradient state is kept."""
    model = target.model
    ends = {id(p) for m in (model.get_input_embeddings(), model.get_output_embeddings()) for p in m.parameters()}
    body = {name: p.numel() for name, p in model.named_parameters() if id(p) not in ends}
    edge = sum(p.numel() for p in model.parameters() if id(p) in ends)
    facts = settings_of(target.config)
    used, experts = (next((facts[name] for name in names if facts.get(name)), 1) for names in EXPERTS)
    mixed = sum(count for name, count in body.items() if ".experts." in name)
    dense = sum(body.values()) - mixed
    size = target.dtype.itemsize
    bits = BITS[cfg.target.quantization] if cfg.target.quantization else 8.0 * size
    packed = mixed if cfg.target.quantization == "mxfp4" else mixed + dense
    weights = packed * bits / 8 + (mixed + dense - packed) * size
    tokens = cfg.trainer.per_device_train_batch_size * cfg.max_length
    shape = shape_of(target)
    heads = shape["num_attention_heads"]
    width = shape.get("head_dim") or target.hidden_size // heads
    attention = 2 * cfg.max_length * heads * width * target.num_layers  # causal: half of 4
    # One layer at its widest (the two halves of the MLP and their product), the residual stream, eager attention's scores.
    scores = heads * cfg.max_length**2 * (4 + size) if model.config._attn_implementation == "eager" else 0
    working = tokens * (3 * shape["intermediate_size"] * used + 4 * target.hidden_size) * size + scores
    flops = tokens * (2 * (dense + mixed * used / experts) + attention)
    return Body(weights, edge * size, working, flops, sum(body.values()) + edge)


def strategy_of(cfg: DictConfig) -> str:
    """Return the strategy of a plan, with `auto` resolved. Raise ValueError for an unknown one."""
    strategy = ("ddp" if cfg.gpus > 1 else "single") if cfg.strategy == "auto" else cfg.strategy
    if strategy not in SHARDS:
        raise ValueError(f"strategy={strategy} is not one of auto, {', '.join(SHARDS)}")
    return strategy


def memory_per_gpu(cfg: DictConfig, head: Head, body: Body, target: Target) -> dict[str, tuple[float, str]]:
    """Return GiB per GPU and how each was counted."""
    cut = dict(zip(("head weights", "gradients", "optimizer state"), SHARDS[strategy_of(cfg)], strict=True))
    whole = cfg.hidden_states.get("load_full_target", True)
    sharding = cfg.target.sharding if cfg.gpus > 1 and whole else None
    node, batch = min(cfg.gpus, NODE), cfg.trainer.per_device_train_batch_size
    rows = batch * (node if sharding == "tensor" else 1)  # a slice of a layer has the rows of all
    quantized = cfg.target.quantization
    bits = f"{BITS[quantized]} bits per weight" if quantized else str(target.dtype).removeprefix("torch.")
    held, where = body.weights + body.ends, "whole on every GPU"
    if not whole:
        held, where = body.ends, "of which embedding and lm_head are loaded"
    elif sharding == "fsdp":
        held, where = held / node, f"one of {node} pieces on every GPU"
    elif sharding == "tensor":
        held, where = body.weights / node + body.ends, f"one of {node} slices on every GPU, embedding and lm_head whole"
    length = cfg.max_length // cfg.context_parallel
    captured = rows * length * (head.layers + 1) * target.hidden_size * 2
    size = f"{rows} x {length}"
    counted: dict[str, tuple[float, str]] = {
        "target weights": (held, f"{body.parameters / 1e9:.2f}B parameters in {bits}, {where}"),
        "target at work": (body.working * rows / batch / cfg.context_parallel * whole, f"one layer on {size} tokens"),
        "aux hidden states": (captured, f"{head.layers} layers and the last, {size} x {target.hidden_size}"),
        "head weights": (head.weights, "float32"),
        "gradients": (head.gradients, "float32"),
        "optimizer state": (head.optimizer, cfg.trainer.optim),
        "activations": (head.activations, "of the head, and a chunk of logits"),
        "reserve": (RESERVE * GIB, "driver, NCCL, gaps"),
    }
    if cfg.gpus > 1:
        # Processes that share rows sum gradients over all of them before they are cut.
        whole_gradients = ["gradients"] * (cfg.context_parallel > 1)
        for name in (name for name in cut if cut[name] and name not in whole_gradients):
            counted[name] = counted[name][0] / cfg.gpus, f"{counted[name][1]}, one of {cfg.gpus} shards"
        if cut["head weights"]:
            counted["gathered weights"] = head.weights, "whole during a batch"
    if sharding == "fsdp":
        gathered = 2 * body.weights / target.num_layers + body.ends
        counted["gathered target"] = gathered, "a layer at work and the next one, embedding and lm_head"
    return {name: (size / GIB, how) for name, (size, how) in counted.items() if size}
