"""Decode texts of a server's log again with one head, to compare it with others (learn.py):

python -m foredraft.train.judge '{"target": .., "head": DIRECTORY, "files": {NAME: FILE}, "output": FILE}'

The output has, for each named file, the new tokens and target forwards of each text, and under "train" the arguments with
which `foredraft train` continues the training of this head.
"""

import json
import operator
import pkgutil
import sys
from pathlib import Path
from typing import Any

from foredraft.heads.base import BlockHead, DraftHead
from foredraft.heads.dflash import DFlashHead
from foredraft.heads.eagle3 import Eagle3Head
from foredraft.heads.target_model import Target
from foredraft.inference.drafters import Drafter, load_drafter, tree_of
from foredraft.inference.engine import Engine
from foredraft.inference.request import Request
from foredraft.inference.sampling import SamplingParams
from foredraft.train.runtime.locks import write_atomically


def judge(target: dict[str, Any], head: str, files: dict[str, str], output: str) -> None:
    settings = dict(target)
    loaded = pkgutil.resolve_name(settings.pop("_target_"))(**settings)
    tree = tree_of(load_drafter(head, loaded))
    assert tree is not None, f"{head} is not a head"
    result: dict[str, Any] = {name: decode(loaded, tree, rows_of(Path(file))) for name, file in files.items()}
    result["train"] = train_overrides(tree.head)
    write_atomically(Path(output), json.dumps(result))


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def decode(target: Target, drafter: Drafter, rows: list[dict[str, Any]]) -> list[list[int]]:
    """Return the new tokens and target forwards of each text, decoded again. A text that cannot be is left out."""
    engine, counts = Engine(target, drafter, max_num_seqs=8), dict[Request, list[int]]()
    for row in rows:
        try:
            request = request_of(row)
            engine.add(request)
        except (ValueError, TypeError, KeyError) as error:  # of another target, for example
            print(f"a text is left out: {error}")
        else:
            counts[request] = [0, 0]
    while engine.has_work:
        for output in engine.step():
            if output.accepted is not None:
                counts[output.request][0] += len(output.tokens)
                counts[output.request][1] += 1
    return [pair for pair in counts.values() if pair[1]]


def request_of(row: dict[str, Any]) -> Request:
    """Return the request that created the text. Raises ValueError, TypeError or KeyError."""
    params = SamplingParams(temperature=float(row.get("temperature", 1.0)))
    prompt, ids = ([operator.index(token) for token in row[name]] for name in ("prompt_ids", "ids"))
    return Request(prompt, params, len(ids), operator.index(row.get("seed", 0)))


def train_overrides(head: DraftHead) -> list[str]:
    """Return arguments of `foredraft train` to continue the training of a head."""
    depth = [f"head.{head.depth_key}={head.depth}"] if head.depth_key else []
    if isinstance(head, DFlashHead):
        anchored = str(head.sample_from_anchor).lower()
        depth = [f"head.block_size={head.block_size}", f"head.sample_from_anchor={anchored}"]
    if isinstance(head, Eagle3Head) and head.window is not None:
        depth.append(f"head.window={head.window}")
    weight = ["data.rejection_weight=1"] if isinstance(head, BlockHead) else []
    few = ["eval.steps=0", "eval.final_num_prompts=16", "eval.max_new_tokens=64", "eval.timed_prompts=1"]
    return [f"head={head.kind}", *depth, *weight, *few, "eval.check_float32=false"]


if __name__ == "__main__":
    judge(**json.loads(sys.argv[1]))
