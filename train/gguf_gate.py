"""Does llama.cpp's server accept a head's drafts where we do? Both decode the same prompts over one GGUF of the target.

Its server tells no draft logits. It tells the text, and how many drafts were accepted at each position of a chain: these are
compared, greedily, for one text after the other. In float32 they must be equal. Elsewhere tokens per forward must agree to
10 % (of some hundred steps; to 3 % over thousands, tests/serving/test_llamacpp.py): over a file in another number format
llama.cpp rounds what goes into a product as well, so texts part at near-ties, and of a recurrent target it decodes accepted
drafts again where others were rejected, and counts them otherwise.
"""

import json
import re
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from foredraft.heads.base import BlockHead, DraftHead
from foredraft.heads.checkpoint import load_head
from foredraft.heads.formats.gguf.tensors import package
from foredraft.heads.target import Target
from foredraft.inference.drafters import drafter_for
from foredraft.inference.evaluation.measure import run, texts
from foredraft.inference.serve.other_engines import find_llamacpp, llamacpp_command

DEPTH = 3  # of a chain; a block drafter drafts all of its block
CLOSE = 0.1  # of tokens per forward, where they need not be equal
PATIENCE = 300  # seconds, for the server to load
EXACT = ["-fa", "off", "-ctk", "f32", "-ctv", "f32", "-ctkd", "f32", "-ctvd", "f32"]
COUNTS = re.compile(r'^llamacpp:spec_decode_num_accepted_tokens_per_pos_total\{position="\d+"\} (\d+)', re.MULTILINE)


class Text(NamedTuple):
    tokens: list[int]
    accepted: list[int]  # how many steps accepted at least d drafts, d = 1 .. depth


def check(trained: str | Path, target: Target, file: Path, prompts: list[list[int]], new_tokens: int) -> str:
    """Return a sentence on what was equal. Raise ValueError with the first difference, or without a server."""
    head = load_head(trained, target)
    depth = head.depth if isinstance(head, BlockHead) else DEPTH
    ours = [decode_here(head, target, row, depth, new_tokens) for row in prompts]
    theirs = decode_llamacpp(trained, target, file, prompts, depth, new_tokens)
    place, gains = first_difference(ours, theirs), (gained(ours), gained(theirs))
    exact = target.dtype == torch.float32 and target.supports_trees
    exact = exact and all(tensor.tensor_type.name == "F32" for tensor in package().GGUFReader(file).tensors)
    figures = f"{gains[1]:.2f} tokens per forward over {file.name} in llama.cpp, {gains[0]:.2f} here"
    if place and (exact or abs(gains[1] / gains[0] - 1) > CLOSE):
        raise ValueError(f"parity gate: {place}; {figures}")
    return f"llama.cpp accepts as we do: {figures}{f' ({place})' if place else ', every text and position equal'}"


def first_difference(ours: list[Text], theirs: list[Text]) -> str:
    """Describe the first difference of llama.cpp's texts and ours; "" if there is none."""
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        place = next((i for i, pair in enumerate(zip(a.tokens, b.tokens, strict=True)) if pair[0] != pair[1]), None)
        if place is not None:
            return f"at token {place} of text {number} llama.cpp chooses {b.tokens[place]}, and we {a.tokens[place]}"
        depth = next(
            (d for d, pair in enumerate(zip(a.accepted, b.accepted, strict=True), 1) if pair[0] != pair[1]), None
        )
        if depth is not None:
            counts = b.accepted[depth - 1], a.accepted[depth - 1]
            return f"at depth {depth} of text {number} llama.cpp accepts {counts[0]} drafts, and we {counts[1]}"
    return ""


def gained(decoded: list[Text]) -> float:
    """Return tokens per forward; a text's first token is from its prompt's forward."""
    tokens = sum(len(text.tokens) - 1 for text in decoded)
    return tokens / (tokens - sum(sum(text.accepted) for text in decoded))


def decode_here(head: DraftHead, target: Target, row: list[int], depth: int, new_tokens: int) -> Text:
    drafter = drafter_for(head, target, width=1, depth=depth, nodes=depth + 1, min_probability=0)
    out = run(target, drafter, [row], max_new_tokens=new_tokens, eos_token_id=-1)
    steps = [count - 1 for generation in out for step in generation.steps for count in step.emitted]
    return Text(texts(out)[0], [sum(count >= d for count in steps) for d in range(1, depth + 1)])


def decode_llamacpp(
    trained: str | Path, target: Target, file: Path, prompts: list[list[int]], depth: int, new_tokens: int
) -> list[Text]:
    settings: dict[str, Any] = {"n_predict": new_tokens, "temperature": 0, "top_k": 1, "ignore_eos": True}
    settings |= {"return_tokens": True, "cache_prompt": False}
    decoded, before = [], [0] * depth
    with serving(trained, target, file, depth) as address:
        for row in prompts:
            tokens = json.loads(ask(f"{address}/completion", settings | {"prompt": row}))["tokens"]
            counts = [int(count) for count in COUNTS.findall(ask(f"{address}/metrics"))] or [0] * depth
            decoded.append(Text(tokens, [new - old for new, old in zip(counts, before, strict=True)]))
            before = counts
    return decoded


@contextmanager
def serving(trained: str | Path, target: Target, file: Path, depth: int, exact: bool = True) -> Iterator[str]:
    """Yield the address of llama.cpp's server, which drafts with this head until the block is left; "none" drafts nothing.
    exact: head, keys and values in float32, else in its usual half precision."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    place, dtype = ("parity", "127.0.0.1", port, 1), "float32" if exact else "float16"
    command = llamacpp_command(target, str(file), str(trained), *place, dtype=dtype)
    if "--spec-draft-n-max" in command:
        command[command.index("--spec-draft-n-max") + 1] = str(depth)
    address = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile("w+") as log:
        threads = ["-t", str(torch.get_num_threads()), "--poll", "0"]  # polling threads take cores from others
        program = [*find_llamacpp(), *command, *(EXACT if exact else []), *threads, "--metrics"]
        process = subprocess.Popen(program, stdout=log, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + PATIENCE
            while not healthy(address):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise ValueError(f"llama.cpp's server did not start: {log.read()[-500:]}")
                time.sleep(0.2)
            yield address
        finally:
            process.terminate()
            process.wait()


def healthy(address: str) -> bool:
    try:
        return bool(ask(f"{address}/health"))
    except (urllib.error.URLError, ConnectionError):
        return False


def ask(address: str, body: dict[str, Any] | None = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        return answer.read().decode()
