"""Every published config.json that a folder holds, shrunken, with random weights, through all that this project does:

    python scripts/bench/published.py targets=FOLDER heads=FOLDER
    python scripts/bench/published.py families=true new_tokens=200
    python scripts/bench/published.py families=true new_tokens=200 after=jamba    # goes on where a run was stopped

prints a table, a line per file: of targets whether they load, train, decode as they do alone and export; of heads whether
they are recognised, load on a target of their shape and draft; of families (all that transformers writes text with) whether
they decode as transformers does, and drafted as alone, in one row and in ragged batches. A cell is "ok", "refused" with the
sentence that a user would get, or "FAILS". It exits 1 where a cell fails.
"""

import json
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from transformers import PreTrainedConfig

from foredraft.heads import Target, load_head
from foredraft.heads.base import DraftHead, PackedBatch
from foredraft.heads.checkpoint import write_head
from foredraft.heads.eagle3 import Eagle3Head
from foredraft.heads.formats import engines
from foredraft.heads.medusa import MedusaHead
from foredraft.heads.target.loading import model_class, read_config
from foredraft.inference import drafter_for, generate
from foredraft.scripts.bench.families import default_settings, families, family_cells
from foredraft.scripts.bench.published_heads import head_cells
from foredraft.scripts.bench.shrink import shrink
from foredraft.train.cli import entry
from foredraft.train.losses import soft
from foredraft.train.module import DistillationModel

PROMPTS = (100, 5, 30)  # tokens of the ragged batch: texts cross windows, chunks and the boundaries of longrope
Cells = Iterator[tuple[str, Callable[[], Any]]]
KINDS = {"eagle3": Eagle3Head, "medusa": MedusaHead}


@entry("published")
def main(cfg: DictConfig) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    rows: list[tuple[str, dict[str, str]]] = []
    for name, cells in chosen(cfg):
        torch.manual_seed(0)
        rows.append((name, checked(cells())))
        print_row(*rows[-1])
    counts = Counter(cell.split(":")[0] for _, row in rows for cell in row.values())
    print(f"{len(rows)} files: " + ", ".join(f"{count} {word}" for word, count in sorted(counts.items())))
    if counts["FAILS"] or not rows:
        raise SystemExit(1)


def chosen(cfg: DictConfig) -> list[tuple[str, Callable[[], Cells]]]:
    """The rows of `sources` that are asked for. Raises ValueError where `after` is none of them."""
    found = [(name, cells) for name, cells in sources(cfg) if cfg.only is None or cfg.only in name]
    if cfg.after is None:
        return found
    names = [name for name, _ in found]
    if cfg.after not in names:
        near = get_close_matches(cfg.after, names, cutoff=0.0)
        raise ValueError(f"after={cfg.after} is the name of no row: take one that is printed, like {', '.join(near)}")
    return found[names.index(cfg.after) + 1 :]


def sources(cfg: DictConfig) -> Iterator[tuple[str, Callable[[], Cells]]]:
    """The name and the cells of every row."""
    for file in sorted(Path(cfg.targets).glob("*.json")) if cfg.targets else ():
        yield file.stem, partial(target_cells, json.loads(file.read_text()), cfg.new_tokens)
    for file in sorted(Path(cfg.heads).glob("*.json")) if cfg.heads else ():
        yield file.stem, partial(head_cells, json.loads(file.read_text()), cfg.new_tokens, file.stem)
    if cfg.families:
        for name, kind in families().items():
            yield name, partial(family_cells, partial(small_family, kind), cfg.new_tokens)


def checked(cells: Cells) -> dict[str, str]:
    """Each cell's outcome. What follows one that is not ok is not tried."""
    found = {}
    for name, work in cells:
        try:
            detail = work()
            found[name] = "ok" if detail is None else f"ok: {detail}"
        except (ValueError, ImportError) as error:  # of a package that the model needs
            found[name] = "refused: " + str(error).strip().split("\n")[0]
        except Exception as error:  # what a user would get as a traceback
            found[name] = f"FAILS: {type(error).__name__}: {str(error).strip()}".split("\n")[0]
        if not found[name].startswith("ok"):
            break
    return found


def print_row(name: str, row: dict[str, str]) -> None:
    short = ", ".join(f"{column} ok" if cell == "ok" else f"{column} {cell}" for column, cell in row.items())
    print(f"{name:55} {short}", flush=True)


def target_cells(published: dict[str, Any], new_tokens: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The columns of a target, each of which needs those before it."""
    held: dict[str, Any] = {}

    def loads() -> str | None:
        held["target"] = target = small_target(published)
        return None if target.supports_trees else "chains" if target.supports_chains else "decoded plainly"

    yield "loads", loads
    for kind, head_class in KINDS.items():

        def trains(kind: str = kind, head_class: Any = head_class) -> None:
            held[kind] = head_class.for_target(held["target"], depth=3)
            train(held[kind], held["target"])

        yield f"trains {kind}", trains
    for name, temperature in (("greedy", 0.0), ("T=1", 1.0)):

        def decodes(temperature: float = temperature) -> None:
            for kind in KINDS:
                decode(held["target"], held[kind].eval(), temperature, new_tokens)

        yield name, decodes
    yield "exported", lambda: export([held[kind] for kind in KINDS], held["target"])


def small_target(published: dict[str, Any]) -> Target:
    """A target of this config's structure, through the same files as a downloaded one."""
    settings = shrink(published)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(settings))
        config = read_config(folder)
    model = model_class(config).from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and "norm" not in name:  # at the usual 0.02 keys look alike: no wrong mask would show
            torch.nn.init.normal_(parameter, std=0.15)
    # The text part of a wrapper is not saved alone (Mllama).
    if model_class(model.config) is not model_class(config):
        return Target(model)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        target = Target.from_pretrained(folder, dtype="float32", device="cpu")
    return target


def small_family(kind: type[PreTrainedConfig]) -> Target:
    return small_target(default_settings(kind))


def train(head: DraftHead, target: Target, steps: int = 3) -> None:
    """A few steps on packed rows of random tokens."""
    model = DistillationModel(head, target, soft)
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        tokens = torch.randint(3, target.vocab_size, (2, 48), generator=generator)
        documents = torch.tensor([[0] * 20 + [1] * 28, [0] * 40 + [-1] * 8])
        positions = torch.tensor([[*range(20), *range(28)], [*range(40), *[0] * 8]])
        loss = model(*PackedBatch(tokens, documents >= 0, documents, positions)).loss
        if not loss.isfinite():
            raise RuntimeError(f"the loss is {loss.item()}")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def decode(target: Target, head: DraftHead, temperature: float, new_tokens: int) -> None:
    """Drafted text must be the target's own."""
    generator = torch.Generator().manual_seed(2)
    rows = [torch.randint(3, target.vocab_size, (length,), generator=generator) for length in PROMPTS]
    longest = max(PROMPTS)
    ids = torch.stack([torch.nn.functional.pad(row, (longest - len(row), 0)) for row in rows])
    mask = torch.stack([torch.nn.functional.pad(torch.ones_like(row), (longest - len(row), 0)) for row in rows])
    settings: dict[str, Any] = {"max_new_tokens": new_tokens, "eos_token_id": -1, "temperature": temperature}
    alone = generate(target, None, ids, mask, **settings).new_tokens
    drafted = generate(target, drafter_for(head, target), ids, mask, **settings).new_tokens
    if drafted != alone:
        where = [
            next((i for i, (a, b) in enumerate(zip(*pair, strict=True)) if a != b), None)
            for pair in zip(alone, drafted, strict=True)
        ]
        raise RuntimeError(f"{head.kind}: another text than the target's own, first different at {where}")


def export(heads: list[DraftHead], target: Target) -> None:
    """Written in an engine's layout, and read again from it."""
    with tempfile.TemporaryDirectory() as folder:
        for number, head in enumerate(heads):
            found = engines.vllm(head, target)
            write_head(head, Path(folder) / str(number), target, found.layout, found.layout.weight_files)
            load_head(Path(folder) / str(number), target)


if __name__ == "__main__":
    main()
