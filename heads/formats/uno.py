"""UNO's LoRA as peft and SGLang read it: an adapter, and nothing else that they need. Where config.json lies beside it, it
says how deep the adapter was trained to draft."""

import json
from pathlib import Path
from typing import Any, ClassVar, Self

from torch import Tensor

from foredraft.heads.base import DraftHead
from foredraft.heads.formats.base import Format, HeadFiles, check_settings
from foredraft.heads.formats.files import ADAPTER, ADAPTER_CONFIG, read_json
from foredraft.heads.target import Target
from foredraft.heads.uno import UnoHead, as_name, linear_layers

PREFIX, SUFFIX = "base_model.model.", ".lora_A.weight"
# What peft's LoRA may be beside a pair of matrices for each layer.
PLAIN: dict[str, Any] = {"peft_type": "LORA", "bias": "none", "use_rslora": False, "use_dora": False}
PLAIN |= {"rank_pattern": {}, "alpha_pattern": {}, "modules_to_save": None, "layer_replication": None}


class UnoFormat(Format):
    """`base_model.model.<the target's layer>.lora_{A,B}.weight`."""

    title = "UNO's adapter as peft and SGLang read it"
    kind, is_default = UnoHead, True
    weight_files: ClassVar[tuple[str, ...]] = (ADAPTER,)
    own_file = ADAPTER

    @classmethod
    def match(cls, files: HeadFiles) -> Self | None:
        """An adapter beside a head (Medusa-2's) is in a file of its own."""
        return cls() if files.weights and all(name.startswith(PREFIX) for name in files.weights) else None

    def head_config(self, files: HeadFiles, target: Target) -> dict[str, Any]:
        path = files.directory / ADAPTER_CONFIG
        settings = read_json(path) if path.is_file() else None
        if not isinstance(settings, dict):
            raise files.error(f"its weights are of an adapter, and {ADAPTER_CONFIG} holds no settings")
        check_settings(files, settings, PLAIN)
        rank, alpha = settings["r"], settings["lora_alpha"]
        if type(rank) is not int or rank < 1 or not isinstance(alpha, int | float):
            raise files.error(f"{ADAPTER_CONFIG} says r={rank!r} and lora_alpha={alpha!r}, which are two numbers")
        known = linear_layers(target)
        names = [name.removeprefix(PREFIX).removesuffix(SUFFIX) for name in files.weights if name.endswith(SUFFIX)]
        linears = {name: known[name] for name in names if name in known}  # others are left over, which is an error
        depth = files.check_depth("depth", files.config.get("depth", 8))
        return {"linears": linears, "rank": rank, "alpha": alpha, "depth": depth}

    def disk_name(self, name: str) -> str:
        return PREFIX + as_name(name.removeprefix("loras."))

    def write_weights(self, weights: dict[str, Tensor], path: Path, head: DraftHead, target: Target) -> None:
        assert isinstance(head, UnoHead)
        super().write_weights(weights, path, head, target)
        modules = sorted({as_name(key).rpartition(".")[2] for key in head.loras})
        settings = {"r": head.rank, "lora_alpha": head.alpha, "target_modules": modules, "lora_dropout": 0.0}
        settings |= {"base_model_name_or_path": target.name, "task_type": "CAUSAL_LM", "inference_mode": True}
        text = json.dumps({name: PLAIN[name] for name in ("peft_type", "bias")} | settings, indent=2)
        (path.parent / ADAPTER_CONFIG).write_text(f"{text}\n")
