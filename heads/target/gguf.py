"""Targets from GGUF files: dequantised once into a directory as transformers saves it, under the cache.

    converted(FILE, dtype) -> cache/gguf/<digest of the file>-<dtype>/{config.json, model.safetensors, tokenizer.json, ...}

transformers reads the tensors. What it leaves out of account is done or refused here: how the tokenizer splits words, rope
scaling, end tokens, and tensors that it has no place for.
"""

import contextlib
import hashlib
import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.utils import logging

from foredraft.heads.cache_directory import cache_directory
from foredraft.heads.target.gguf_attention import check, check_rope, set_attention
from foredraft.heads.target.gguf_tokenizer import build_tokenizer, end_tokens

MAGIC = b"GGUF"
VERSION = 2  # of what conversion makes of a file; a higher one converts again
RECORD = "gguf.json"  # beside the converted weights: file, digest, quantisation
UNUSED = ("rope_freqs.weight",)  # tensors that are no weights


def converted(file: Path, dtype: torch.dtype) -> Path:
    """The directory with this file's model in `dtype`, made on first use. Raises ValueError for a file that is none, or that
    cannot be read as its authors meant it."""
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
    except (OSError, SafetensorError) as error:  # the latter where a disk fills up
        reason = str(error).replace("No space", "no space")  # train/cli.py takes those words for a run's own disk
        raise ValueError(
            f"target {file} cannot be kept in {folder} ({reason}): mend that, or name another folder by the variable "
            "FOREDRAFT_CACHE"
        ) from None
    return directory


def check_file(file: Path) -> None:
    if not file.is_file():
        raise ValueError(f"target {file} does not exist: give a GGUF file, a directory, or a Hub id")
    with file.open("rb") as opened:
        begins = opened.read(4)
    if begins != MAGIC:
        raise ValueError(f"target {file} is no GGUF file: its first bytes are {begins!r}, not {MAGIC!r}")
    for package in ("gguf", "accelerate"):  # transformers needs both to read GGUF
        if find_spec(package) is None:
            raise ValueError(f"target {file} needs the package {package}: pip install 'foredraft[gguf]'")


def digest_of(file: Path) -> str:
    """The beginning of the SHA-256 of its bytes, kept for as long as its size and time of change stay the same: a file of
    gigabytes would take seconds at every start."""
    status = file.stat()
    state = f"{file.resolve()} {status.st_size} {status.st_mtime_ns}"
    note = cache_directory() / "gguf" / "digests" / hashlib.sha256(state.encode()).hexdigest()[:16]
    if note.is_file() and (kept := note.read_text().strip()):
        return kept
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()[:16]
    note.parent.mkdir(parents=True, exist_ok=True)
    note.write_text(digest)
    return digest


def read_metadata(file: Path) -> tuple[dict[str, Any], Any]:
    """A file's metadata and its tensors. Raises ValueError where it is cut short or damaged."""
    from gguf import GGUFReader  # an extra, and a second to import

    try:
        reader = GGUFReader(file)
        return {name: field.contents() for name, field in reader.fields.items()}, reader.tensors
    except Exception as error:  # of NumPy, of its own: a damaged file fails anywhere
        raise ValueError(f"target {file} cannot be read, it is damaged or incomplete: {error}") from error


def convert(file: Path, dtype: torch.dtype, directory: Path) -> None:
    metadata, tensors = read_metadata(file)
    check_kind(file, metadata)
    count = sum(int(tensor.n_elements) for tensor in tensors if tensor.name not in UNUSED)
    need = count * dtype.itemsize
    if shutil.disk_usage(directory.parent).free < 1.1 * need:
        raise OSError(f"it takes {need / 1e6:,.0f} MB, and the disk has no such space")
    note = f"{file.name} is dequantised once into {directory} ({need / 1e6:,.0f} MB)"
    print(note, file=sys.stderr, flush=True)  # programs write texts to stdout
    tokenizer = build_tokenizer(metadata, str(file))  # first, since what it refuses is refused in no time
    model = load(file, dtype, metadata, tensors, count)
    part = directory.with_suffix(".part")  # always the same, so that what a killed conversion left is removed
    shutil.rmtree(part, ignore_errors=True)
    try:
        model.save_pretrained(part)
        tokenizer.save_pretrained(part)
        (part / RECORD).write_text(json.dumps(describe(file, metadata, tensors), indent=1) + "\n")
        os.replace(part, directory)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def check_kind(file: Path, metadata: dict[str, Any]) -> None:
    """Raise ValueError for a file that holds no whole language model."""
    parts, kind = metadata.get("split.count", 1), metadata.get("general.type", "model")
    if parts > 1:
        raise ValueError(
            f"target {file} is one of {parts} parts: join them by llama-gguf-split --merge FIRST_PART WHOLE"
        )
    if kind != "model" or metadata.get("general.architecture") == "clip":
        raise ValueError(
            f"target {file} holds no language model, but what belongs to one ({kind}): give the model's file"
        )


def describe(file: Path, metadata: dict[str, Any], tensors: Any) -> dict[str, Any]:
    """What the card of a head says of the file that its target came from."""
    types = Counter[str]()
    for tensor in tensors:
        types[tensor.tensor_type.name] += int(tensor.n_elements)
    total = sum(types.values())
    shares = ", ".join(f"{name} {100 * n / total:.0f} %" for name, n in types.most_common() if n >= total / 200)
    return {"file": file.name, "sha256": digest_of(file), "weights": shares, "license": metadata.get("general.license")}


def load(file: Path, dtype: torch.dtype, metadata: dict[str, Any], tensors: Any, count: int) -> PreTrainedModel:
    """The model in `dtype`, without the marks of a quantised one, which transformers refuses to save. count: of weights in
    the file."""
    architecture = metadata.get("general.architecture")
    try:
        with quiet():
            loaded, report = AutoModelForCausalLM.from_pretrained(
                file.parent, gguf_file=file.name, dtype=dtype, output_loading_info=True
            )
    except Exception as error:  # of transformers, of gguf: an unknown architecture fails in several ways
        reason = str(error).strip().split("\n")[0]
        raise ValueError(
            f"target {file}: transformers cannot read its architecture {architecture!r} from GGUF ({reason}): give the model "
            "as a directory or a Hub id"
        ) from error
    wrong = [*report["missing_keys"], *report["mismatched_keys"], *report["unexpected_keys"]]
    if not loaded.config.tie_word_embeddings or wrong != ["lm_head.weight"]:
        check(not wrong, file, f"these weights do not fit: {', '.join(map(str, wrong[:4]))}")
    state = {name: weight.to(dtype) for name, weight in loaded.state_dict().items()}
    read = sum({weight.data_ptr(): weight.numel() for weight in loaded.state_dict().values()}.values())
    check(read == count, file, f"it holds {count:,} weights, and transformers has a place for {read:,}")
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
    # Older versions of transformers take the rotated part of a head for all of it.
    misfits = [name for name, weight in model.state_dict().items() if weight.shape != state[name].shape]
    check(not misfits, file, f"these weights do not fit its sizes: {', '.join(misfits[:4])}")
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    facts = {key: getattr(config, key, None) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model.generation_config = GenerationConfig(**{key: value for key, value in facts.items() if value is not None})
    return model


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the bars and warnings of transformers about what is checked here."""
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
    """What `describe` said of the file that a converted directory came from; None for any other."""
    file = Path(directory) / RECORD
    return json.loads(file.read_text()) if file.is_file() else None
