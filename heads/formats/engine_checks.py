"""Check what an engine does not load, or would draft with incorrectly. Errors give the reason and the remedy."""

from foredraft.heads.base import DraftHead
from foredraft.heads.dflash import DFlashHead
from foredraft.heads.dflash2 import DFlash2Head
from foredraft.heads.dspark import DSparkHead
from foredraft.heads.eagle3 import Eagle3Head
from foredraft.heads.formats.eagle3 import AUX, FLAGS
from foredraft.heads.target import Target


def check_llamacpp_layers(head: DraftHead, target: Target) -> None:
    """Raise ValueError for a rope, biases or hidden states that its loaders do not support."""
    assert isinstance(head, Eagle3Head | DFlashHead)
    config, rope = head.config, head.config.rope_parameters
    if rope["rope_type"] == "longrope":
        raise ValueError("llama.cpp's draft models do not support longrope, which this head has: use vLLM")
    if isinstance(head, Eagle3Head) and "partial_rotary_factor" in rope:
        raise ValueError(
            "llama.cpp's EAGLE-3 rotates whole heads, and this one's rope rotates a part of them: use vLLM"
        )
    if config.attention_bias:
        raise ValueError("llama.cpp's draft models do not support biases in attention, which this head has: use vLLM")
    if target.num_layers in head.layers:
        raise ValueError(
            f"llama.cpp returns the last hidden state ({target.num_layers}) before its norm, and this head reads it after: "
            "train it with other head.layers"
        )


def check_llamacpp_eagle3(head: Eagle3Head) -> None:
    check_llama_layer("llama.cpp", head)
    if len(head.layers) != 3:
        raise ValueError(f"llama.cpp fuses three layers, and this head reads hidden states {head.layers}")
    check_layer_flags("llama.cpp", head, supported=("norm_before_residual", "norm_before_fc"))


def check_llamacpp_blocks(head: DFlashHead) -> None:
    if isinstance(head, DSparkHead):
        check_vanilla("llama.cpp", head)
    else:
        check_in_place(f"llama.cpp's {head.kind}", head)
    if head.window is not None and not head.causal and not isinstance(head, DFlash2Head):
        raise ValueError(
            "llama.cpp's draft models are causal in all layers or in none, and this one only in its sliding layers "
            f"(head.window={head.window}): use vLLM"
        )
    if not isinstance(head, DFlash2Head):
        return
    needed = head.candidates * (head.candidates + 1)
    if needed > head.width:
        largest = int((head.width + 0.25) ** 0.5 - 0.5)
        raise ValueError(
            f"llama.cpp's selector of {head.candidates} candidates needs a hidden size of at least {needed}, and this head's "
            f"is {head.width}: train it with head.selector_top_k={largest}"
        )


def check_in_place(engine: str, head: DFlashHead) -> None:
    if head.sample_from_anchor:
        raise ValueError(
            f"{engine} drafts in place, and this head anchor first: train it with head.sample_from_anchor=false"
        )


def check_vanilla(engine: str, head: DSparkHead) -> None:
    if head.markov_head.variant != "vanilla":
        raise ValueError(
            f"{engine} supports DSpark heads only with head.markov_head_type=vanilla, and this one is "
            f"{head.markov_head.variant}: use SGLang"
        )


def unsupported(engine: str, head: DraftHead) -> ValueError:
    return ValueError(f"{engine} does not support {head.kind} heads")


def check_full_vocabulary(engine: str, head: DraftHead) -> None:
    if head.pruned:
        raise ValueError(
            f"{engine} does not support a pruned vocabulary: train this head with head.draft_vocab_size=null"
        )


def check_llama_layer(engine: str, head: Eagle3Head) -> None:
    if head.latent:
        raise ValueError(f"{engine} does not support EAGLE-3 heads with multi-head latent attention: use vLLM")


def check_layer_flags(engine: str, head: Eagle3Head, supported: tuple[str, ...] = ()) -> None:
    """Raise ValueError for flags that the engine does not support and would ignore, and for another attention."""
    check_llama_layer(engine, head)
    config = head.to_config()
    used = [name for name in FLAGS if config[name] and name not in supported]
    used += [] if config[AUX] else [f"{AUX}=false"]
    if used:
        raise ValueError(f"{engine} does not support {', '.join(used)}, and would silently draft incorrectly: use vLLM")
