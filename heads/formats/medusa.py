"""Medusa-1 in FasterDecoding's and TGI's layout, in both versions."""

import re
from typing import Any, Self

from torch import Tensor

from foredraft.heads.base import DraftHead
from foredraft.heads.formats.base import Format, HeadFiles, check_settings, shared_rows
from foredraft.heads.medusa import MedusaHead
from foredraft.heads.target_model import Target


class MedusaFormat(Format):
    """Convert `{i}.{j}.linear.{weight,bias}` and, in version 1, each head's own projection `{i}.{blocks}.weight`."""

    title = "Medusa-1 as FasterDecoding and TGI read it"
    kind, is_default = MedusaHead, True
    # TGI requires the first, FasterDecoding the second.
    weight_files = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")

    @classmethod
    def match(cls, files: HeadFiles) -> Self | None:
        return cls() if "medusa_num_heads" in files.config else None

    def head_config(self, files: HeadFiles, target: Target) -> dict[str, Any]:
        numbers = {int(match[1]) for key in files.weights if (match := re.match(r"(\d+)\.", key))}
        stored = next(i for i in range(len(numbers) + 1) if i not in numbers)  # those from 0 without a gap
        declared = files.config["medusa_num_heads"]
        # Published configs have 2 with 5 stored heads (medusa-vicuna-7b-v1.3); fewer than declared is a broken file.
        if stored < declared or (files.trained_here and stored != declared):
            raise files.error(f"config.json has medusa_num_heads={declared}, but the weights are of {stored} heads")
        if stored != declared:
            files.notes.append(f"config.json has medusa_num_heads={declared}, but the weights are of {stored} heads")
        check_settings(files, files.config, {"version": "2", "quantization_config": None})
        sizes = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size}  # which published configs omit
        return {
            "medusa_num_heads": stored,
            "medusa_num_layers": files.check_count("medusa_num_layers", files.config["medusa_num_layers"]),
            "foredraft": sizes | files.config.get("foredraft", {}),
        }

    def complete_weights(self, files: HeadFiles, head: DraftHead, target: Target) -> dict[str, Tensor]:
        if files.config.get("version") is None:
            return files.weights
        assert isinstance(head, MedusaHead)
        names = [f"{i}.{head.blocks}.weight" for i in range(head.depth)]
        if stored := [name for name in names if name in files.weights]:
            raise files.error(
                f"config.json has version 2, which shares the target's lm_head, but {stored[0]} is stored"
            )
        return files.weights | dict.fromkeys(names, shared_rows(files, target))

    def export_config(self, head: DraftHead, target: Target) -> dict[str, Any]:
        return {"base_model_name_or_path": target.checkpoint} | head.to_config()
