"""Load a target's model and tokenizer with transformers. dtypes and quantization are names, and each way to fail has one
message."""

import errno
import functools
import importlib.util
import json
import logging
import platform
import sys
from collections.abc import Iterable
from numbers import Integral
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from foredraft.heads.target_model.files import apply_file_rules, check_no_pointer
from foredraft.heads.target_model.gguf import record_of
from foredraft.heads.target_model.images import reads_images
from foredraft.heads.target_model.norms import fuse_norms

if TYPE_CHECKING:
    from foredraft.heads.target_model.model import Target


# Keywords that only the model would get, and not the tokenizer and other files, or that transformers no longer has -> what to
# use instead.
ELSEWHERE = {
    "token": "it only reaches the model: use `hf auth login`, or set HF_TOKEN",
    "cache_dir": "it only reaches the model: set HF_HUB_CACHE",
    "local_files_only": "it only reaches the model: set HF_HUB_OFFLINE=1",
    "subfolder": "it only reaches the model: download the repository, and give the directory",
    "load_in_4bit": "set quantization=4bit",
    "load_in_8bit": "set quantization=8bit",
}


def check_keywords(keywords: dict[str, Any]) -> None:
    """Raise ValueError for one of these keywords, and drop those that are off."""
    for name in ELSEWHERE.keys() & keywords.keys():
        if keywords.pop(name):
            raise ValueError(f"{name}= is not supported here: {ELSEWHERE[name]}")


def resolve_dtype(name: str) -> torch.dtype:
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}.get(name)
    if dtype is None:
        raise ValueError(f"dtype={name} is not one of auto, float32, bfloat16, float16")
    return dtype


def resolve_device(device: str | torch.device | None, check: bool = True) -> str | torch.device:
    """Return the device, by default a GPU if available. Raises ValueError if torch does not have it here. check: try it,
    which opens a context on the first GPU unless the process has chosen another one."""
    device = ("cuda" if torch.cuda.is_available() else "cpu") if device is None else device
    try:
        if check:
            torch.empty(0, device=device)
    except (RuntimeError, AssertionError, ImportError, TypeError) as error:
        raise ValueError(
            f"device={device} is not available ({first_line(error)}): set cpu, cuda or cuda:N, or leave it out for a GPU if "
            "there is one"
        ) from None
    return device


def has_bfloat16_products(device: torch.device | str) -> bool:
    """Return whether products in bfloat16 are as fast as in float32 on this device. A GPU below compute capability 8 (T4,
    V100) emulates them. A CPU without instructions for them (AVX512_BF16, AMX, ARM's BF16) widens every number first: 16
    rows take twice as long with AVX-512, four times with AVX2.

    This uses what the device reports instead of a measurement, which other busy processes would distort."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)
    if device.type != "cpu":
        return True
    if platform.machine().lower() not in ("x86_64", "amd64"):
        reported: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # not in torch 2.9
        return bool(reported.get("bf16", False))
    if torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "NO AVX", "AVX2"):  # ATEN_CPU_CAPABILITY can lower it
        return False
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


SHOWN: set[str] = set()


def is_new(record: logging.LogRecord) -> bool:
    """Return whether this message is logged for the first time."""
    message = record.getMessage()
    new = message not in SHOWN
    SHOWN.add(message)
    return new


def quantization_config(name: str, dtype: str | torch.dtype, device: str | torch.device) -> Any:
    """Return a bitsandbytes config. dtype: of the products with 4-bit weights; "auto" is bfloat16 if the device supports
    it, otherwise float32."""
    if name not in ("4bit", "8bit"):
        raise ValueError(f"quantization={name} is not one of 4bit, 8bit")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ValueError(f"quantization={name} needs bitsandbytes: pip install bitsandbytes")
    if name == "4bit":
        automatic = torch.bfloat16 if has_bfloat16_products(device) else torch.float32
        compute = dtype if isinstance(dtype, torch.dtype) else automatic
        return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute)
    return BitsAndBytesConfig(load_in_8bit=True)


def keep_outliers(model: PreTrainedModel) -> None:
    """Disable the outlier columns of bitsandbytes' 8-bit products, also in a checkpoint that was saved with them. Which
    columns these are depends on all rows of a forward, so a draft would change the target's text."""
    logging.getLogger("bitsandbytes.autograd._functions").addFilter(is_new)  # it warns at every product
    for module in model.modules():
        if type(module).__name__ == "Linear8bitLt":
            module.state.threshold = 0.0


# What transformers raises for files of another form: a list as config.json, a kind of rope that it does not know, an index
# without its parts.
MALFORMED = (AttributeError, EOFError, LookupError, TypeError)
# Kinds with other code that equal one of transformers' in every name: it loads Kimi-K2.5's text model so itself.
SAME_KIND = {"kimi_k2": "deepseek_v3"}


def read_config(path: str | Path, revision: str | None = None, trust_remote_code: bool = False) -> PreTrainedConfig:
    """Read a model's config.json. Raises ValueError if transformers does not support its kind, or would run code from the
    checkpoint."""
    try:
        return AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code)
    except StrictDataclassError as error:  # settings that contradict each other
        raise ValueError(
            f"target {path} cannot be loaded: its config.json: {str(error).rpartition('Error: ')[2]}"
        ) from error
    except MALFORMED as error:
        raise ValueError(f"target {path} cannot be loaded: {reason_of(error)}") from error
    except ValueError as error:
        settings, _ = PreTrainedConfig.get_config_dict(path, revision=revision)
        model_type = settings.pop("model_type", None)
        if model_type in SAME_KIND:
            return AutoConfig.for_model(SAME_KIND[model_type], **settings)
        if "custom code" in str(error):
            reason = "transformers does not support its kind, and it brings its own code: choose another target"
        else:
            reason = str(error).strip().split(". ")[0]
            if "does not recognize" in reason:
                reason += f": transformers {transformers.__version__} does not have its code, a newer one may"
        raise ValueError(f"target {path} cannot be loaded: {reason}") from error


def model_class(config: PreTrainedConfig) -> Any:
    """Return transformers' class for this config. If it also supports images (Qwen3-VL, Mistral 3.1 ...), this is the whole
    model, of which only the text model is used."""
    text = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and not reads_images(config)
    return AutoModelForCausalLM if text else AutoModelForImageTextToText


def load_model(
    path: str,
    dtype: str | torch.dtype,
    device: str | torch.device,
    quantization: str | None,
    revision: str | None,
    **kwargs: Any,
) -> PreTrainedModel:
    """Load the model for `Target.from_pretrained`. With accelerate, weights are read directly into a device's memory: through
    the host, 8 processes make 8 copies there."""
    reads_directly = torch.device(device).type != "cpu" and importlib.util.find_spec("accelerate") is not None
    if "distributed_config" not in kwargs and (reads_directly or quantization is not None):
        kwargs.setdefault("device_map", device)
    if isinstance(dtype, str) and dtype != "auto":
        dtype = resolve_dtype(dtype)
    if quantization is not None:
        kwargs["quantization_config"] = quantization_config(quantization, dtype, device)
    check_generation_config(path)
    try:
        config = read_config(path, revision, kwargs["trust_remote_code"])
        if config._attn_implementation not in (None, "eager", "sdpa"):
            # flash_attention_2, of its training, has no mask for draft trees
            kwargs["_attn_implementation"] = kwargs.pop("attn_implementation", None)
        if config.model_type in SAME_KIND.values():
            kwargs["model_type"] = config.model_type  # which may differ in the file
        if dtype == "auto" and quantization is None and not has_bfloat16_products(device):
            dtype = torch.float32
            if config.dtype != torch.float32:  # not to stdout, to which programs write texts
                kind = torch.device(device).type
                half = ", dtype=float16 takes half the memory" if kind == "cuda" else ""
                note = (
                    f"computed in float32, because this {'GPU' if kind == 'cuda' else 'CPU'} has no bfloat16 products"
                )
                print(f"{path} is {note} (dtype=bfloat16 insists{half})", file=sys.stderr, flush=True)
        facts = {"dtype": dtype, "revision": revision, "output_loading_info": True}
        model, report = model_class(config).from_pretrained(path, **facts, **kwargs)
    except (OSError, ImportError, json.JSONDecodeError, SafetensorError, AssertionError, *MALFORMED) as error:
        if "unexpected keyword argument" in str(error):  # of the caller
            raise
        for file in Path(path).glob("*.safetensors"):
            check_no_pointer(file)
        raise ValueError(f"target {path} cannot be loaded: {reason_of(error)}") from error
    except (RuntimeError, ValueError) as error:
        if "ignore_mismatched_sizes" in str(error):
            reason = "its weights have other sizes than its config.json"
        elif "PytorchStreamReader" in str(error):
            reason = "a .bin file of its weights is damaged or incomplete"
        elif "has no `quant_method`" in str(error):
            reason = "its quantization_config lacks quant_method, as in checkpoints for MLX. Use the model in bfloat16"
        else:
            raise
        raise ValueError(f"target {path} cannot be loaded: {reason}") from error
    check_complete(path, model, report["missing_keys"])
    check_scales(path, model, report["unexpected_keys"])
    if isinstance(dtype, torch.dtype) and not hasattr(model.config, "quantization_config"):
        # Next to weights that were dequantized (FP8 on a CPU), others keep their stored dtype.
        for parameter in model.parameters():
            if parameter.dtype == torch.bfloat16:
                parameter.data = parameter.data.to(dtype)
    end_tokens(model, path)
    keep_outliers(model)
    if "distributed_config" not in kwargs:
        fuse_norms(model)
    return model if kwargs.keys() & {"device_map", "distributed_config"} else model.to(device)


def check_generation_config(path: str) -> None:
    """Raise ValueError for a file that is not a JSON object. transformers would ignore it, and its end tokens."""
    file = Path(path) / "generation_config.json"
    try:
        is_object = not file.is_file() or isinstance(json.loads(file.read_bytes()), dict)
    except ValueError:
        is_object = False
    if not is_object:
        raise ValueError(
            f"target {path} cannot be loaded: {file.name} is not a JSON object: mend it, or remove the file"
        )


def end_tokens(model: PreTrainedModel, name: str) -> list[int]:
    """Return the end tokens of a model's generation config, or else of its config. Raises ValueError for other values."""
    eos = model.generation_config.eos_token_id if model.generation_config else None
    # Qwen3-VL's text config has none.
    eos = getattr(model.config.get_text_config(), "eos_token_id", None) if eos is None else eos
    try:  # a model made in memory may have numbers of NumPy, a tensor or a set
        return [] if eos is None else [index(token) for token in ([eos] if isinstance(eos, Integral) else eos)]
    except TypeError:
        raise ValueError(
            f"eos_token_id={eos!r} of target {name} is not a token id or a list of them: mend its generation_config.json"
        ) from None


def check_complete(path: str, model: PreTrainedModel, missing: Iterable[str]) -> None:
    """Raise ValueError if the checkpoint lacks weights of the language model: transformers fills them with random numbers."""
    begins = ""
    if model.config.get_text_config() is not model.config:  # only its text model is used
        decoder = model.get_decoder()
        begins = next((name for name, part in model.named_modules() if part is decoder), "")
    if names := sorted(name for name in missing if name.startswith(begins) or "lm_head" in name):
        raise ValueError(
            f"target {path} lacks {len(names)} weights that its config.json announces ({', '.join(names[:3])}): "
            "save them by these names, with the config.json of the model"
        )


def check_scales(path: str, model: PreTrainedModel, unexpected: Iterable[str]) -> None:
    """Raise ValueError if the checkpoint has scales of weights that transformers did not apply (ModelOpt's FP8): it only
    warns, and the weights are wrong."""
    weights = {name for name, _ in model.named_parameters()}
    if names := sorted(name for name in unexpected if name.partition("_scale")[0] in weights):
        raise ValueError(
            f"target {path} cannot be loaded: transformers does not apply the scales of its quantized weights ({names[0]}). "
            "Use the model in bfloat16, or in another quantized format"
        )


def read_tokenizer(path: str, revision: str | None, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Read a model's tokenizer, which splits and normalizes as its own file says, and not as the class of its family does."""
    kind = AutoTokenizer if record_of(path) is None else PreTrainedTokenizerFast
    tokenizer = kind.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code)
    apply_file_rules(tokenizer, path, revision)
    return tokenizer


def load_tokenizer(
    path: str, model: PreTrainedModel, revision: str | None, trust_remote_code: bool
) -> tuple[PreTrainedTokenizerBase | None, str | None]:
    """Return the tokenizer, or None and the reason: decoding and drafting only need ids."""
    try:
        tokenizer = read_tokenizer(path, revision, trust_remote_code)
    except Exception as error:  # no tokenizer, or a missing package: what transformers raises differs by kind
        for file in Path(path).glob("tokenizer.*"):
            check_no_pointer(file)
        return None, first_line(error)
    if tokenizer.get_vocab().keys() <= set(tokenizer.all_special_tokens):  # transformers' default without any files
        return None, f"{path} has no tokenizer files"
    rows = model.get_input_embeddings().num_embeddings
    # Special tokens beyond them belong to a model that also supports images (Gemma 3's text model has no <image_soft_token>).
    special = sum(token.special and number >= rows for number, token in tokenizer.added_tokens_decoder.items())
    if len(tokenizer) - special > rows:
        raise ValueError(
            f"the tokenizer of {path} has {len(tokenizer)} tokens, but its model only {rows}: "
            "they do not belong together; use both from the same directory"
        )
    return tokenizer, None


def check_tokens(target: "Target", tokens: Tensor) -> None:
    """Raise ValueError for a token without an embedding. The device is only asked if the tokenizer has such tokens."""
    rows = target.model.get_input_embeddings().num_embeddings
    if not has_tokens_beyond(target.tokenizer, rows) or not tokens.numel() or (worst := int(tokens.max())) < rows:
        return
    raise ValueError(
        f"the text contains {target.text_tokenizer.convert_ids_to_tokens(worst)!r} (token {worst}), and {target.name} "
        f"only has embeddings of 0 to {rows - 1}: leave the token out of the text"
    )


@functools.lru_cache(8)
def has_tokens_beyond(tokenizer: PreTrainedTokenizerBase | None, rows: int) -> bool:
    return tokenizer is not None and max(tokenizer.get_vocab().values(), default=-1) >= rows


def first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


def reason_of(error: Exception) -> str:
    """Return the first line of an error that transformers raises for the files of a checkpoint."""
    if isinstance(error, OSError) and error.errno == errno.EINVAL:  # torch seeks beyond the end
        return "a .bin file of its weights is damaged or incomplete"
    if isinstance(error, (AssertionError, *MALFORMED)):
        return f"transformers fails on its files ({type(error).__name__}: {first_line(error)})"
    return first_line(error)
