"""Resolve a target's path: a directory, a Hub id, a GGUF file here or on the Hub, or a package of the index."""

from pathlib import Path

import torch
from huggingface_hub import hf_hub_download

from foredraft.heads.target_model import gguf, packages
from foredraft.heads.target_model.loading import check_path, first_line, has_bfloat16_products, resolve_dtype


def resolve_path(
    path: str | Path,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    gguf_file: str | None = None,
    revision: str | None = None,
) -> str:
    """Return the directory or Hub id for transformers. A GGUF file is first dequantized into a directory, in `dtype`; "auto"
    is bfloat16 if the device supports it. Raises ValueError with the path if there is no model."""
    file = gguf_of(str(path), gguf_file, revision)
    if file is None:
        return check_path(path)
    if isinstance(dtype, str) and dtype == "auto":
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        dtype = torch.bfloat16 if has_bfloat16_products(device) else torch.float32
    return str(gguf.converted(file, resolve_dtype(dtype) if isinstance(dtype, str) else dtype))


def full_name(path: str | Path, gguf_file: str | None = None) -> str:
    """Combine both to one path that names the model."""
    return str(path) if gguf_file is None else f"{path}/{gguf_file}"


def gguf_of(path: str, gguf_file: str | None, revision: str | None) -> Path | None:
    """Return the GGUF file that a path names, on this machine; None if it names none."""
    if path.startswith(packages.PREFIX):
        return packages.fetch(path)
    path = full_name(path, gguf_file)
    if Path(path).suffix != ".gguf":
        if gguf_file is not None:
            raise ValueError(f"target.gguf_file={gguf_file} is not the name of a GGUF file")
        return None
    if Path(path).is_file() or path.count("/") < 2 or path.startswith((".", "/", "~")):
        return Path(path).expanduser()
    owner, repository, name = path.split("/", 2)
    try:
        return Path(hf_hub_download(f"{owner}/{repository}", name, revision=revision, etag_timeout=10))
    except Exception as error:  # from the network, from the Hub, or from one of two HTTP libraries
        raise ValueError(
            f"target {path} is not a file, and the Hub does not provide it: {first_line(error)}"
        ) from error
