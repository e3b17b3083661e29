"""Hydra and Hydra++ in zankner/Hydra's layout: `hydra_mlp`, `hydra_lm_head`, and `prefix_embeding_layer` (spelled so)."""

from typing import Any, Self

import torch
from torch import Tensor

from foredraft.heads import llama_config
from foredraft.heads.base import DraftHead
from foredraft.heads.formats.base import Format, HeadFiles, check_settings
from foredraft.heads.hydra import HydraHead
from foredraft.heads.target_model import Target

PREFIX = "prefix_embeding_layer."


class HydraFormat(Format):
    title = "Hydra as zankner/Hydra reads it"
    kind, is_default = HydraHead, True
    weight_files = ("hydra_lm_head.safetensors", "hydra_lm_head.pt")  # its code only reads the second

    @classmethod
    def match(cls, files: HeadFiles) -> Self | None:
        return cls() if "hydra_num_heads" in files.config else None

    def head_config(self, files: HeadFiles, target: Target) -> dict[str, Any]:
        """Return a config with the target's sizes and shape of the prefix layer, which published configs omit."""
        check_settings(files, files.config, {"quantization_config": None})
        for name in ("hydra_num_heads", "hydra_num_layers"):
            files.check_count(name, files.config[name])
        record: dict[str, Any] = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size}
        if files.config["hydra_head_arch"] == "prefix-mlp":
            record["prefix"] = llama_config.settings_like(target)
        return files.config | {"foredraft": record | files.config.get("foredraft", {})}

    def complete_weights(self, files: HeadFiles, head: DraftHead, target: Target) -> dict[str, Tensor]:
        weights = dict(files.weights)
        # A whole LlamaModel was saved: its embedding is never read, and its frequencies follow from the config.
        weights.pop(f"{PREFIX}embed_tokens.weight", None)
        frequencies = weights.pop(f"{PREFIX}layers.0.self_attn.rotary_emb.inv_freq", None)
        if frequencies is not None:
            assert isinstance(head, HydraHead)
            ours = head.prefix_embeding_layer.rotary.rope.inv_freq
            if frequencies.shape != ours.shape or not torch.allclose(frequencies.float(), ours, rtol=1e-2):
                raise files.error(
                    f"{PREFIX}layers.0.self_attn.rotary_emb.inv_freq belongs to another rope than {target.name}'s"
                )
        return weights

    def export_config(self, head: DraftHead, target: Target) -> dict[str, Any]:
        return {"base_model_name_or_path": target.checkpoint} | head.to_config()


def check_tied(engine: str, head: Any, target: Target) -> None:
    """Raise ValueError if the engine, zankner's code, would load other weights than these: it repeats one block."""
    if not head.cache_layers:
        return
    for number, stack in enumerate(head.hydra_mlp):
        assert isinstance(stack, torch.nn.Sequential)
        blocks = [module.state_dict() for module in list(stack)[3::2]]
        if any(not torch.equal(tensor, block[name]) for block in blocks[1:] for name, tensor in blocks[0].items()):
            raise ValueError(
                f"{engine} has one block in place of layers 3, 5, 7 of hydra_mlp.{number}, and this head has "
                "trained each: it would draft with the last of them; train with head.mlp_layers=2 for that code"
            )
