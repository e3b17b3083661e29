"""The same API with vLLM (docs.vllm.ai, `vllm serve`), which drafts with the exported head."""

import os
import shlex
import shutil
import tempfile
from pathlib import Path

from foredraft.heads.checkpoint import read_head, write_head
from foredraft.heads.formats.engines import vllm
from foredraft.heads.target import Target


def find_vllm() -> str:
    """Return the path of the command. Raises ValueError if vLLM is not installed."""
    found = shutil.which("vllm")
    if found is None:
        raise ValueError("engine=vllm needs the command `vllm`: pip install vllm, or set engine=foredraft")
    return found


def export(target: Target, drafter: str | Path, folder: str | Path) -> list[str]:
    """Write the head named `drafter` in vLLM's layout, and return the command that loads it. Raises ValueError for a drafter
    that vLLM does not support."""
    if "/" not in str(drafter) and not Path(drafter).is_dir():
        raise ValueError(
            f"drafter.path={drafter}: engine=vllm drafts with a head (drafter=DIRECTORY) or not (drafter=none)"
        )
    head = read_head(drafter, target)
    found = vllm(head, target)
    write_head(head, folder, target, found.layout, found.layout.weight_files)
    return shlex.split(found.command(head, shlex.quote(target.checkpoint), str(folder)))


def serve_command(
    target: Target, drafter: str, name: str, host: str, port: int, max_num_seqs: int, folder: Path | None = None
) -> list[str]:
    """Write the head named `drafter` to `folder` (or a new temporary one), and return vLLM's arguments. "none" is the
    baseline. Raises ValueError like `export`."""
    command = ["vllm", "serve", target.checkpoint]
    if drafter != "none":
        command = export(target, drafter, folder or tempfile.mkdtemp(prefix="foredraft-vllm-"))
    dtype = str(target.dtype).removeprefix("torch.")
    rest = {"dtype": dtype, "served-model-name": name, "host": host, "port": port, "max-num-seqs": max_num_seqs}
    return command + [word for key, value in rest.items() for word in (f"--{key}", str(value))]


def exec_server(program: str, command: list[str], api_key: str | None) -> None:
    """Replace this process by vLLM, which frees its memory; signals reach vLLM directly. The key is passed by the
    environment, because other users can see arguments."""
    environment = dict(os.environ) if api_key is None else {**os.environ, "VLLM_API_KEY": api_key}
    os.execve(program, command, environment)
