"""The blocks of code in README and docs, and what a command line in them runs."""

import re
import textwrap
from pathlib import Path
from typing import NamedTuple

from foredraft import __main__ as foredraft

BLOCK = re.compile(
    r"^(?P<mark><!-- run -->\n)?(?P<indent> *)```(?P<language>\w+)[^\n]*\n(?P<text>.*?)^ *```$", re.S | re.M
)
TRAINING = ("torchrun", "accelerate", "deepspeed", "sbatch")  # what follows the script is train/run.py's
SCRIPTS = ("train/run.py", "foredraft.train.run", "scripts/slurm.sh")


class Block(NamedTuple):
    document: Path
    language: str
    text: str
    runs: bool  # is it marked by <!-- run -->?


def blocks(document: Path, language: str | None = None) -> list[Block]:
    """Return the blocks of a document, of one language."""
    found = [
        Block(document, match["language"], textwrap.dedent(match["text"]), match["mark"] is not None)
        for match in BLOCK.finditer(document.read_text())
    ]
    return [block for block in found if language in (None, block.language)]


def command_lines(text: str) -> list[str]:
    """Return the command lines of a shell block, each joined to one line."""
    joined = text.replace("\\\n", " ")
    return [part.strip() for line in joined.splitlines() if line.split("#")[0].strip() for part in line.split(" && ")]


def program(words: list[str]) -> tuple[str | None, list[str]]:
    """Return the module that a command line runs and its arguments; None if its options are not keys."""
    first = words[0]
    if first == "foredraft":
        if words[1:2] and words[1].startswith("-"):
            return None, []
        assert words[1:2] and words[1] in foredraft.PROGRAMS, f"foredraft {words[1:]} is not a program"
        told = not words[2:] or "..." in words or "--help" in words or not foredraft.needs_target(words[1], words[2:])
        assert told, f"{' '.join(words)} has to name a target"
        target = ["target=test_model"] if words[1] == "demo" else []
        return foredraft.PROGRAMS[words[1]][0], [*target, *words[2:]]
    if first in TRAINING:
        script = next(i for i, word in enumerate(words) if word in SCRIPTS)
        return "foredraft.train.run", words[script + 1 :]
    if first == "bash" and words[1] == "scripts/demo.sh":
        return "foredraft.train.run", ["target=test_model", *words[2:]]
    if first == "python" and words[1].endswith(".py") and not words[1].startswith(("scripts/test_model", "tests/")):
        return f"foredraft.{words[1].removesuffix('.py').replace('/', '.')}", words[2:]
    return None, []
