"""What a run records of itself: versions, device, parameters, command."""

import datetime
import importlib.metadata
import platform
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from foredraft.__main__ import PROGRAMS
from foredraft.heads.base import DraftHead
from foredraft.heads.caches.device import device_name
from foredraft.heads.target_model import Target
from foredraft.train.runtime.memory import peak_memory


def versions() -> dict[str, str]:
    """Return versions of the packages that figures depend on; only training needs accelerate."""
    names = [name for name in ("torch", "transformers", "accelerate", "safetensors") if find_spec(name)]
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in names}


def facts_of_measurement(target: Target) -> dict[str, Any]:
    """Return the conditions of a measurement, which a reader needs to compare numbers."""
    return {
        "target": target.name,
        "device": device_name(target.device),
        "dtype": str(target.dtype).removeprefix("torch."),
        "versions": versions(),
        "date": datetime.date.today().isoformat(),
        "command": command_line(),
    }


def command_line() -> str:
    """Return the command of this process with its quotes, and without the place of the program `foredraft`."""
    program, _, name = sys.argv[0].rpartition(" ")  # foredraft/__main__.py adds the name
    is_ours = name in PROGRAMS and Path(program).stem in ("foredraft", "__main__")
    typed = ["foredraft", name] if is_ours else ["python", sys.argv[0]]
    return shlex.join([*typed, *sys.argv[1:]])


def facts_of_run(head: DraftHead, target: Target) -> dict[str, Any]:
    return {
        "head": head.kind,
        **({} if target.gguf is None else {"gguf": target.gguf}),
        "parameters": sum(parameter.numel() for parameter in head.parameters()),
        "peak_memory_bytes": peak_memory(target.device),
        **facts_of_measurement(target),
    }
