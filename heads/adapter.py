"""A LoRA adapter on the target (peft): the one thing that changes what a target says, and only Medusa-2 asks for it.

The adapter lies in the target's own layers, so plain decoding, drafts and features are all those of the adapted target.
Files: `adapter_config.json` and `adapter_model.safetensors` beside the head's, as peft reads them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from heads.target import Target

CONFIG = "adapter_config.json"


def add(target: Target, rank: int, alpha: int) -> None:
    """Put a new adapter, at first without effect, on every linear layer but the lm_head. Its weights are float32.

    Raises ValueError for a target in pieces."""
    from peft import LoraConfig

    if target.reads_collectively:
        raise ValueError(
            f"an adapter is put on whole layers, and sharding={target.sharding} cuts them: choose sharding=layers"
        )
    target.model.add_adapter(LoraConfig(r=rank, lora_alpha=alpha, target_modules="all-linear", task_type="CAUSAL_LM"))
    for layer in layers(target):
        layer.weight = nn.Parameter(layer.get_parameter("weight").float())


def layers(target: Target) -> nn.ModuleList:
    """The adapter's own linear layers, none where the target has no adapter."""
    found = [
        module for name, module in target.model.named_modules() if name.endswith((".lora_A.default", ".lora_B.default"))
    ]
    return nn.ModuleList(found)


def adapted(target: Target) -> list[Any]:
    """The target's layers that have an adapter beside them (peft's BaseTunerLayer), none where it has no adapter."""
    if not layers(target):
        return []
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [module for module in target.model.modules() if isinstance(module, BaseTunerLayer)]


def merge(target: Target) -> None:
    """Add the adapter to the weights beside it: but for rounding the same text, without the adapter's products in every
    step. For decoding; 4- and 8-bit weights would lose too much, and stay as they are."""
    for layer in adapted(target):
        if target.quantization is None and not layer.merged:
            layer.merge()


@contextmanager
def without(target: Target) -> Iterator[None]:
    """The target as it was."""
    target.model.disable_adapters()
    try:
        yield
    finally:
        target.model.enable_adapters()  # and its weights may learn again


def save(target: Target, directory: Path) -> None:
    target.model.save_pretrained(directory)  # with an adapter in it, transformers saves that alone


def load(target: Target, directory: Path) -> None:
    """Put the adapter of these files on the target, in the place of the one it may have."""
    for layer in adapted(target):
        if layer.merged:  # the next one is not to be added to it
            layer.unmerge()
    with torch.no_grad():
        target.model.load_adapter(str(directory), adapter_name="default", hotswap=len(layers(target)) > 0)
