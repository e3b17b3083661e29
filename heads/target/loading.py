"""What loading a target needs beyond transformers: names looked up, words for dtypes and bits, and models refused by name
that no token tree can be read with."""

import importlib.util
import inspect
import platform
from typing import Any

import torch
from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from transformers import BitsAndBytesConfig, PreTrainedModel

# The layer types, as transformers names them, that remember keys and values alone and whose masks we know how to cut.
BRANCHING = {"full_attention", "sliding_attention"}


def check_exists(name: str) -> None:
    """Raise ValueError unless `name` is a model that the Hub or its local cache has. transformers would retry a Hub that
    cannot be reached for a minute first."""
    if name.count("/") > 1 or name.startswith((".", "/", "~")):
        raise ValueError(f"target {name} is no directory: give one that transformers saved, or a Hub id like org/name")
    if isinstance(try_to_load_from_cache(name, "config.json"), str):
        return
    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=10)
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(f"target {name} is no directory here, and the Hub does not give it: {reason}") from error


def resolve_dtype(name: str) -> torch.dtype:
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}.get(name)
    if dtype is None:
        raise ValueError(f"dtype={name} is not one of auto, float32, bfloat16, float16")
    return dtype


def has_bfloat16_products(device: torch.device | str) -> bool:
    """Are products in bfloat16 fast on this device? An x86 CPU without AVX-512 computes them in software, some seventy
    times slower than in float32."""
    if torch.device(device).type != "cpu" or platform.machine().lower() not in ("x86_64", "amd64"):
        return True
    return torch.backends.cpu.get_cpu_capability() not in ("DEFAULT", "NO AVX", "AVX2")


def quantization_config(name: str, dtype: str | torch.dtype) -> Any:
    """dtype: of the products with 4-bit weights; "auto" is bfloat16."""
    if name not in ("4bit", "8bit"):
        raise ValueError(f"quantization={name} is not one of 4bit, 8bit")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ValueError(f"quantization={name} needs bitsandbytes: pip install bitsandbytes")
    if name == "4bit":
        compute = dtype if isinstance(dtype, torch.dtype) else torch.bfloat16
        return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute)
    # Threshold 0 takes no columns out as outliers. Which columns those are depends on all rows of a forward, so a draft would
    # change what the target makes of the text beside it.
    return BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)


def check_supported(model: PreTrainedModel) -> None:
    """Raise ValueError for models that no token tree can be read with; they would run, and give wrong logits."""
    config = model.config.get_text_config()
    # GPT-Neo calls them attention_layers, and cuts its local ones by column, not by position.
    types = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None) or ()
    kinds = sorted(set(types) - BRANCHING)
    if kinds or model._is_stateful:  # some recurrent models (RWKV, xLSTM) name no layer types
        raise ValueError(
            f"model_type {config.model_type} has {', '.join(kinds) or 'recurrent'} layers: drafts can branch, and be "
            "taken back, only where every layer is full or sliding attention over keys and values; choose such a target"
        )
    if getattr(config, "is_decoder", None) is False and any(
        getattr(part, "is_causal", None) is False for part in model.modules()
    ):  # either alone says nothing: GPT-NeoX has the former, an image encoder beside a decoder the latter
        raise ValueError(
            f"model_type {config.model_type} is an encoder, whose tokens see what comes after them: a draft would "
            "change the text before it; choose a decoder (or is_decoder=True in its config, if it was trained as one)"
        )
    if getattr(config, "use_bidirectional_attention", None):
        raise ValueError(
            f"model_type {config.model_type} has use_bidirectional_attention: a draft would change the text before it; "
            "choose a target without"
        )
    if getattr(config, "alibi", None):
        raise ValueError(
            f"model_type {config.model_type} has alibi, which places keys by their column and not by their position: the "
            "branches of a tree would get wrong distances; choose a target with rotary or learned positions"
        )
    output = model.get_output_embeddings()
    read, written = model.get_input_embeddings().num_embeddings, None if output is None else output.weight.shape[0]
    if output is None or (written != read and output.weight.is_floating_point()):
        raise ValueError(
            f"model_type {config.model_type} reads {read} tokens and writes {written or 'none'}: what it writes must "
            "be what it reads next; choose a text model"
        )
    parameters = inspect.signature(model.forward).parameters
    missing = [name for name in ("position_ids", "past_key_values") if name not in parameters]
    if missing:
        raise ValueError(
            f"model_type {config.model_type} takes no {' and no '.join(missing)}, without which it cannot read the "
            "branches of a tree after a text; choose another target"
        )
