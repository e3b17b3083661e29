"""A LoRA adapter on the target (peft). Only Medusa-2 uses it, and only it changes the target's text.

The adapter is part of the target's layers, so the AR baseline, drafts and aux hidden states are all those of the adapted
target. Files: `adapter_config.json` and `adapter_model.safetensors` next to the head's, as peft reads them.
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
    """Add a new adapter to every linear layer but the lm_head. It has no effect before training, and its weights are
    float32. Raises ValueError for a target with sharded layers."""
    from peft import LoraConfig

    if target.is_collective:
        raise ValueError(
            f"an adapter needs unsharded layers, and sharding={target.sharding} splits them: use sharding=layers"
        )
    packing.unpack(target.model)
    target.model.add_adapter(LoraConfig(r=rank, lora_alpha=alpha, target_modules="all-linear", task_type="CAUSAL_LM"))
    for layer in lora_layers(target):
        layer.weight = nn.Parameter(layer.get_parameter("weight").float())


def lora_layers(target: Target) -> nn.ModuleList:
    """Return the adapter's own linear layers; empty if the target has no adapter."""
    layers = [
        module for name, module in target.model.named_modules() if name.endswith((".lora_A.default", ".lora_B.default"))
    ]
    return nn.ModuleList(layers)


def tuned_layers(target: Target) -> list[Any]:
    """Return the target's layers with an adapter (peft's BaseTunerLayer); empty without one."""
    if not lora_layers(target):
        return []
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [module for module in target.model.modules() if isinstance(module, BaseTunerLayer)]


def merge(target: Target) -> None:
    """Merge the adapter into the weights for decoding. The text is the same up to rounding, without the adapter's products
    in every step. 4- and 8-bit weights would lose too much precision and stay unmerged."""
    for layer in tuned_layers(target):
        if target.quantization is None and not layer.merged:
            layer.merge()


@contextmanager
def disabled(target: Target) -> Iterator[None]:
    """Disable the target's adapter inside this context."""
    target.model.disable_adapters()
    try:
        yield
    finally:
        target.model.enable_adapters()  # this also makes its weights trainable again


def save(target: Target, directory: Path) -> None:
    target.model.save_pretrained(directory)  # transformers saves only the adapter of a model with one


def load(target: Target, directory: Path) -> None:
    """Load the adapter in `directory` onto the target and replace the previous one."""
    for layer in tuned_layers(target):
        if layer.merged:  # the new one must not be added on top of it
            layer.unmerge()
    packing.unpack(target.model)
    with torch.no_grad():
        target.model.load_adapter(str(directory), adapter_name="default", hotswap=len(lora_layers(target)) > 0)
