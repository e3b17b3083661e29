"""What an engine does not load, or would draft with wrongly: each check raises ValueError with the reason and the remedy."""

from foredraft.heads.base import DraftHead
from foredraft.heads.dflash import DFlashHead
from foredraft.heads.dflash2 import DFlash2Head
from foredraft.heads.dspark import DSparkHead
from foredraft.heads.eagle3 import Eagle3Head
from foredraft.heads.formats.eagle3 import AUX, FLAGS
from foredraft.heads.target import Target


def check_llamacpp_layers(head: DraftHead, target: Target) -> None:
    """Raise ValueError for a rope, biases or hidden states that its loaders do not have."""
    assert isinstance(head, Eagle3Head | DFlashHead)
    config, rope = head.config, head.config.rope_parameters
    if rope["rope_type"] == "longrope":
        raise ValueError("llama.cpp's draft models have no longrope, and this head has: vLLM reads it")
    if isinstance(head, Eagle3Head) and "partial_rotary_factor" in rope:
        raise ValueError(
            "llama.cpp's EAGLE-3 turns whole heads, and this one's rope turns a part of them: vLLM reads it"
        )
    if config.attention_bias:
        raise ValueError("llama.cpp's draft models have no biases in attention, and this head has: vLLM reads it")
    if target.num_layers in head.layers:
        raise ValueError(
            f"llama.cpp hands out the last hidden state ({target.num_layers}) before its norm, and this head reads it after: "
            "train it with other head.layers"
        )


def check_llamacpp_eagle3(head: Eagle3Head) -> None:
    check_llama_layer("llama.cpp", head)
    if len(head.layers) != 3:
        raise ValueError(f"llama.cpp fuses three layers, and this head reads hidden states {head.layers}")
    check_layer_flags("llama.cpp", head, known=("norm_before_residual", "norm_before_fc"))


def check_llamacpp_blocks(head: DFlashHead) -> None:
    if isinstance(head, DSparkHead):
        check_vanilla("llama.cpp", head)
    else:
        check_in_place(f"llama.cpp's {head.kind}", head)
    if head.window is not None and not head.causal and not isinstance(head, DFlash2Head):
        raise ValueError(
            f"llama.cpp's draft models are causal in all layers or in none, and this one is in its sliding layers alone "
            f"(head.window={head.window}): vLLM reads it"
        )
    if not isinstance(head, DFlash2Head):
        return
    needed = head.candidates * (head.candidates + 1)
    if needed > head.width:
        most = int((head.width + 0.25) ** 0.5 - 0.5)
        raise ValueError(
            f"llama.cpp's selector of {head.candidates} candidates wants a hidden size of {needed} at least, and this head's "
            f"is {head.width}: train it with head.selector_top_k={most}"
        )


def check_in_place(engine: str, head: DFlashHead) -> None:
    if head.sample_from_anchor:
        raise ValueError(
            f"{engine} drafts in place, and this head anchor first: train it with head.sample_from_anchor=false"
        )


def check_vanilla(engine: str, head: DSparkHead) -> None:
    if head.markov_head.variant != "vanilla":
        raise ValueError(
            f"{engine} serves DSpark heads with head.markov_head_type=vanilla only, and this one is "
            f"{head.markov_head.variant}: SGLang reads it"
        )


def unsupported(engine: str, head: DraftHead) -> ValueError:
    return ValueError(f"{engine} reads no {head.kind} heads")


def check_full_vocabulary(engine: str, head: DraftHead) -> None:
    if head.pruned:
        raise ValueError(f"{engine} knows no pruned vocabulary: train this head with head.draft_vocab_size=null")


def check_llama_layer(engine: str, head: Eagle3Head) -> None:
    if head.latent:
        raise ValueError(f"{engine} reads no EAGLE-3 head with multi-head latent attention: vLLM does")


def check_layer_flags(engine: str, head: Eagle3Head, known: tuple[str, ...] = ()) -> None:
    """Raise ValueError for flags that the engine does not know and would ignore silently, and for another attention."""
    check_llama_layer(engine, head)
    config = head.to_config()
    used = [name for name in FLAGS if config[name] and name not in known]
    used += [] if config[AUX] else [f"{AUX}=false"]
    if used:
        raise ValueError(f"{engine} knows no {', '.join(used)}, and would draft wrongly without a word; vLLM does")
