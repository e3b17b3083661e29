"""Targets from GGUF files: dequantized once into a directory in transformers' format, in the cache.

    converted(FILE, dtype) -> cache/gguf/<digest of the file>-<dtype>/{config.json, model.safetensors, tokenizer.json, ...}

transformers reads the tensors. This module handles or refuses what it ignores: how the tokenizer splits words, rope scaling,
end tokens, and tensors without a place in the model.
"""

import contextlib
import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.utils import logging

from foredraft.heads.target_model.cache_directory import cache_directory, file_sha256, measured_once
from foredraft.heads.target_model.files import check_no_pointer
from foredraft.heads.target_model.gguf_tokenizer import build_tokenizer, end_tokens

MAGIC = b"GGUF"
VERSION = 3  # of the conversion; a higher number converts again
RECORD = "gguf.json"  # next to the converted weights: file, digest, quantization
UNUSED = ("rope_freqs.weight",)  # tensors that are not weights


def converted(file: Path, dtype: torch.dtype) -> Path:
    """Return the directory with this file's model in `dtype`, made at first use. Raises ValueError if it is not a GGUF
    file, or cannot be read as intended."""
    check_file(file)
    name, folder = str(dtype).removeprefix("torch."), cache_directory() / "gguf"
    try:
        directory = folder / f"{digest_of(file)}-{name}-{VERSION}"
        if (directory / RECORD).is_file():
            return directory
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(directory.with_suffix(".lock")):
            if not (directory / RECORD).is_file():
                convert(file, dtype, directory)
    except (OSError, SafetensorError) as error:  # the latter if the disk is full
        # foredraft/cli.py reacts to "No space" about a run's own disk.
        reason = str(error).replace("No space", "no space")
        raise ValueError(
            f"target {file} cannot be saved in {folder} ({reason}): fix this, or set the variable FOREDRAFT_CACHE to "
            "another directory"
        ) from None
    return directory


def is_gguf(file: Path) -> bool:
    """Return whether this is a GGUF file, whatever its name: Ollama names its files by their digests. Raises ValueError for
    a file that cannot be read."""
    try:
        if not file.is_file():
            return False
        with file.open("rb") as opened:
            return opened.read(len(MAGIC)) == MAGIC
    except OSError as error:
        raise ValueError(f"target {file} cannot be read: {error.strerror}") from None


def check_file(file: Path) -> None:
    if not file.is_file():
        raise ValueError(f"target {file} does not exist: give a GGUF file, a directory, or a Hub id")
    if not is_gguf(file):
        check_no_pointer(file)
        raise ValueError(f"target {file} is not a GGUF file: it does not start with {MAGIC!r}")
    for package in ("gguf", "accelerate"):  # transformers needs both to read GGUF
        if find_spec(package) is None:
            raise ValueError(f"target {file} needs the package {package}: pip install 'foredraft[gguf]'")


def digest_of(file: Path) -> str:
    """Return the start of the SHA-256 of its bytes. It is cached while size and modification time stay the same: hashing
    gigabytes takes seconds."""
    status = file.stat()
    about = {"file": str(file.resolve()), "bytes": status.st_size, "modified": status.st_mtime_ns}
    return str(measured_once("digests", about, partial(file_sha256, file)))[:16]


def read_metadata(file: Path) -> tuple[dict[str, Any], Any]:
    """Return a file's metadata and its tensors. Raises ValueError if it is truncated or damaged."""
    from gguf import GGUFReader  # an optional package that takes a second to import

    try:
        reader = GGUFReader(file)
        return {name: field.contents() for name, field in reader.fields.items()}, reader.tensors
    except Exception as error:  # from NumPy or the reader: a damaged file fails anywhere
        raise ValueError(f"target {file} cannot be read, it is damaged or incomplete: {error}") from error


def convert(file: Path, dtype: torch.dtype, directory: Path) -> None:
    metadata, tensors = read_metadata(file)
    check_kind(file, metadata)
    count = sum(int(tensor.n_elements) for tensor in tensors if tensor.name not in UNUSED)
    need = count * dtype.itemsize
    part = directory.with_suffix(".part")  # a fixed name, so that the rest of a killed conversion is removed
    shutil.rmtree(part, ignore_errors=True)  # before the disk is asked what is free
    if shutil.disk_usage(directory.parent).free < 1.1 * need:
        raise OSError(f"it needs {need / 1e6:,.0f} MB, more than the disk has free")
    note = f"{file.name} is dequantized once into {directory} ({need / 1e6:,.0f} MB)"
    print(note, file=sys.stderr, flush=True)  # programs write texts to stdout
    try:  # first, because it fails fast
        tokenizer = build_tokenizer(metadata, str(file))
    except ValueError:
        raise
    except Exception as error:  # a key that is missing, or a vocabulary that tokenizers refuses
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"target {file}: its tokenizer cannot be read ({reason}): give the model as a directory or a Hub id"
        ) from error
    model = load(file, dtype, metadata, tensors, count)
    try:
        model.save_pretrained(part)
        tokenizer.save_pretrained(part)
        (part / RECORD).write_text(json.dumps(describe(file, metadata, tensors), indent=1) + "\n")
        for weights in part.glob("*.safetensors"):
            weights.chmod((part / RECORD).stat().st_mode)  # as save_tensors: the cache may serve several users
        os.replace(part, directory)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def check_kind(file: Path, metadata: dict[str, Any]) -> None:
    """Raise ValueError for a file that does not contain a whole language model."""
    parts, kind = metadata.get("split.count", 1), metadata.get("general.type", "model")
    if parts > 1:
        raise ValueError(
            f"target {file} is one of {parts} parts: join them with llama-gguf-split --merge FIRST_PART OUTPUT"
        )
    if kind != "model" or metadata.get("general.architecture") == "clip":
        raise ValueError(f"target {file} is not a language model, but belongs to one ({kind}): give the model's file")


def describe(file: Path, metadata: dict[str, Any], tensors: Any) -> dict[str, Any]:
    """Return what the model card of a head states about the GGUF file of its target."""
    types = Counter[str]()
    for tensor in tensors:
        types[tensor.tensor_type.name] += int(tensor.n_elements)
    total = sum(types.values())
    shares = ", ".join(f"{name} {100 * n / total:.0f} %" for name, n in types.most_common() if n >= total / 200)
    return {"file": file.name, "sha256": digest_of(file), "weights": shares, "license": metadata.get("general.license")}


def load(file: Path, dtype: torch.dtype, metadata: dict[str, Any], tensors: Any, count: int) -> PreTrainedModel:
    """Load the model in `dtype`, without the attributes of a quantized one, which transformers refuses to save. count:
    number of weights in the file."""
    architecture = metadata.get("general.architecture")
    try:
        with suppress_logging():
            loaded, report = AutoModelForCausalLM.from_pretrained(
                file.parent, gguf_file=file.name, dtype=dtype, output_loading_info=True
            )
    except Exception as error:  # from transformers or gguf: an unsupported architecture fails in several ways
        reason = str(error).strip().split("\n")[0]
        if "ignore_mismatched_sizes" in reason:  # a setting that users do not have, and a report that is not shown
            reason = "its weights do not fit its sizes"
        raise ValueError(
            f"target {file}: transformers cannot read its architecture {architecture!r} from GGUF ({reason}): give the model "
            "as a directory or a Hub id"
        ) from error
    wrong = [*report["missing_keys"], *report["mismatched_keys"], *report["unexpected_keys"]]
    if not loaded.config.tie_word_embeddings or wrong != ["lm_head.weight"]:
        check(not wrong, file, f"these weights do not fit: {', '.join(map(str, wrong[:4]))}")
    state = {name: weight.to(dtype) for name, weight in loaded.state_dict().items()}
    read = sum({weight.data_ptr(): weight.numel() for weight in loaded.state_dict().values()}.values())
    check(read == count, file, f"it has {count:,} weights, and transformers loads {read:,}")
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = dtype
    check_rope(file, metadata, tensors, config)
    set_attention(file, metadata, config)
    rows = config.get_text_config().vocab_size
    tokens = len(metadata["tokenizer.ggml.tokens"])
    check(tokens <= rows, file, f"its tokenizer has {tokens} tokens and its model {rows}")
    ends = end_tokens(metadata)
    config.eos_token_id = ends[0] if len(ends) == 1 else ends or None
    with torch.device("meta"):
        model = type(loaded)(config)
    # Older versions of transformers treat the rotated part of a head as all of it.
    misfits = [name for name, weight in model.state_dict().items() if weight.shape != state[name].shape]
    check(not misfits, file, f"these weights do not fit its sizes: {', '.join(misfits[:4])}")
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    facts = {key: getattr(config, key, None) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model.generation_config = GenerationConfig(**{key: value for key, value in facts.items() if value is not None})
    return model


@contextlib.contextmanager
def suppress_logging() -> Iterator[None]:
    """Suppress transformers' progress bars and warnings about what is checked here."""
    level, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if has_bars:
            logging.enable_progress_bar()


def record_of(directory: str | Path) -> dict[str, Any] | None:
    """Return what `describe` recorded about the file of a converted directory; None for any other directory."""
    file = Path(directory) / RECORD
    return json.loads(file.read_text()) if file.is_file() else None


def check(right: bool, file: Path, what: str) -> None:
    if not right:
        raise ValueError(
            f"target {file}: {what}, so it cannot be read as intended; give the model as a directory or Hub id"
        )


def check_rope(file: Path, metadata: dict[str, Any], tensors: Any, config: Any) -> None:
    """Set the file's rotary positions, of which transformers only reads the base. Raises ValueError if they are not
    supported."""
    name = metadata["general.architecture"]
    width = metadata.get(f"{name}.rope.dimension_count")
    has = config.head_dim if getattr(config, "head_dim", None) else config.hidden_size // config.num_attention_heads
    partial = (getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor") or 1.0
    check(width in (None, int(has * partial)), file, f"it rotates {width} of the {has} dimensions of a head")
    long = [tensor.name for tensor in tensors if tensor.name.startswith("rope_factors")]
    check(not long, file, f"its rope factors ({', '.join(long)}) are not supported")
    scaling = f"{name}.rope.scaling."
    factor = metadata.get(f"{scaling}factor") or metadata.get(f"{name}.rope.scale_linear") or 1.0  # the older name
    kind = metadata.get(f"{scaling}type", "none" if factor == 1 else "linear")  # llama.cpp's default
    if kind != "none":
        check(kind in ("linear", "yarn"), file, f"its rope scaling {kind} is not supported")
        settings = {"rope_type": kind, "factor": factor}
        if kind == "yarn":
            original = metadata.get(f"{scaling}original_context_length")
            settings["original_max_position_embeddings"] = original or config.max_position_embeddings
        # Gemma 3 has two kinds of rope, and scales only that of full attention.
        config.rope_parameters.get("full_attention", config.rope_parameters).update(settings)
    factors = next((tensor.data for tensor in tensors if tensor.name == "rope_freqs.weight"), None)
    if factors is not None:
        config.rope_parameters = config.rope_parameters | llama3_scaling(file, torch.tensor(factors.copy()), config)


def set_attention(file: Path, metadata: dict[str, Any], config: Any) -> None:
    """Set windows and scales of attention for which transformers uses a default of the architecture."""
    name = metadata["general.architecture"]
    window = metadata.get(f"{name}.attention.sliding_window")
    if name == "phi3":
        config.sliding_window = window or None
    if name == "gemma3":
        check(bool(window), file, "it has no sliding window")
    if name in ("gemma2", "gemma3"):
        # The 27B model, which llama.cpp also recognizes by its number of layers: the file does not state it.
        largest = config.num_hidden_layers == {"gemma2": 46, "gemma3": 62}[name]
        heads = config.num_attention_heads
        config.query_pre_attn_scalar = config.hidden_size // heads if largest else config.head_dim


def llama3_scaling(file: Path, factors: torch.Tensor, config: Any) -> dict[str, Any]:
    """Return the rope scaling of Llama 3.1 and later, which a GGUF file stores as one factor per frequency."""
    has = config.head_dim if getattr(config, "head_dim", None) else config.hidden_size // config.num_attention_heads
    wave = 2 * torch.pi * config.rope_parameters["rope_theta"] ** (torch.arange(0, has, 2) / has)
    factor, low, high, original = float(factors.max()), 1.0, 4.0, 8192
    smooth = ((original / wave - low) / (high - low)).clamp(0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    check(
        factors.shape == expected.shape and torch.allclose(factors.float(), expected.float(), rtol=1e-3),
        file,
        "its rope factors are not those of Llama 3",
    )
    numbers = {"low_freq_factor": low, "high_freq_factor": high, "original_max_position_embeddings": original}
    return {"rope_type": "llama3", "factor": factor, **numbers}
