"""Check that llama.cpp's server accepts a head's drafts where we do. Both decode the same prompts over one GGUF file.

The server reports the text and the number of accepted drafts: these are compared, greedily, text by text. In float32 they
must be equal. Otherwise tokens per forward must agree to 10 % (of some hundred steps; to 3 % over thousands,
tests/serving/test_llamacpp.py): llama.cpp also rounds the inputs of products over a file in another number format, so texts
part at near-ties. And it decodes the accepted drafts of a recurrent target again after a rejection, which changes its counts.
"""

import json
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch

from foredraft.heads.base import BlockHead, DraftHead
from foredraft.heads.checkpoint import load_head
from foredraft.heads.formats.gguf.tensors import open_gguf
from foredraft.heads.target_model import Target
from foredraft.inference.drafters import drafter_for
from foredraft.inference.evaluation.measure import run, texts
from foredraft.inference.serve.other_engines import find_llamacpp, llamacpp_command

DEPTH = 3  # of a chain; a block drafter drafts all of its block
TOLERANCE = 0.1  # relative difference in tokens per forward, if they need not be equal
TIMEOUT = 300  # seconds for the server to load
EXACT = ["-fa", "off", "-ctk", "f32", "-ctv", "f32", "-ctkd", "f32", "-ctvd", "f32"]


class Text(NamedTuple):
    tokens: list[int]
    accepted: int  # drafts


def check(trained: str | Path, target: Target, file: Path, prompts: list[list[int]], new_tokens: int) -> str:
    """Return a sentence on what was equal. Raise ValueError with the first difference, or without a server."""
    in_float32 = all(tensor.tensor_type.name == "F32" for tensor in open_gguf(file).tensors)
    head = load_head(trained, target, dtype=target.dtype)  # as the file has it
    depth = head.depth if isinstance(head, BlockHead) else DEPTH
    ours = [decode_here(head, target, row, depth, new_tokens) for row in prompts]
    theirs = decode_llamacpp(trained, target, file, prompts, depth, new_tokens)
    difference, lengths = first_difference(ours, theirs), (acceptance_length(ours), acceptance_length(theirs))
    exact = target.dtype == torch.float32 and target.capabilities.trees and in_float32
    figures = f"{lengths[1]:.2f} tokens per forward over {file.name} in llama.cpp, {lengths[0]:.2f} here"
    if difference and (exact or abs(lengths[1] / lengths[0] - 1) > TOLERANCE):
        raise ValueError(f"parity gate: {difference}; {figures}")
    equal = f" ({difference})" if difference else ", every text and number of accepted drafts equal"
    return f"llama.cpp accepts as we do: {figures}{equal}"


def first_difference(ours: list[Text], theirs: list[Text]) -> str:
    """Describe the first difference of llama.cpp's texts and ours; "" if there is none."""
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        for place, (our, their) in enumerate(zip_longest(a.tokens, b.tokens)):
            if our != their:
                return f"at token {place} of text {number} llama.cpp chooses {their}, and we {our}"
        if a.accepted != b.accepted:
            return f"in text {number} llama.cpp accepts {b.accepted} drafts, and we {a.accepted}"
    return ""


def acceptance_length(decoded: list[Text]) -> float:
    """Return tokens per forward; a text's first token is from its prompt's forward."""
    tokens = sum(len(text.tokens) - 1 for text in decoded)
    return tokens / (tokens - sum(text.accepted for text in decoded))


def decode_here(head: DraftHead, target: Target, row: list[int], depth: int, new_tokens: int) -> Text:
    drafter = drafter_for(head, target, width=1, depth=depth, nodes=depth + 1, min_probability=0)
    out = run(target, drafter, [row], max_new_tokens=new_tokens, eos_token_id=-1)
    accepted = [count - 1 for generation in out for step in generation.steps for count in step.emitted]
    return Text(texts(out)[0], sum(accepted))


def decode_llamacpp(
    trained: str | Path, target: Target, file: Path, prompts: list[list[int]], depth: int, new_tokens: int
) -> list[Text]:
    settings: dict[str, Any] = {"n_predict": new_tokens, "temperature": 0, "top_k": 1, "ignore_eos": True}
    settings |= {"return_tokens": True, "cache_prompt": False}
    with serving(trained, target, file, depth) as address:
        answers = [json.loads(ask(f"{address}/completion", settings | {"prompt": row})) for row in prompts]
    return [Text(answer["tokens"], answer["timings"].get("draft_n_accepted", 0)) for answer in answers]


@contextmanager
def serving(trained: str | Path, target: Target, file: Path, depth: int) -> Iterator[str]:
    """Yield the address of llama.cpp's server, which drafts with this head. Head, keys and values are in float32."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    place = ("parity", "127.0.0.1", port, 1)
    command = llamacpp_command(target, str(file), str(trained), *place, dtype="float32")
    if "--spec-draft-n-max" in command:
        command[command.index("--spec-draft-n-max") + 1] = str(depth)
    threads = ["-t", str(torch.get_num_threads()), "--poll", "0"]  # polling threads take cores from others
    program = [*find_llamacpp(), *command, *EXACT, *threads]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(program, stdout=log, stderr=subprocess.STDOUT)
        try:
            wait_for(f"http://127.0.0.1:{port}", process, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait()


def wait_for(address: str, process: subprocess.Popen, log: Any) -> None:
    """Wait until the server answers. Raise ValueError with the end of its log if it does not start."""
    deadline = time.monotonic() + TIMEOUT
    while process.poll() is None and time.monotonic() < deadline:
        with suppress(OSError):
            ask(f"{address}/health")
            return
        time.sleep(0.2)
    log.seek(0)
    raise ValueError(f"llama.cpp's server did not start: {log.read()[-500:]}")


def ask(address: str, body: dict[str, Any] | None = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        return answer.read().decode()
