"""Medusa-1 as FasterDecoding and TGI lay it out, in both versions."""

import re
from typing import Any, Self

from torch import Tensor

from foredraft.heads.base import DraftHead
from foredraft.heads.formats.base import Format, HeadFiles, check_settings
from foredraft.heads.medusa import MedusaHead
from foredraft.heads.target import Target


def medusa_config(files: HeadFiles, target: Target, depth: int, blocks: int) -> dict[str, Any]:
    """A Medusa config of ours. Sizes are the target's: the published configs name none."""
    sizes = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size, "layers": [target.num_layers]}
    own = sizes | files.config.get("foredraft", {})
    if own["layers"] != sizes["layers"]:
        raise files.error(
            f"it takes hidden states {own['layers']}, a Medusa head the target's last, {target.num_layers}"
        )
    return {
        "base_model_name_or_path": files.config.get("base_model_name_or_path", target.name),
        "medusa_num_heads": depth,
        "medusa_num_layers": blocks,
        "foredraft": own,
    }


def count_heads(files: HeadFiles, pattern: str) -> int:
    """How many heads the weights are of: those numbered from 0 without a gap."""
    numbers = {int(match[1]) for key in files.weights if (match := re.match(pattern, key))}
    return next(i for i in range(len(numbers) + 1) if i not in numbers)


class MedusaFormat(Format):
    """`{i}.{j}.linear.{weight,bias}` and, in version 1, each head's own projection `{i}.{blocks}.weight`."""

    title = "Medusa-1 as FasterDecoding and TGI read it"
    kind, is_default = MedusaHead, True
    # TGI insists on the one, FasterDecoding on the other.
    weight_files = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")

    @classmethod
    def match(cls, files: HeadFiles) -> Self | None:
        return cls() if "medusa_num_heads" in files.config else None

    def head_config(self, files: HeadFiles, target: Target) -> dict[str, Any]:
        declared, stored = files.config["medusa_num_heads"], count_heads(files, r"(\d+)\.")
        # Published configs say 2 where 5 are stored (medusa-vicuna-7b-v1.3); fewer than declared is a broken file.
        if stored < declared or (files.trained_here and stored != declared):
            raise files.error(f"config.json says medusa_num_heads={declared}, the weights are of {stored}")
        if stored != declared:
            files.notes.append(f"config.json says medusa_num_heads={declared}, the weights are of {stored}")
        check_settings(files, files.config, {"version": "2", "quantization_config": None})
        return medusa_config(files, target, stored, files.count("medusa_num_layers"))

    def complete_weights(self, files: HeadFiles, head: DraftHead, target: Target) -> dict[str, Tensor]:
        if files.config.get("version") is None:
            return files.weights
        assert isinstance(head, MedusaHead)
        names = [f"{i}.{head.blocks}.weight" for i in range(head.depth)]
        own = [name for name in names if name in files.weights]
        if own:
            raise files.error(
                f"config.json says version 2, whose heads share the target's lm_head, but {own[0]} is stored"
            )
        rows = target.lm_head_rows
        if rows is None:
            raise files.error(f"version 2 shares the lm_head of {target.name}, which is quantized: load it unquantized")
        return files.weights | dict.fromkeys(names, rows.detach().cpu())

    def export_config(self, head: DraftHead, target: Target) -> dict[str, Any]:
        return head.to_config() | {"base_model_name_or_path": target.name}
