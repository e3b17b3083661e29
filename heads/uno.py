"""UNO: the target drafts for itself, by a LoRA that acts on rows of noise alone (arXiv:2609.04010).

After the text stand the bonus token and random tokens of the vocabulary. Each row gives the token after its own: the bonus
token's, which knows no LoRA, what the target itself writes next, and the rows of noise, with the LoRA, drafts after that.

    rows     t t t t | b n n n      b the bonus token, n noise; a row sees the text, b, and the noise before it
    depth              1 2 3 4      of its draft, and depth 1 is no guess

To draft is a forward of the target, so a step takes two of them. Nothing of a block stays: the verification writes over its
keys. In training the text knows no LoRA either. It is the teacher, and its keys are those that all blocks of a row see.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.pytorch_utils import Conv1D

from foredraft.heads.base import BlockHead, PackedBatch
from foredraft.heads.block_attention import Blocks, part_seen, within
from foredraft.heads.packing import PackedLinear
from foredraft.heads.target import Target
from foredraft.heads.target.compiled import paused

QUERIES = 1024  # rows of noise in one forward of training


class Factor(nn.Linear):
    """A type of its own, so that it is not packed (heads/packing.py): a head of packed weights alone has no dtype."""


class NoiseLora(nn.Module):
    """What is added to a linear layer's output, named as in peft."""

    def __init__(self, inputs: int, outputs: int, rank: int):
        super().__init__()
        self.lora_A, self.lora_B = Factor(inputs, rank, bias=False), Factor(rank, outputs, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.lora_B(self.lora_A(x.to(self.lora_A.weight)))


class UnoHead(BlockHead):
    kind, forwards, block_entries, depth_key = "uno", 2, 0, "depth"
    format = "a LoRA adapter as peft and SGLang read it"
    target: Target

    def __init__(self, linears: dict[str, tuple[int, int]], depth: int, rank: int, alpha: float):
        """linears: inputs and outputs of the target's linear layers that get a LoRA, by name."""
        super().__init__()
        self.depth, self.rank, self.alpha, self.layers = depth, rank, alpha, []
        # Keys of a ModuleDict have no dots.
        self.loras = nn.ModuleDict({k.replace(".", "/"): NoiseLora(*sizes, rank) for k, sizes in linears.items()})

    @classmethod
    def for_target(cls, target: Target, depth: int = 8, lora_r: int = 32, lora_alpha: float = 512.0) -> "UnoHead":
        """A new LoRA, without effect before training. depth: rows of a block, the bonus token's counted. lora_alpha: the LoRA
        counts lora_alpha / lora_r times."""
        if depth < 2 or lora_r < 1:
            raise ValueError(f"head.depth={depth} must be at least 2, head.lora_r={lora_r} at least 1")
        head = cls(linear_layers(target), depth, lora_r, lora_alpha)
        head.attach(target)
        return head.to(target.device)

    def attach(self, target: Target) -> None:
        check_target(target)
        self.target, self.width = target, target.hidden_size

    @classmethod
    def from_config(cls, config: dict) -> "UnoHead":
        return cls(config["linears"], config["depth"], config["rank"], config["alpha"])

    def to_config(self) -> dict[str, Any]:
        return {"architectures": ["UnoAdapter"], "depth": self.depth}

    def base_logits(self, hidden: Tensor) -> Tensor:
        return self.target.logits(hidden)

    @contextmanager
    def acting_from(self, first: int) -> Iterator[None]:
        """Inside, forwards of the target have the LoRA in their rows from `first` on."""

        def hook(lora: nn.Module) -> Any:
            def add(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
                noise = output[:, first:]
                noise = noise + (self.alpha / self.rank * lora(inputs[0][:, first:])).to(noise)
                return torch.cat([output[:, :first], noise], dim=1) if first else noise

            return add

        with ExitStack() as hooks:
            hooks.enter_context(paused(self.target.model))
            for key, lora in self.loras.items():
                layer = self.target.model.get_submodule(as_name(key))
                hooks.callback(layer.register_forward_hook(hook(lora)).remove)
            yield

    def noise(self, bonus: Tensor, positions: Tensor, count: int) -> Tensor:
        """(..., count) int64: the random tokens after these bonus tokens (...) at these positions (...). A hash of both, so
        that training and drafting have the same noise, and a text is drafted for as it was before."""
        x = (bonus * 0x9E3779B1 + positions * 0x85EBCA6B)[..., None] + torch.arange(count, device=bonus.device)
        for factor in (0x45D9F3B, 0x119DE1F3):
            x = ((x ^ (x >> 16)) * factor) & 0xFFFFFFFF
        return (x ^ (x >> 16)) % self.target.vocab_size

    def draft_blocks(self, aux_hidden_states: Tensor, embeddings: Tensor, text: PackedBatch) -> Tensor:
        return self.read(text)[1]

    def read(self, text: PackedBatch) -> tuple[Tensor, Tensor]:
        """The target's last hidden states of a text (batch, length, hidden), and those of the blocks that stand behind the
        bonus tokens of text.anchors, or everywhere, (batch, n, depth, hidden)."""
        target, (batch, length) = self.target, text.tokens.shape
        blocks = Blocks.of(text, self.depth - 1)
        begun = blocks.last.clamp(min=0)
        bonus = torch.where(blocks.last < 0, -1, (begun + 1).clamp(max=length - 1))
        place = bonus.clamp(min=0)
        positions = text.positions.gather(1, begun) + 1
        noise = self.noise(text.tokens.gather(1, place), positions, self.depth - 1)
        ahead = positions[..., None] + torch.arange(1, self.depth, device=positions.device)
        if target.context is not None:
            ahead = ahead.clamp(max=target.context - 1)
        inside, cache = within(self.depth - 1, True, None, noise.device), DynamicCache()
        asked: dict[str, Any] = {"layers": [target.num_layers], "keep_logits": 1}
        states = []
        with torch.autocast(text.tokens.device.type, enabled=False):  # as train/features/online.py
            with torch.no_grad():
                of_text = {"mask": text.mask(), "cache": cache, "key_positions": text.positions}
                last = target.forward(text.tokens, text.positions, **of_text, **asked).aux_hidden_states
            size = max(1, QUERIES // (batch * (self.depth - 1)))
            for start in range(0, bonus.shape[1], size):
                part = slice(start, start + size)
                seen = part_seen(blocks.first[:, part], bonus[:, part], inside, length, None)
                where = ahead[:, part].flatten(1)
                of_part = {
                    "mask": seen,
                    "cache": DynamicCache([(layer.keys, layer.values) for layer in cache.layers]),
                    "key_positions": torch.cat([text.positions, where], dim=1),
                }
                with self.acting_from(0):
                    out = target.forward(noise[:, part].flatten(1), where, **of_part, **asked)
                states.append(out.aux_hidden_states.unflatten(1, (-1, self.depth - 1)))
        first = last.gather(1, place[..., None].expand(-1, -1, last.shape[-1]))
        return last, torch.cat([first[:, :, None], torch.cat(states, dim=1)], dim=2)

    def draft_extend(self, aux_hidden_states: Tensor, embeddings: Tensor, cache: Any) -> Tensor:
        """Nothing is kept of the text but in the target's own cache."""
        return embeddings

    def draft_block(self, last: Tensor, cache: Any, rows: int | None = None) -> Tensor:
        """last: (batch, 1) int64, the bonus tokens. cache: the target's own. rows: of the block; None is all of them."""
        rows, target = rows or self.depth, self.target
        tokens = torch.cat([last, self.noise(last, cache.seq_lens, rows - 1)[:, 0]], dim=1)
        positions = cache.seq_lens + torch.arange(rows, device=last.device)
        mask = cache.mask(within(rows, True, None, last.device).expand(len(last), -1, -1))
        with self.acting_from(1):
            return target.forward_tree(tokens, positions, mask, cache, [target.num_layers], 1).aux_hidden_states


def as_name(key: str) -> str:
    return key.replace("/", ".")


def check_target(target: Target) -> None:
    """Raise ValueError for a target whose layers are not here, or whose rows cannot be told apart."""
    if target.ends_only:
        raise ValueError(
            "head=uno trains a LoRA in the target's layers, which stored features leave out: take features=online"
        )
    if target.is_collective:
        raise ValueError(
            f"head=uno needs whole layers, and sharding={target.sharding} splits them: choose sharding=layers"
        )
    if not target.supports_trees:
        raise ValueError(f"head=uno drafts beside the target's text, and {target.why_no_trees}: choose another head")


def widths(layer: nn.Module) -> tuple[int, int] | None:
    """Return the inputs and outputs of a linear layer; None for any other module."""
    if isinstance(layer, Conv1D):  # GPT-2's, whose weight is transposed
        return layer.nx, layer.nf
    return (layer.in_features, layer.out_features) if isinstance(layer, nn.Linear | PackedLinear) else None


def linear_layers(target: Target) -> dict[str, tuple[int, int]]:
    """Inputs and outputs, by name, of the linear layers through which a text passes row by row, but for the lm_head. Experts
    that see some rows are none of them. Raises ValueError where there is none."""
    check_target(target)
    head, found, shape = target.model.get_output_embeddings(), dict[str, tuple[int, int]](), (2, 3)

    def note(name: str, sizes: tuple[int, int]) -> Any:
        def hook(layer: Any, inputs: tuple[Any, ...], output: Any) -> None:
            if inputs and isinstance(inputs[0], Tensor) and inputs[0].shape == (*shape, sizes[0]):
                found[name] = sizes

        return hook

    with ExitStack() as hooks, torch.no_grad(), paused(target.model):
        for name, layer in target.model.named_modules():
            if layer is not head and (sizes := widths(layer)) is not None:
                hooks.callback(layer.register_forward_hook(note(name, sizes)).remove)
        target.model(input_ids=torch.zeros(shape, dtype=torch.int64, device=target.device), use_cache=False)
    if not found:
        raise ValueError(
            f"head=uno adds to linear layers, and model_type {target.config.model_type} has none: choose another head"
        )
    return found
