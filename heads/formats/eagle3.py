"""EAGLE-3 as SafeAILab, SpecForge, ModelOpt, SGLang and vLLM write and read it: `LlamaForCausalLMEagle3`.

Two numberings of the fused layers are about, and config.json has a place for each, so one file serves all engines:

    eagle_aux_hidden_state_layer_ids               hidden_states ids, 0 the embedding: vLLM, `speculators`, ours
    eagle_config.eagle_aux_hidden_state_layer_ids  outputs of decoder layers counted from 0: SGLang, SpecForge, ModelOpt
"""

from typing import Any, Self

from torch import Tensor

from heads.base import DraftHead
from heads.eagle3 import Eagle3Head
from heads.formats.base import Format, HeadFiles, check_embeddings, check_rope_spellings, expect
from heads.target import Target

IDS = "eagle_aux_hidden_state_layer_ids"
# What our decoder layer does, and no other.
LAYER = {"num_hidden_layers": 1, "hidden_act": "silu", "bias": False, "mlp_bias": False, "quantization_config": None}
# ModelOpt writes its options into eagle_config.
OPTIONS = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "parallel_draft_step": 1,
}


class Eagle3Format(Format):
    title = "EAGLE-3 as SafeAILab, vLLM and SGLang read it (LlamaForCausalLMEagle3)"
    kind, own = Eagle3Head, True

    def __init__(self, layer: str = "midlayer"):
        self.layer = layer  # ModelOpt, and some of SpecForge's heads, call it layers.0

    @classmethod
    def match(cls, found: HeadFiles) -> Self | None:
        named = Eagle3Head.describes(found.config) or "Eagle3LlamaForCausalLM" in found.config.get("architectures", [])
        spelt = next(
            (name for name in ("midlayer", "layers.0") if any(k.startswith(f"{name}.") for k in found.weights)), ""
        )
        # SafeAILab's own files say LlamaForCausalLM; the pruned vocabulary is what tells them from EAGLE-1.
        if named or spelt == "midlayer" or (spelt and "draft_vocab_size" in found.config):
            return cls(spelt or "midlayer")
        return None

    def key(self, own: str) -> str:
        return own.replace("midlayer", self.layer, 1)

    def native_config(self, found: HeadFiles, target: Target) -> dict[str, Any]:
        config, eagle = found.config, found.config.get("eagle_config") or {}
        if not isinstance(eagle, dict):
            raise found.wrong(f"config.json says eagle_config={eagle!r}, which holds no settings")
        check_rope_spellings(found, config)
        expect(found, config, LAYER | {"target_hidden_size": config["hidden_size"]})
        expect(found, eagle, OPTIONS)
        return config | {IDS: layer_ids(found, target), "foredraft": config.get("foredraft", {})}

    def supply(self, found: HeadFiles, head: DraftHead, target: Target) -> dict[str, Tensor]:
        given = dict(found.weights)
        if "embed_tokens.weight" in given:
            check_embeddings(found, "embed_tokens.weight", target)
            del given["embed_tokens.weight"]
        return given


def layer_ids(found: HeadFiles, target: Target) -> list[int]:
    """The fused layers, as ids of `hidden_states`; ValueError where they are not said, or said twice and differently."""
    config, n = found.config, target.num_layers
    ours, theirs = config.get(IDS), (config.get("eagle_config") or {}).get(IDS)
    for name, said in ((IDS, ours), (f"eagle_config.{IDS}", theirs)):
        if said is not None and not (isinstance(said, list) and said and all(type(k) is int for k in said)):
            raise found.wrong(f"config.json says {name}={said!r}, which is no list of layers")
    if ours is None and theirs is None:
        rule = [2, n // 2, n - 3]
        if sorted(set(rule)) != rule:
            raise found.wrong(
                f"config.json names no {IDS}, and a target of {n} layers is too shallow for the paper's three"
            )
        return rule
    if ours is None and config.get("foredraft"):
        raise found.wrong(f"it is of an earlier foredraft, which wrote no {IDS} beside eagle_config: train it again")
    ids: list[int] = ours or [k + 1 for k in theirs or []]
    if theirs is not None and ids != [k + 1 for k in theirs]:
        raise found.wrong(
            f"{IDS}={ids} (ids of hidden_states) and eagle_config.{IDS}={theirs} (outputs of layers counted from 0) do not "
            f"name the same layers: the second should be {[k - 1 for k in ids]}"
        )
    if sorted(set(ids)) != ids or not 0 <= ids[0] <= ids[-1] <= n:
        raise found.wrong(
            f"it reads hidden states {ids} (0 is the embedding); they must ascend within the target's 0..{n}"
        )
    return ids
