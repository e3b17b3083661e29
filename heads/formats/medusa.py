"""Medusa-1 as FasterDecoding and TGI lay it out, in both versions, and as vLLM did up to 0.32."""

import re
from typing import Any, Self

import torch
from torch import Tensor

from foredraft.heads.base import DraftHead
from foredraft.heads.formats.base import Format, HeadFiles, check_settings
from foredraft.heads.medusa import MedusaHead
from foredraft.heads.target import Target
from foredraft.heads.target.sharding import full_tensor


def medusa_config(
    files: HeadFiles, target: Target, depth: int, blocks: int, pruned: int | None = None
) -> dict[str, Any]:
    """A Medusa config of ours. Sizes are the target's: the published configs name none."""
    sizes = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size, "layers": [target.num_layers]}
    own = sizes | files.config.get("foredraft", {})
    if own["layers"] != sizes["layers"]:
        raise files.error(
            f"it reads hidden states {own['layers']}, a Medusa head the target's last, {target.num_layers}"
        )
    return {
        "base_model_name_or_path": files.config.get("base_model_name_or_path", target.name),
        "medusa_num_heads": depth,
        "medusa_num_layers": blocks,
        "foredraft": own | ({} if pruned is None else {"draft_vocab_size": pruned}),
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
        rows = full_tensor(target.model.get_output_embeddings().weight)
        if not rows.is_floating_point():
            raise files.error(f"version 2 shares the lm_head of {target.name}, which is quantized: load it unquantized")
        return files.weights | dict.fromkeys(names, rows.detach().cpu())

    def export_config(self, head: DraftHead, target: Target) -> dict[str, Any]:
        return head.to_config() | {"base_model_name_or_path": target.name}


class VllmMedusaFormat(Format):
    """`blocks.{i}.layers.{j}.{weight,bias}` and `lm_heads.{i}.weight`; a pruned vocabulary is `token_map`, of target ids."""

    title = "Medusa-1 as vLLM read it up to 0.32"
    kind = MedusaHead

    @classmethod
    def match(cls, files: HeadFiles) -> Self | None:
        return cls() if files.config.get("model_type") == "medusa" else None

    def disk_name(self, name: str) -> str:
        if name in ("d2t", "t2d"):
            return name
        block = re.fullmatch(r"(\d+)\.(\d+)\.linear\.(\w+)", name)
        if block:
            return f"blocks.{block[1]}.layers.{block[2]}.{block[3]}"
        return f"lm_heads.{name.split('.')[0]}.weight"

    def head_config(self, files: HeadFiles, target: Target) -> dict[str, Any]:
        config, stored = files.config, count_heads(files, r"blocks\.(\d+)\.")
        if stored != config["num_heads"]:
            raise files.error(f"config.json says num_heads={config['num_heads']}, the weights are of {stored}")
        for name, ours in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
            if config[name] != ours:
                raise files.error(f"{name}: the head says {config[name]}, the target {target.name} has {ours}")
        check_settings(files, config, {"original_lm_head": False})
        rows = config.get("truncated_vocab_size") or target.vocab_size
        return medusa_config(files, target, stored, files.count("num_hidden_layers"), pruned=rows)

    def complete_weights(self, files: HeadFiles, head: DraftHead, target: Target) -> dict[str, Tensor]:
        weights = dict(files.weights)
        if head.pruned:
            if "token_map" not in weights:
                raise files.error("token_map is missing, which a truncated_vocab_size needs")
            ids = weights.pop("token_map").long()
            weights["d2t"] = ids - torch.arange(len(ids))
        if files.config.get("medusa_fc_bias"):
            return weights
        names = [self.disk_name(name) for name in head.state_dict() if name.endswith(".linear.bias")]
        stored = next((name for name in names if name in files.weights), None)
        if stored is not None:
            raise files.error(f"config.json says no medusa_fc_bias, and {stored} is stored")
        dtype = next(iter(files.weights.values())).dtype
        return weights | {name: torch.zeros(target.hidden_size, dtype=dtype) for name in names}

    def export_config(self, head: DraftHead, target: Target) -> dict[str, Any]:
        assert isinstance(head, MedusaHead)
        return {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": head.hidden,
            "num_heads": head.depth,
            "num_hidden_layers": head.blocks,
            "vocab_size": head.vocab,
            "truncated_vocab_size": head.vocab if head.draft_ids is None else len(head.draft_ids),
            "medusa_fc_bias": True,
        }

    def export_weights(self, head: DraftHead, target: Target) -> dict[str, Tensor]:
        weights = super().export_weights(head, target)
        ids = head.draft_ids
        if ids is None:
            return weights
        return {name: t for name, t in weights.items() if name not in ("d2t", "t2d")} | {"token_map": ids.cpu()}
