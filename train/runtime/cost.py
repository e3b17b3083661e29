"""What one training step takes in memory and work, counted before there are weights.

The head is built, learns from one batch and takes one step of its optimizer on fake tensors (shapes without numbers), while
every byte and every product is counted: so both are those of the code that trains, for any head. The target's share is
arithmetic on its config.
"""

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from transformers import PretrainedConfig
from transformers.initialization import no_init_weights

from foredraft.heads.base import BlockHead, PackedBatch
from foredraft.heads.llama_config import shape_of
from foredraft.heads.target import Target, TargetOutput
from foredraft.heads.target.loading import model_class
from foredraft.heads.target.support import settings_of
from foredraft.train.blocks import BlockDistillation
from foredraft.train.losses import kl_div
from foredraft.train.module import DistillationModel, rows_at_a_time
from foredraft.train.optimizer import OPTIMIZERS

BITS = {"4bit": 4.5, "8bit": 8.0, "mxfp4": 4.25}  # bits per weight, including its scales

# What configs call the experts that a token uses, and all that there are.
EXPERTS = (
    ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk"),
    ("num_local_experts", "num_experts", "n_routed_experts"),
)


class LiveBytes(TorchDispatchMode):
    """Count the bytes of tensors made inside, while they live: `peak` is the most at any moment. before: tensors whose memory
    was there before, so that views of them are not new bytes."""

    def __init__(self, before: Iterable[Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.seen = {tensor.untyped_storage()._cdata for tensor in before}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.note(tensor.untyped_storage())
        return out

    def note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self.seen:
            size = storage.nbytes()
            self.seen.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self.gone, key, size)

    def gone(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.now -= size


class ConfigOnlyTarget(Target):
    """Represent a target that is only a config: its outputs have shapes and no numbers."""

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        mask: Any = None,
        cache: Any = None,
        layers: Sequence[int] = (),
        keep_logits: int = 0,
        key_positions: Tensor | None = None,
        images: dict[str, Tensor] | None = None,
    ) -> TargetOutput:
        rows, length = tokens.shape
        kept = keep_logits or length
        made: dict[str, Any] = {"dtype": self.dtype, "device": tokens.device}
        return TargetOutput(
            torch.empty(rows, kept, self.vocab_size, **made),
            torch.empty(rows, length, len(layers) * self.hidden_size, **made),
        )

    def check_logits(self) -> None:
        """Skip the check: there are no numbers to compare."""


class ConfigOnly(DistillationModel):
    """Learn from every label position: which of them count is in the data, and the most is what must fit."""

    def active_positions(self, counted: Tensor) -> Tensor:
        return torch.arange(counted.shape[1], device=counted.device)

    def forward_target(self, text: PackedBatch) -> tuple[Tensor, Tensor]:
        width = self.target.hidden_size
        aux_hidden_states = self.target.forward(
            text.tokens, layers=[*self.head.layers, self.target.num_layers], keep_logits=1
        ).aux_hidden_states
        return aux_hidden_states[..., :-width], aux_hidden_states[..., -width:]


class ConfigOnlyBlocks(ConfigOnly, BlockDistillation):
    """Do the same for heads that draft in blocks."""


class Head(NamedTuple):
    """Hold the needs of one step of one process, all but `flops` in bytes."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    flops: int
    layers: list[int]  # that the head takes


class Body(NamedTuple):
    """Hold the needs of the target."""

    weights: float  # bytes, without its ends
    ends: float  # bytes of embedding and lm_head
    working: float  # bytes, while it runs over a batch
    flops: float  # per batch
    parameters: int
    active: float  # parameters that one token uses, without embeddings and lm_head


def study(cfg: DictConfig, config: PretrainedConfig, dtype: torch.dtype) -> tuple[Head, Body, Target]:
    """Count head, target and the target itself, which has no numbers. cfg: as conf/plan.yaml describes it."""
    # Fake tensors cannot be moved, and have nowhere to go.
    no_device_moves = patch.object(nn.Module, "to", lambda self, *args, **kwargs: self)
    with (
        FakeTensorMode(),
        no_init_weights(),
        no_device_moves,
        # Neither can be read from a batch without numbers: every block sees the whole row.
        patch(
            "foredraft.heads.block_attention.text_ends",
            lambda last, size, length: [length for _ in last.split(size, 1)],
        ),
        patch("foredraft.heads.step_attention.by_document", lambda q: False),
    ):
        model = model_class(config).from_config(config, dtype=dtype)
        model.tie_weights()  # which it leaves where no weights are initialized
        target = ConfigOnlyTarget(model, name=cfg.target.path)
        return study_head(cfg, target), study_target(cfg, target), target


def study_head(cfg: DictConfig, target: Target) -> Head:
    """Build the head, learn from one batch, step. Under FakeTensorMode."""
    more = {"counts": torch.ones(target.vocab_size, dtype=torch.int64)} if "draft_vocab_size" in cfg.head else {}
    head = instantiate(cfg.head, target=target, **more)
    made = ConfigOnlyBlocks if isinstance(head, BlockHead) else ConfigOnly
    distillation = made(head, target, kl_div)
    distillation.chunk = rows_at_a_time(target.vocab_size, "cuda")
    parameters = [p for p in distillation.parameters() if p.requires_grad]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)  # counted apart from activations
    shape = cfg.trainer.per_device_train_batch_size, cfg.max_length
    positions = torch.arange(cfg.max_length).expand(shape)
    text = PackedBatch(
        torch.zeros(shape, dtype=torch.int64), torch.ones(shape).bool(), torch.zeros(shape).long(), positions
    )
    text = text._replace(anchors=distillation.choose_anchors(text, 0))
    before = [
        *distillation.parameters(),
        *distillation.buffers(),
        *target.model.parameters(),
        *target.model.buffers(),
        *text[:4],
    ]
    before += [parameter.grad for parameter in parameters if parameter.grad is not None]
    flops, live = FlopCounterMode(display=False), LiveBytes(before)
    for counter in (flops, live):  # one at a time: what counts products holds on to tensors
        with counter:
            with torch.autocast("cpu", torch.bfloat16, enabled=cfg.trainer.bf16):
                loss = distillation(*text).loss
            loss.backward()
    optimizer = OPTIMIZERS[cfg.trainer.optim](distillation, head.vocabulary_parameters, 1e-4, (0.9, 0.95))
    optimizer.step()
    state = sum(t.nbytes for entry in optimizer.state.values() for t in entry.values() if isinstance(t, Tensor))
    held = sum(tensor.nbytes for tensor in [*head.parameters(), *head.buffers()])
    gradients = sum(parameter.nbytes for parameter in parameters)
    return Head(held, gradients, state, live.peak, flops.get_total_flops(), head.layers)


def study_target(cfg: DictConfig, target: Target) -> Body:
    """Count by arithmetic on the config; working memory is that of one layer, since no gradient state is kept."""
    model = target.model
    ends = {id(p) for m in (model.get_input_embeddings(), model.get_output_embeddings()) for p in m.parameters()}
    body = {name: p.numel() for name, p in model.named_parameters() if id(p) not in ends}
    edge = sum(p.numel() for p in model.parameters() if id(p) in ends)
    facts = settings_of(target.config)
    used, experts = (next((facts[name] for name in names if facts.get(name)), 1) for names in EXPERTS)
    share = used / experts
    mixed = sum(count for name, count in body.items() if ".experts." in name)
    dense = sum(body.values()) - mixed
    size = target.dtype.itemsize
    bits = BITS[cfg.target.quantization] if cfg.target.quantization else 8.0 * size
    packed = mixed if cfg.target.quantization == "mxfp4" else mixed + dense
    weights = packed * bits / 8 + (mixed + dense - packed) * size
    tokens = cfg.trainer.per_device_train_batch_size * cfg.max_length
    shape = shape_of(target)
    heads = shape["num_attention_heads"]
    head_dim = shape.get("head_dim") or target.hidden_size // heads
    active = dense + mixed * share
    attention = 2 * cfg.max_length * heads * head_dim * target.num_layers  # causal: half of 4
    # One layer at its widest (the two halves of the MLP and their product), the residual stream, eager attention's scores.
    wide = 3 * shape["intermediate_size"] * used
    eager = model.config._attn_implementation == "eager"
    scores = eager * heads * cfg.max_length**2 * (4 + size)
    working = tokens * (wide + 4 * target.hidden_size) * size + scores
    return Body(weights, edge * size, working, tokens * (2 * active + attention), sum(body.values()) + edge, active)
