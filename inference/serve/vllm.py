"""The same API by vLLM (docs.vllm.ai, `vllm serve`), which drafts with the exported head."""

import os
import shlex
import shutil
import tempfile
from pathlib import Path

from foredraft.heads.checkpoint import read_head, write_head
from foredraft.heads.formats.engines import vllm
from foredraft.heads.target import Target


def find_vllm() -> str:
    """Raises ValueError where it is not installed."""
    found = shutil.which("vllm")
    if found is None:
        raise ValueError(
            "engine=vllm needs vLLM, and there is no command `vllm`: pip install vllm, or engine=foredraft"
        )
    return found


def export(target: Target, drafter: str | Path, folder: str | Path) -> list[str]:
    """Write the head named `drafter` in the layout that vLLM reads; the command that loads it. Raises ValueError for a
    drafter that vLLM does not have."""
    if "/" not in str(drafter) and not Path(drafter).is_dir():
        raise ValueError(f"drafter.spec={drafter}: engine=vllm drafts with a head (drafter=head) or not (drafter=none)")
    head = read_head(drafter, target)
    found = vllm(head, target)
    write_head(head, folder, target, found.layout, found.layout.weight_files)
    return shlex.split(found.command(head, shlex.quote(target.checkpoint), str(folder)))


def serve_command(
    target: Target, drafter: str, name: str, host: str, port: int, max_num_seqs: int, folder: Path | None = None
) -> list[str]:
    """The arguments of vLLM, after the head named `drafter` has been written to `folder`, or a new temporary one; "none"
    decodes plainly. Raises ValueError as `export`."""
    command = ["vllm", "serve", target.checkpoint]
    if drafter != "none":
        command = export(target, drafter, folder or tempfile.mkdtemp(prefix="foredraft-vllm-"))
    dtype = str(target.dtype).removeprefix("torch.")
    rest = {"dtype": dtype, "served-model-name": name, "host": host, "port": port, "max-num-seqs": max_num_seqs}
    return command + [word for key, value in rest.items() for word in (f"--{key}", str(value))]


def become(program: str, command: list[str], api_key: str | None) -> None:
    """vLLM in the place of this process, whose memory is free again; what stops this process stops vLLM. The key goes by the
    environment: arguments show in ps."""
    environment = dict(os.environ) if api_key is None else {**os.environ, "VLLM_API_KEY": api_key}
    os.execve(program, command, environment)
