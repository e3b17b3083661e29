"""What loading a target needs beyond transformers: names looked up, and words for dtypes and bits."""

import importlib.util
import logging
import platform
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    BitsAndBytesConfig,
    PreTrainedConfig,
)


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


class Once(logging.Filter):
    """Lets a message through the first time."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        new = message not in self.seen
        self.seen.add(message)
        return new


ONCE = Once()


def quantization_config(name: str, dtype: str | torch.dtype) -> Any:
    """dtype: of the products with 4-bit weights; "auto" is bfloat16."""
    if name not in ("4bit", "8bit"):
        raise ValueError(f"quantization={name} is not one of 4bit, 8bit")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ValueError(f"quantization={name} needs bitsandbytes: pip install bitsandbytes")
    if name == "4bit":
        compute = dtype if isinstance(dtype, torch.dtype) else torch.bfloat16
        return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute)
    logging.getLogger("bitsandbytes.autograd._functions").addFilter(ONCE)  # which warns at every product
    # Threshold 0 takes no columns out as outliers. Which columns those are depends on all rows of a forward, so a draft would
    # change what the target makes of the text beside it.
    return BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)


# Kinds of other code that are one of transformers' own, name for name: it reads Kimi-K2.5's text model so itself.
SAME_KIND = {"kimi_k2": "deepseek_v3"}


def read_config(path: str | Path, revision: str | None = None, trust_remote_code: bool = False) -> PreTrainedConfig:
    """A model's config.json. Raises ValueError where transformers does not know the kind, or would run code of others."""
    try:
        return AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code)
    except ValueError as error:
        facts, _ = PreTrainedConfig.get_config_dict(path, revision=revision)
        named = facts.pop("model_type", None)
        if named in SAME_KIND:
            return AutoConfig.for_model(SAME_KIND[named], **facts)
        if "custom code" in str(error):
            reason = "its kind is none that transformers has, and it brings code of its own: choose another target"
        else:
            reason = str(error).strip().split(". ")[0]
            if "does not recognize" in reason:
                reason += f": transformers {transformers.__version__} has not its code, a newer one may"
        raise ValueError(f"target {path} cannot be loaded: {reason}") from error


def model_class(config: PreTrainedConfig) -> Any:
    """The class of transformers that writes text for this config. Where that reads images too (Qwen3-VL, Mistral 3.1 ...) it
    is the whole model, of which only what reads text is used."""
    return AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForImageTextToText
