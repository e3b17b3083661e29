"""Hydra and Hydra++ as zankner/Hydra lays them out: `hydra_mlp`, `hydra_lm_head`, and `prefix_embeding_layer` (spelt so)."""

from typing import Any, Self

import torch
from torch import Tensor

from heads import llama_config
from heads.base import DraftHead
from heads.formats.base import Format, HeadFiles, expect
from heads.hydra import HydraHead
from heads.target import Target

PREFIX = "prefix_embeding_layer."


class HydraFormat(Format):
    title = "Hydra as zankner/Hydra reads it"
    kind, own = HydraHead, True
    files = ("hydra_lm_head.safetensors", "hydra_lm_head.pt")  # its code opens only the second

    @classmethod
    def match(cls, found: HeadFiles) -> Self | None:
        return cls() if HydraHead.describes(found.config) else None

    def native_config(self, found: HeadFiles, target: Target) -> dict[str, Any]:
        """Sizes and the prefix layer's shape are the target's: the published configs do not tell them."""
        expect(found, found.config, {"quantization_config": None})
        own: dict[str, Any] = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size}
        if found.config["hydra_head_arch"] == "prefix-mlp":
            own["prefix"] = llama_config.saved(llama_config.config_like(target, "Hydra++"))
        return found.config | {"foredraft": own | found.config.get("foredraft", {})}

    def supply(self, found: HeadFiles, head: DraftHead, target: Target) -> dict[str, Tensor]:
        given = dict(found.weights)
        # A whole LlamaModel was saved: its embedding is never read, and its frequencies are a matter of the config.
        given.pop(f"{PREFIX}embed_tokens.weight", None)
        frequencies = given.pop(f"{PREFIX}layers.0.self_attn.rotary_emb.inv_freq", None)
        if frequencies is not None:
            assert isinstance(head, HydraHead)
            ours = head.prefix_embeding_layer.rotary.rule.inv_freq
            if frequencies.shape != ours.shape or not torch.allclose(frequencies.float(), ours, rtol=1e-2):
                raise found.wrong(
                    f"{PREFIX}layers.0.self_attn.rotary_emb.inv_freq is of another rope than {target.name}'s"
                )
        return given

    def config_of(self, head: DraftHead, target: Target) -> dict[str, Any]:
        return head.to_config() | {"base_model_name_or_path": target.name}


def check_tied(head: HydraHead) -> None:
    """Raise ValueError where zankner's code would load other weights than these: it repeats one block."""
    if not head.cache_layers:
        return
    for number, stack in enumerate(head.hydra_mlp):
        assert isinstance(stack, torch.nn.Sequential)
        blocks = [module.state_dict() for module in list(stack)[3::2]]
        if any(not torch.equal(tensor, block[name]) for block in blocks[1:] for name, tensor in blocks[0].items()):
            raise ValueError(
                f"zankner's code has one block in the place of layers 3, 5, 7 of hydra_mlp.{number}, and this head has "
                "learnt one for each: it would draft with the last of them; train with head.mlp_layers=2 for that code"
            )
