"""Medusa-1 as FasterDecoding and TGI lay it out, in both versions, and as vLLM did up to 0.32."""

import re
from typing import Any, Self

import torch
from torch import Tensor

from heads.base import DraftHead
from heads.formats.base import Format, HeadFiles, expect
from heads.medusa import MedusaHead
from heads.target import Target
from heads.target.sharding import full_tensor


def own_settings(
    found: HeadFiles, target: Target, depth: int, blocks: int, pruned: int | None = None
) -> dict[str, Any]:
    """A Medusa config of ours. Sizes are the target's: the published configs name none."""
    sizes = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size, "layers": [target.num_layers]}
    own = sizes | found.config.get("foredraft", {})
    if own["layers"] != sizes["layers"]:
        raise found.wrong(
            f"it reads hidden states {own['layers']}, a Medusa head the target's last, {target.num_layers}"
        )
    return {
        "base_model_name_or_path": found.config.get("base_model_name_or_path", target.name),
        "medusa_num_heads": depth,
        "medusa_num_layers": blocks,
        "foredraft": own | ({} if pruned is None else {"draft_vocab_size": pruned}),
    }


def stored(keys: Any, pattern: str) -> int:
    """How many heads the keys number, from 0 to the highest."""
    numbers = [int(match[1]) for key in keys if (match := re.match(pattern, key))]
    return max(numbers, default=-1) + 1


class MedusaFormat(Format):
    """`{i}.{j}.linear.{weight,bias}` and, in version 1, each head's own projection `{i}.{blocks}.weight`."""

    title = "Medusa-1 as FasterDecoding and TGI read it"
    kind, own = MedusaHead, True
    files = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")  # TGI insists on the one, FasterDecoding on the other

    @classmethod
    def match(cls, found: HeadFiles) -> Self | None:
        return cls() if MedusaHead.describes(found.config) else None

    def native_config(self, found: HeadFiles, target: Target) -> dict[str, Any]:
        said, there = found.config["medusa_num_heads"], stored(found.weights, r"(\d+)\.")
        # Published configs say 2 where 5 are stored (medusa-vicuna-7b-v1.3); fewer than said is a broken file.
        if there < said or ("foredraft" in found.config and there != said):
            raise found.wrong(f"config.json says medusa_num_heads={said}, the weights are of {there}")
        expect(found, found.config, {"version": "2", "quantization_config": None})
        return own_settings(found, target, there, found.config["medusa_num_layers"])

    def supply(self, found: HeadFiles, head: DraftHead, target: Target) -> dict[str, Tensor]:
        if found.config.get("version") is None:
            return found.weights
        assert isinstance(head, MedusaHead)
        names = [f"{i}.{head.blocks}.weight" for i in range(head.depth)]
        own = [name for name in names if name in found.weights]
        if own:
            raise found.wrong(
                f"config.json says version 2, whose heads share the target's lm_head, but {own[0]} is stored"
            )
        rows = full_tensor(target.model.get_output_embeddings().weight)
        if not rows.is_floating_point():
            raise found.wrong(f"version 2 shares the lm_head of {target.name}, which is quantized: load it unquantized")
        return found.weights | dict.fromkeys(names, rows.detach().cpu())

    def config_of(self, head: DraftHead, target: Target) -> dict[str, Any]:
        return head.to_config() | {"base_model_name_or_path": target.name}


class VllmMedusaFormat(Format):
    """`blocks.{i}.layers.{j}.{weight,bias}` and `lm_heads.{i}.weight`; a pruned vocabulary is `token_map`, of target ids."""

    title = "Medusa-1 as vLLM read it up to 0.32"
    kind = MedusaHead

    @classmethod
    def match(cls, found: HeadFiles) -> Self | None:
        return cls() if found.config.get("model_type") == "medusa" else None

    def key(self, own: str) -> str:
        if own in ("d2t", "t2d"):
            return own
        block = re.fullmatch(r"(\d+)\.(\d+)\.linear\.(\w+)", own)
        if block:
            return f"blocks.{block[1]}.layers.{block[2]}.{block[3]}"
        return f"lm_heads.{own.split('.')[0]}.weight"

    def native_config(self, found: HeadFiles, target: Target) -> dict[str, Any]:
        config, there = found.config, stored(found.weights, r"blocks\.(\d+)\.")
        if there != config["num_heads"]:
            raise found.wrong(f"config.json says num_heads={config['num_heads']}, the weights are of {there}")
        for name, ours in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
            if config[name] != ours:
                raise found.wrong(f"{name}: the head says {config[name]}, the target {target.name} has {ours}")
        expect(found, config, {"original_lm_head": False})
        rows = config.get("truncated_vocab_size") or target.vocab_size
        return own_settings(found, target, there, config["num_hidden_layers"], pruned=rows)

    def supply(self, found: HeadFiles, head: DraftHead, target: Target) -> dict[str, Tensor]:
        given = dict(found.weights)
        if head.pruned:
            if "token_map" not in given:
                raise found.wrong("token_map is missing, which a truncated_vocab_size needs")
            ids = given.pop("token_map").long()
            given["d2t"] = ids - torch.arange(len(ids))
        if found.config.get("medusa_fc_bias"):
            return given
        names = [self.key(own) for own in head.state_dict() if own.endswith(".linear.bias")]
        said = next((name for name in names if name in found.weights), None)
        if said is not None:
            raise found.wrong(f"config.json says no medusa_fc_bias, and {said} is stored")
        dtype = next(iter(found.weights.values())).dtype
        return given | {name: torch.zeros(target.hidden_size, dtype=dtype) for name in names}

    def config_of(self, head: DraftHead, target: Target) -> dict[str, Any]:
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

    def weights_of(self, head: DraftHead, target: Target) -> dict[str, Tensor]:
        weights = super().weights_of(head, target)
        ids = head.draft_ids
        if ids is None:
            return weights
        return {name: t for name, t in weights.items() if name not in ("d2t", "t2d")} | {"token_map": ids.cpu()}
