"""Check what an engine does not load, or would draft with incorrectly. Errors give the reason and the remedy."""

import math
from typing import Any

from foredraft.heads.dflash2 import DFlash2Head
from foredraft.heads.eagle3 import FLAGS, SLIDING, Eagle3Head
from foredraft.heads.formats.base import embeds_rows
from foredraft.heads.formats.eagle3 import AUX
from foredraft.heads.formats.layer_ids import as_sglang_reads, for_sglang
from foredraft.heads.target_model import Target
from foredraft.heads.target_model.embedding import embedding_scale
from foredraft.heads.target_model.files import weight_map
from foredraft.heads.target_model.logits import LogitScaling

PLAIN = LogitScaling(None, None, None)
SIZES = ("attention_factor", "mscale", "mscale_all_dim")  # of a yarn rope: they scale what it rotates
OWN_YARN = dict.fromkeys(SIZES) | {"beta_fast": 32, "beta_slow": 1, "truncate": True}  # with their usual values


def require(fits: bool, sentence: str) -> None:
    if not fits:
        raise ValueError(sentence)


def full_vocabulary(engine: str, head: Any, target: Target) -> None:
    sentence = f"{engine} does not support a pruned vocabulary: train this head with head.draft_vocab_size=null"
    require(not head.pruned, sentence)


def in_place(engine: str, head: Any, target: Target) -> None:
    require(
        not head.sample_from_anchor,
        f"{engine} drafts in place, and this head anchor first: train it with head.sample_from_anchor=false",
    )


def inner_states(engine: str, head: Any, target: Target) -> None:
    """Check for the last hidden state, which heads here get after the target's last norm, as transformers gives it."""
    last, fused = target.num_layers, getattr(head, "fc", None) is not None
    require(
        last not in head.layers or not fused,
        f"{engine} returns the last hidden state ({last}) before its norm, and this head reads it after: train it with "
        "other head.target_layer_ids",
    )


def plain_logits(engine: str, head: Any, target: Target) -> None:
    """Check for a target that scales or caps the logits to which a head adds its corrections. Other heads do not mind:
    their best draft stays the best."""
    require(
        head.lm_head is not None or target.scaled == PLAIN,
        f"{engine} adds the head's corrections to outputs of the target's lm_head, and {target.name} scales or caps these "
        "first: train head=dflash",
    )


def plain_embeddings(engine: str, head: Any, target: Target) -> None:
    """Check for a target whose embedding is more than its rows. EAGLE-3 and P-EAGLE do not mind: a norm follows."""
    require(
        embeds_rows(target),
        f"{engine} gives the head rows of the target's embedding, and {target.name} scales or normalizes them, so drafts "
        "would be wrong: train head=eagle3",
    )


def scaled_embeddings(engine: str, head: Any, target: Target) -> None:
    require(
        embedding_scale(target) is not None,
        f"{engine} can only scale rows of the target's embedding, and {target.name} does more to them: train head=eagle3",
    )


def no_embedding_norm(engine: str, head: Any, target: Target) -> None:
    require(
        not hasattr(target.model.get_input_embeddings(), "embed_norm"),
        f"{engine} leaves out the norm of {target.name}'s embedding, which this head was trained with",
    )


def vanilla(engine: str, head: Any, target: Target) -> None:
    variant = head.markov_head.variant
    require(
        variant == "vanilla",
        f"{engine} supports DSpark heads only with head.markov_head_type=vanilla, and this one is {variant}: use SGLang",
    )


def whole_block(engine: str, head: Any, target: Target) -> None:
    require(
        head.causal is False or (head.causal is None and head.window is None),
        f"{engine} shows each position its whole block: train this head with head.window=null head.causal=false",
    )


def masking_by_type(engine: str, head: Any, target: Target) -> None:
    """Check for an engine that reads no `causal`."""
    fits = all(head.masking(i)[0] == (kind == SLIDING) for i, kind in enumerate(head.layer_types))
    require(
        fits,
        f"{engine} is causal in sliding layers and bidirectional in all others, and this head "
        f"(head.causal={bool(head.causal)}, head.window={head.window}) is not: use vLLM",
    )


def anchor_first(engine: str, head: Any, target: Target) -> None:
    require(
        head.sample_from_anchor,
        f"{engine} drafts anchor first, and this head in place: train it with head.sample_from_anchor=true, or use vLLM",
    )


def whole_rotation(engine: str, head: Any, target: Target) -> None:
    require(
        "partial_rotary_factor" not in head.config.rope_parameters,
        f"{engine} rotates whole queries and keys of draft models, and this head's only partly",
    )


def one_masking(drafters: str, head: Any, target: Target, remedy: str = "use vLLM") -> None:
    require(
        head.window is None or head.causal is not None,
        f"{drafters} causal in all layers or in none, and this one only in its sliding layers (head.window={head.window}): "
        f"{remedy}",
    )


def usual_yarn(engine: str, head: Any, target: Target, read: tuple[str, ...]) -> None:
    """Check for settings of a yarn rope that the engine does not read. read: those that it does, of OWN_YARN."""
    rope = head.config.rope_parameters
    own = [name for name, usual in OWN_YARN.items() if name not in read and rope.get(name, usual) not in (usual, None)]
    if rope["rope_type"] == "yarn" and math.isclose(
        head.rotary.rope.attention_scaling, 0.1 * math.log(rope["factor"]) + 1, rel_tol=1e-3
    ):
        own = [name for name in own if name not in SIZES]
    words = ", ".join(f"{name}={rope[name]}" for name in own)
    require(
        rope["rope_type"] != "yarn" or not own,
        f"{engine} does not read {words} of this head's yarn rope: use vLLM, or train it with another head.rope",
    )


def no_latent_attention(engine: str, head: Any, target: Target) -> None:
    require(not head.latent, f"{engine} does not support EAGLE-3 heads with multi-head latent attention: use vLLM")


def vllm_latent(head: Any, target: Target) -> None:
    require(
        not head.latent or (head.fc is not None and head.input_norm is None),
        f"vLLM's EAGLE-3 with multi-head latent attention supports neither norm_before_fc nor {AUX}=false: use another",
    )


def layer_flags(engine: str, head: Any, target: Target, supported: tuple[str, ...] = ()) -> None:
    """Check for flags that the engine does not support and would ignore, and for another attention."""
    no_latent_attention(engine, head, target)
    config = head.to_config()
    used = [name for name in FLAGS if config[name] and name not in supported]
    used += [] if config[AUX] else [f"{AUX}=false"]
    sentence = f"{engine} does not support {', '.join(used)}, and would silently draft incorrectly: use vLLM"
    require(not used, sentence)


def no_bias(head: Any, target: Target) -> None:
    require(head.fc.bias is None, "vLLM's EAGLE-1 has no fc.bias, and this head does: train it with head.bias=false")


def sglang_layers(head: Any, target: Target) -> None:
    layers = head.layers
    require(len(layers) == 3, f"SGLang fuses three layers, and this head takes hidden states {layers}")
    require(
        layers[0] != 0, "SGLang provides outputs of decoder layers, and this head takes the embedding (hidden state 0)"
    )
    require(
        as_sglang_reads(for_sglang(layers, target), target) == layers,
        f"SGLang reads layer ids that start with 1 as one less, and this head takes hidden states {layers}: use vLLM",
    )


def sglang_prefix(head: Any, target: Target) -> None:
    require(head.pure == 1, f"SGLang's Domino has head.pure_draft_prefix_len=1, and this head has {head.pure}")


def whole_ratio(head: Any, target: Target) -> None:
    require(
        head.inner % head.correction == 0,
        f"the speculators package needs head.xpress_mlp_hidden={head.inner} to be a multiple of head.xpress_rank="
        f"{head.correction}: use format=vllm",
    )


def eagle_layers(head: Any, target: Target) -> None:
    n = target.num_layers
    usual = [2, n // 2, n - 3]
    require(
        head.layers == usual,
        f"SafeAILab's code takes hidden states {usual} of a target of {n} layers, regardless of config.json, and this head "
        f"takes {head.layers}",
    )


def eagle_rope(head: Any, target: Target) -> None:
    kind = head.config.rope_parameters["rope_type"]
    require(
        kind == "default", f"SafeAILab's code supports the default rope, and this head has {kind}: use vLLM or SGLang"
    )


def has_checkpoint(head: Any, target: Target) -> None:
    require(
        bool(weight_map(target)),
        f"{target.name} has no local checkpoint in safetensors, into which the layer could be written",
    )


def llamacpp_layers(head: Any, target: Target) -> None:
    """Check for a rope, biases or hidden states that its loaders do not support."""
    rope = head.config.rope_parameters
    beyond = "llama.cpp's draft models do not support"
    require(rope["rope_type"] != "longrope", f"{beyond} longrope, which this head has: use vLLM")
    usual_yarn("llama.cpp", head, target, read=())
    require(
        not isinstance(head, Eagle3Head) or "partial_rotary_factor" not in rope,
        "llama.cpp's EAGLE-3 rotates whole heads, and this one's rope rotates a part of them: use vLLM",
    )
    require(not head.config.attention_bias, f"{beyond} biases in attention, which this head has: use vLLM")
    inner_states("llama.cpp", head, target)


def llamacpp_eagle3(head: Any, target: Target) -> None:
    no_latent_attention("llama.cpp", head, target)
    require(len(head.layers) == 3, f"llama.cpp fuses three layers, and this head reads hidden states {head.layers}")
    layer_flags("llama.cpp", head, target, ("norm_before_residual", "norm_before_fc"))


def llamacpp_selector(head: DFlash2Head, target: Target) -> None:
    needed, largest = head.candidates * (head.candidates + 1), int((head.width + 0.25) ** 0.5 - 0.5)
    require(
        needed <= head.width,
        f"llama.cpp's selector of {head.candidates} candidates needs a hidden size of at least {needed}, and this head's is "
        f"{head.width}: train it with head.selector_top_k={largest}",
    )


def llamacpp_mtp(head: Any, target: Target) -> None:
    attention = head.layer.self_attn
    whole = attention.gated and attention.normed
    require(
        target.config.model_type.startswith("qwen3_5") and whole,
        "llama.cpp only loads MTP layers without experts of Qwen3.5, with a gate and q/k norms, and this one "
        f"belongs to a target of type {target.config.model_type}{'' if whole else ', without these'}: train head=eagle3 for "
        "llama.cpp, or export this with format=mtp for vLLM",
    )
