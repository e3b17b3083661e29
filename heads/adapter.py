"""A LoRA adapter on the target (peft): the one thing that changes what a target says, used by Medusa-2 only.

The adapter is part of the target's layers, so plain decoding, drafts and aux hidden states are all those of the adapted
target. Files: `adapter_config.json` and `adapter_model.safetensors` beside the head's, as peft reads them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from foredraft.heads import packing
from foredraft.heads.target import Target

CONFIG = "adapter_config.json"


def add(target: Target, rank: int, alpha: int) -> None:
    """Add a new adapter, without effect before training, to every linear layer but the lm_head. Its weights are float32.

    Raises ValueError for a target whose layers are sharded."""
    from peft import LoraConfig

    if target.is_collective:
        raise ValueError(
            f"an adapter needs whole layers, and sharding={target.sharding} splits them: choose sharding=layers"
        )
    packing.unpack(target.model)
    target.model.add_adapter(LoraConfig(r=rank, lora_alpha=alpha, target_modules="all-linear", task_type="CAUSAL_LM"))
    for layer in lora_layers(target):
        layer.weight = nn.Parameter(layer.get_parameter("weight").float())


def lora_layers(target: Target) -> nn.ModuleList:
    """The adapter's own linear layers; empty where the target has no adapter."""
    layers = [
        module for name, module in target.model.named_modules() if name.endswith((".lora_A.default", ".lora_B.default"))
    ]
    return nn.ModuleList(layers)


def tuned_layers(target: Target) -> list[Any]:
    """The target's layers that carry an adapter (peft's BaseTunerLayer); empty without one."""
    if not lora_layers(target):
        return []
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [module for module in target.model.modules() if isinstance(module, BaseTunerLayer)]


def merge(target: Target) -> None:
    """Merge the adapter into the weights, for decoding: the same text but for rounding, without the adapter's products in
    every step. 4- and 8-bit weights would lose too much and stay as they are."""
    for layer in tuned_layers(target):
        if target.quantization is None and not layer.merged:
            layer.merge()


@contextmanager
def disabled(target: Target) -> Iterator[None]:
    """The target without its adapter."""
    target.model.disable_adapters()
    try:
        yield
    finally:
        target.model.enable_adapters()  # this also makes its weights trainable again


def save(target: Target, directory: Path) -> None:
    target.model.save_pretrained(directory)  # with an adapter in it, transformers saves that alone


def load(target: Target, directory: Path) -> None:
    """Load the adapter in `directory` onto the target, replacing the one that it may have."""
    for layer in tuned_layers(target):
        if layer.merged:  # the new one must not be added on top of it
            layer.unmerge()
    packing.unpack(target.model)
    with torch.no_grad():
        target.model.load_adapter(str(directory), adapter_name="default", hotswap=len(lora_layers(target)) > 0)
