"""Published config.json files, shrunken, with random weights, through all that this project does:

    python tests/conformance/published.py path=FOLDER
    python tests/conformance/published.py families=true new_tokens=200
    python tests/conformance/published.py families=true after=jamba    # goes on where a run was stopped

prints a line per file: of FOLDER/targets whether they load, train, decode as they do alone and export; of FOLDER/heads
whether they are recognised, load on a target of their shape and draft; of families (all that transformers writes text with)
whether they decode as transformers does, and drafted as alone, in one sequence and in ragged batches. A cell is "ok",
"refused" with the sentence that a user would get, or "FAILS". It exits 1 where a cell fails.
"""

import json
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from functools import partial
from pathlib import Path

import torch
from omegaconf import DictConfig

HERE = Path(__file__).resolve().parent
if __name__ == "__main__":
    sys.path[0] = str(HERE.parents[1])  # `tests` is a package of the checkout, installed nowhere

from foredraft.train.cli import entry
from tests.conformance.checks import Checks, outcomes
from tests.conformance.families import families, family_checks
from tests.conformance.heads import head_checks
from tests.conformance.targets import small_family, target_checks

Row = tuple[str, Callable[[], Checks]]  # a name and its checks


@entry("published", HERE)
def main(cfg: DictConfig) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    counts: Counter[str] = Counter()
    rows = chosen(cfg)
    for name, checks in rows:
        torch.manual_seed(0)
        row = outcomes(checks())
        counts.update(cell.split(":")[0] for cell in row.values())
        print(f"{name:55} " + ", ".join(f"{check} {cell}" for check, cell in row.items()), flush=True)
    print(f"{len(rows)} files: " + ", ".join(f"{count} {word}" for word, count in sorted(counts.items())))
    if counts["FAILS"] or not rows:
        raise SystemExit(1)


def chosen(cfg: DictConfig) -> list[Row]:
    """The rows that are asked for. Raises ValueError where `after` is none of them, or nothing is asked for."""
    rows = [row for row in sources(cfg) if cfg.only is None or cfg.only in row[0]]
    if cfg.after is None:
        return rows
    names = [name for name, _ in rows]
    if cfg.after not in names:
        near = get_close_matches(cfg.after, names, cutoff=0.0)
        raise ValueError(f"after={cfg.after} is the name of no row: take one that is printed, like {', '.join(near)}")
    return rows[names.index(cfg.after) + 1 :]


def sources(cfg: DictConfig) -> Iterator[Row]:
    if cfg.path is None and not cfg.families:
        raise ValueError("give path=FOLDER, which has targets/ or heads/ with config.json files, or families=true")
    if cfg.path is not None:
        yield from files(Path(cfg.path), cfg.new_tokens)
    if cfg.families:
        for name, kind in families().items():
            yield name, partial(family_checks, partial(small_family, kind), cfg.new_tokens)


def files(folder: Path, new_tokens: int) -> Iterator[Row]:
    """Raises ValueError where the folder holds none."""
    found = {part: sorted((folder / part).glob("*.json")) for part in ("targets", "heads")}
    if not any(found.values()):
        raise ValueError(f"path={folder} has no config.json files in targets/ or heads/ (any name ending in .json)")
    for file in found["targets"]:
        yield file.stem, partial(target_checks, json.loads(file.read_text()), new_tokens)
    for file in found["heads"]:
        yield file.stem, partial(head_checks, json.loads(file.read_text()), new_tokens, file.stem)


if __name__ == "__main__":
    main()
