"""Check what an engine does not load, or would draft with incorrectly. Errors give the reason and the remedy."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from foredraft.heads.dflash2 import DFlash2Head
from foredraft.heads.eagle3 import FLAGS
from foredraft.heads.formats.base import embeds_rows
from foredraft.heads.formats.eagle3 import AUX
from foredraft.heads.formats.layer_ids import as_sglang_reads, for_sglang
from foredraft.heads.target_model import Target
from foredraft.heads.target_model.embedding import embedding_scale
from foredraft.heads.target_model.files import weight_map
from foredraft.heads.target_model.logits import LogitScaling

Check = Callable[[str, Any, Target], None]  # of the engine's name, a head and its target; it raises ValueError

PLAIN = LogitScaling(None, None, None)
SIZES = ("attention_factor", "mscale", "mscale_all_dim")  # of a yarn rope: they scale what it rotates
OWN_YARN = dict.fromkeys(SIZES) | {"beta_fast": 32, "beta_slow": 1, "truncate": True}  # with their usual values


@dataclass(frozen=True)
class Requirement:
    """Require something of a head and its target. The sentence of the error may name {engine}, {head} and {target}."""

    fits: Callable[[Any, Target], bool]
    sentence: str

    def __call__(self, engine: str, head: Any, target: Target) -> None:
        if not self.fits(head, target):
            raise ValueError(self.sentence.format(engine=engine, head=head, target=target))


# Of any engine.
FULL_VOCABULARY = Requirement(
    lambda head, target: not head.pruned,
    "{engine} does not support a pruned vocabulary of {head.kind} heads: train this head with head.draft_vocab_size=null",
)
IN_PLACE = Requirement(
    lambda head, target: not head.sample_from_anchor,
    "{engine} drafts {head.kind} in place, and this head anchor first: train it with head.sample_from_anchor=false",
)
ANCHOR_FIRST = Requirement(
    lambda head, target: head.sample_from_anchor,
    "{engine} drafts {head.kind} anchor first, and this head in place: train it with head.sample_from_anchor=true, or use "
    "vLLM",
)
# The last hidden state: heads here get it after the target's last norm, as transformers gives it.
INNER_STATES = Requirement(
    lambda head, target: target.num_layers not in head.layers or getattr(head, "fc", None) is None,
    "{engine} returns the last hidden state ({target.num_layers}) before its norm, and this head reads it after: train it "
    "with other head.target_layer_ids",
)
# A target that scales or caps the logits to which a head adds its corrections. Other heads do not mind: their best draft
# stays the best.
PLAIN_LOGITS = Requirement(
    lambda head, target: head.lm_head is not None or target.scaled == PLAIN,
    "{engine} adds the head's corrections to outputs of the target's lm_head, and {target.name} scales or caps these first: "
    "train head=dflash",
)
# Engines multiply by the target's lm_head for a head that has none, and add its bias only for the target.
PLAIN_LM_HEAD = Requirement(
    lambda head, target: (
        getattr(head, "lm_head", None) is not None
        or getattr(target.model.get_output_embeddings(), "bias", None) is None
    ),
    "{engine} leaves out the bias of {target.name}'s lm_head in drafts of {head.kind} heads, which learned with it: train "
    "head=eagle3",
)
# A target whose embedding is more than its rows. EAGLE-3 and P-EAGLE do not mind: a norm follows.
PLAIN_EMBEDDINGS = Requirement(
    lambda head, target: embeds_rows(target),
    "{engine} gives the head rows of the target's embedding, and {target.name} scales or normalizes them, so drafts would "
    "be wrong: train head=eagle3",
)
SCALED_EMBEDDINGS = Requirement(
    lambda head, target: embedding_scale(target) is not None,
    "{engine} can only scale rows of the target's embedding, and {target.name} does more to them: train head=eagle3",
)
NO_EMBEDDING_NORM = Requirement(
    lambda head, target: not hasattr(target.model.get_input_embeddings(), "embed_norm"),
    "{engine} leaves out the norm of {target.name}'s embedding, which this head was trained with",
)
VANILLA = Requirement(
    lambda head, target: head.markov_head.variant == "vanilla",
    "{engine} supports DSpark heads only with head.markov_head_type=vanilla, and this one is {head.markov_head.variant}: "
    "use SGLang",
)
WHOLE_BLOCK = Requirement(
    lambda head, target: head.causal is False or (head.causal is None and head.window is None),
    "{engine} shows each position its whole block: train this head with head.window=null head.causal=false",
)
ONE_MASKING = Requirement(
    lambda head, target: head.window is None or head.causal is not None,
    "{engine}'s draft models are causal in all layers or in none, and this one only in its sliding layers "
    "(head.window={head.window}): use vLLM",
)
WHOLE_ROTATION = Requirement(
    lambda head, target: "partial_rotary_factor" not in head.config.rope_parameters,
    "{engine} rotates whole queries and keys of {head.kind} heads, and this head's only partly",
)
NO_LATENT_ATTENTION = Requirement(
    lambda head, target: not head.latent,
    "EAGLE-3 heads with multi-head latent attention are only supported in format=vllm",
)
THREE_LAYERS = Requirement(
    lambda head, target: len(head.layers) == 3,
    "{engine} fuses three layers, and this head reads hidden states {head.layers}",
)
HAS_CHECKPOINT = Requirement(
    lambda head, target: bool(weight_map(target)),
    "{target.name} has no local checkpoint in safetensors, into which the layer could be written",
)
# Of one engine.
VLLM_LATENT = Requirement(
    lambda head, target: not head.latent or (head.fc is not None and head.input_norm is None),
    f"vLLM's EAGLE-3 with multi-head latent attention supports neither norm_before_fc nor {AUX}=false: use another",
)
VLLM_BIAS = Requirement(
    lambda head, target: head.fc.bias is None,
    "vLLM's EAGLE-1 has no fc.bias, and this head does: train it with head.bias=false",
)
SPECULATORS_MASKING = Requirement(
    ONE_MASKING.fits,
    "vLLM reads heads of the speculators package as causal in all layers or in none, and this one is only in its "
    "sliding layers (head.window={head.window}): use format=vllm",
)
SPECULATORS_RATIO = Requirement(
    lambda head, target: head.inner % head.correction == 0,
    "the speculators package needs head.xpress_mlp_hidden={head.inner} to be a multiple of head.xpress_rank="
    "{head.correction}: use format=vllm",
)
SGLANG_LAYERS = (
    Requirement(  # its test of the widths takes what such a head reads for the output of fc
        lambda head, target: head.fc is None or len(head.layers) > 1,
        "SGLang leaves out the fc of a head that reads one hidden state, as this one does {head.layers}: use vLLM",
    ),
    Requirement(
        lambda head, target: head.layers[0] != 0,
        "SGLang provides outputs of decoder layers, and this head takes the embedding (hidden state 0)",
    ),
    Requirement(
        lambda head, target: as_sglang_reads(for_sglang(head.layers, target), target) == head.layers,
        "SGLang reads layer ids that start with 1 as one less for {target.name}, and this head takes hidden states "
        "{head.layers}: use vLLM",
    ),
)
SGLANG_PREFIX = Requirement(
    lambda head, target: head.pure == 1,
    "SGLang's Domino has head.pure_draft_prefix_len=1, and this head has {head.pure}",
)
EAGLE_ROPE = Requirement(
    lambda head, target: head.config.rope_parameters["rope_type"] == "default",
    "SafeAILab's code supports the default rope, and this head has {head.config.rope_parameters[rope_type]}: use vLLM or "
    "SGLang",
)
LLAMACPP_ROPE = Requirement(
    lambda head, target: head.config.rope_parameters["rope_type"] != "longrope",
    "llama.cpp's draft models do not support longrope, which this head has: use vLLM",
)
LLAMACPP_BIASES = Requirement(
    lambda head, target: not head.config.attention_bias,
    "llama.cpp's draft models do not support biases in attention, which this head has: use vLLM",
)


def normed_state(*kinds: str) -> Requirement:
    """Return a check of heads that read only the last hidden state. It refuses these model types of targets, for which the
    engine returns that state before its norm."""
    return Requirement(
        lambda head, target: head.layers != [target.num_layers] or target.config.model_type not in kinds,
        "{engine} returns the last hidden state of {target.name} before its norm, and this head reads it after: use "
        "another engine, or foredraft serve",
    )


VLLM_STATE, SGLANG_STATE = normed_state("mimo", "step3p5"), normed_state("step3p5")


def usual_yarn(engine: str, head: Any, target: Target, read: tuple[str, ...] = ()) -> None:
    """Check for settings of a yarn rope that the engine does not read. read: those that it does, of OWN_YARN."""
    rope = head.config.rope_parameters
    if rope["rope_type"] != "yarn":
        return
    own = [name for name, usual in OWN_YARN.items() if name not in read and rope.get(name, usual) not in (usual, None)]
    if math.isclose(head.rotary.rope.attention_scaling, 0.1 * math.log(rope["factor"]) + 1, rel_tol=1e-3):
        own = [name for name in own if name not in SIZES]
    if own:
        words = ", ".join(f"{name}={rope[name]}" for name in own)
        raise ValueError(
            f"{engine} does not read {words} of this head's yarn rope: use vLLM, or train it with another head.rope"
        )


def layer_flags(engine: str, head: Any, target: Target, supported: tuple[str, ...] = ()) -> None:
    """Check for flags that the engine does not support and would ignore, and for another attention."""
    NO_LATENT_ATTENTION(engine, head, target)
    config = head.to_config()
    used = [name for name in FLAGS if config[name] and name not in supported]
    used += [] if config[AUX] else [f"{AUX}=false"]
    if used:
        raise ValueError(f"{engine} does not support {', '.join(used)}, and would silently draft incorrectly: use vLLM")


def eagle_layers(engine: str, head: Any, target: Target) -> None:
    n = target.num_layers
    usual = [2, n // 2, n - 3]
    if head.layers != usual:
        raise ValueError(
            f"{engine} takes hidden states {usual} of a target of {n} layers, regardless of config.json, and this head "
            f"takes {head.layers}"
        )


def llamacpp_selector(engine: str, head: DFlash2Head, target: Target) -> None:
    needed, largest = head.candidates * (head.candidates + 1), int((head.width + 0.25) ** 0.5 - 0.5)
    if needed > head.width:
        raise ValueError(
            f"llama.cpp's selector of {head.candidates} candidates needs a hidden size of at least {needed}, and this head's "
            f"is {head.width}: train it with head.selector_top_k={largest}"
        )


def llamacpp_mtp(engine: str, head: Any, target: Target) -> None:
    attention = head.layer.self_attn
    whole = attention.gated and attention.normed
    if not (target.config.model_type.startswith("qwen3_5") and whole):
        raise ValueError(
            "llama.cpp only loads MTP layers without experts of Qwen3.5, with a gate and q/k norms, and this one "
            f"belongs to a target of type {target.config.model_type}{'' if whole else ', without these'}: train head=eagle3 "
            "for llama.cpp, or export this with format=mtp for vLLM"
        )
