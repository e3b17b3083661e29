"""EAGLE-3 in vLLM's own layout, that of the `speculators` package.

The decoder layer is `layers.0`, its config stands apart as `transformer_layer_config`, and the target's embeddings are
stored along. Its flags are written out one by one: engines differ on what an absent one means.
"""

from typing import Any, Self

from torch import Tensor

from heads.base import DraftHead
from heads.eagle3 import Eagle3Head
from heads.formats.base import HeadFiles, check_rope_spellings, expect
from heads.formats.eagle3 import IDS, LAYER, Eagle3Format, layer_ids
from heads.target import Target

NAMES = {"Eagle3Speculator", "Eagle3DraftModel"}
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
EMBEDDINGS = "embed_tokens.weight"


class SpeculatorsFormat(Eagle3Format):
    title, own = "EAGLE-3 in the layout of the speculators package (vLLM)", False

    def __init__(self, layer: str = "layers.0"):
        super().__init__(layer)

    @classmethod
    def match(cls, found: HeadFiles) -> Self | None:
        kind = found.config.get("speculators_model_type")
        if kind is None and not NAMES & set(found.config.get("architectures") or []):
            return None
        if kind != "eagle3":
            raise found.wrong(f"speculators_model_type={kind}: of this package's layouts, only eagle3 is read here")
        return cls()

    def native_config(self, found: HeadFiles, target: Target) -> dict[str, Any]:
        config, layer = found.config, found.config["transformer_layer_config"]
        if "norm_before_residual" not in config:
            raise found.wrong(
                "config.json does not say norm_before_residual, which vLLM takes as true and speculators as false: add it"
            )
        check_rope_spellings(found, layer)
        expect(found, layer, LAYER | {"attention_bias": False, "model_type": "llama"})
        expect(found, config, {"target_hidden_size": layer["hidden_size"]})
        methods = config["speculators_config"]["proposal_methods"]
        said = {name: config.get(name, False) for name in FLAGS} | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": config["draft_vocab_size"],
            IDS: layer_ids(found, target),
            "foredraft": {"depth": methods[0].get("speculative_tokens", 7)} | config.get("foredraft", {}),
        }
        return {name: value for name, value in layer.items() if name != "architectures"} | said

    def config_of(self, head: DraftHead, target: Target) -> dict[str, Any]:
        assert isinstance(head, Eagle3Head)
        whole = head.to_config()
        layer = {name: value for name, value in whole.items() if name in head.config.to_dict()}
        method = {"proposal_type": "greedy", "speculative_tokens": head.depth, "verifier_accept_k": 1}
        verifier = {"name_or_path": target.name, "architectures": target.config.architectures or []}
        return {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [method],
                "verifier": verifier,
            },
            "transformer_layer_config": layer | {"architectures": ["LlamaForCausalLM"]},
            "draft_vocab_size": whole["draft_vocab_size"],
            "target_hidden_size": None,  # the head is as wide as the target
            IDS: head.layers,
            "tie_word_embeddings": False,
            **{name: whole[name] for name in FLAGS},
        }

    def weights_of(self, head: DraftHead, target: Target) -> dict[str, Tensor]:
        rows = target.embeddings.detach().cpu().to(head.dtype, copy=True)
        return super().weights_of(head, target) | {EMBEDDINGS: rows.contiguous()}
