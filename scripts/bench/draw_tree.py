"""One decoding step as a picture:  python scripts/bench/draw_tree.py drafter=outputs/eagle3/head

Decodes a held-out prompt and draws the tree of drafts of one step, with the path that the target accepted in colour. The step
drawn is the first that accepted as many drafts as the steps do on average.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, count
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import torch
from hydra.utils import instantiate
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from omegaconf import DictConfig

from foredraft.heads import Target
from foredraft.inference.engine import Engine
from foredraft.inference.evaluation.plots import COLORS
from foredraft.inference.request import Request
from foredraft.train.cli import entry
from foredraft.train.data.corpus import prompts

LETTER, ROW, GAP, MARGIN = 7.9, 34, 34, 16  # pixels: of a letter, from row to row, between columns, around it all
LONGEST = 14  # letters of a label


class Step(NamedTuple):
    tokens: list[int]  # of the tree, the bonus token first
    parents: list[int]  # of the bonus token: itself
    accepted: list[int]  # nodes from the bonus token down
    next: int  # the target's own token after them


class Node(NamedTuple):
    label: str
    kind: str  # bonus, accepted, rejected, next
    x: float  # left edge
    y: float  # middle
    width: float
    parent: int


@entry("draw_tree")
def main(cfg: DictConfig) -> None:
    target: Target = instantiate(cfg.target)
    held_out = instantiate(cfg.data, tokenizer=target.text_tokenizer).test
    row = prompts(target.text_tokenizer, held_out, cfg.prompt + 1, cfg.prompt_tokens)[cfg.prompt]
    engine = Engine(target, instantiate(cfg.drafter, target=target))
    engine.add(Request(row, max_new_tokens=cfg.new_tokens))
    steps = list(decode(engine))
    typical = round(mean(len(step.accepted) for step in steps))
    step = min(steps, key=lambda step: abs(len(step.accepted) - typical))
    labels = [target.text_tokenizer.decode([token]) for token in (*step.tokens, step.next)]
    Path(cfg.output).write_text(tree_svg(labels[:-1], step.parents, step.accepted, labels[-1]), encoding="utf-8")
    print(f"{len(step.accepted)} tokens from a tree of {len(step.tokens)}; {typical} on average: wrote {cfg.output}")


@torch.inference_mode()
def decode(engine: Engine) -> Iterator[Step]:
    """The steps of the only request, whose prefill is still to come."""
    engine.step()
    while engine.has_work:
        tree, gumbel = engine.propose()
        output = engine.forward(tree)
        verification, validity = engine.verify(tree, output.logits, gumbel)
        engine.commit(tree, verification, validity, output.aux_hidden_states)
        tokens, parents = tree.tokens[0].tolist(), tree.parents[0].tolist()
        path = verification.path[0, : int(verification.counts[0])].tolist()
        real = [node for node, token in enumerate(tokens) if token >= 0]  # the others are padding
        number = {node: i for i, node in enumerate(real)}
        following = int(verification.choices[0, path[-1]])
        yield Step([tokens[i] for i in real], [number[parents[i]] for i in real], [number[i] for i in path], following)


def tree_svg(labels: Sequence[str], parents: Sequence[int], accepted: Sequence[int], following: str) -> str:
    """A tree of drafts as an SVG file, from left to right. labels: the text of each node. parents: before their children, the
    bonus token its own. accepted: the nodes of the accepted path. following: the target's own token after it."""
    kinds = ["accepted" if node in accepted else "rejected" for node in range(len(labels))]
    kinds[0] = "bonus"
    nodes = layout([*map(visible, labels), visible(following)], [*parents, accepted[-1]], [*kinds, "next"])
    folder = Path(__file__).parent
    files = Environment(loader=FileSystemLoader(folder), autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return files.get_template("tree.svg.jinja").render(
        nodes=nodes,
        colors=COLORS,
        width=max(520, max(node.x + node.width for node in nodes) + MARGIN),
        height=max(node.y for node in nodes) + ROW + 2 * MARGIN,
        caption=f"One forward of the target: {len(accepted) - 1} of {len(labels) - 1} drafts accepted, "
        f"{len(accepted)} new token{'s' if len(accepted) > 1 else ''}",
    )


def layout(labels: Sequence[str], parents: Sequence[int], kinds: Sequence[str]) -> list[Node]:
    """A column per depth, as wide as its longest label; a row per leaf; a parent in the middle of its children."""
    depths: list[int] = []
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents):
        depths.append(depths[parent] + 1 if node else 0)
        if node:
            children[parent].append(node)
    widths = [LETTER * len(label) + 16 for label in labels]
    columns = [max(w for w, d in zip(widths, depths, strict=True) if d == depth) for depth in range(max(depths) + 1)]
    lefts = list(accumulate((width + GAP for width in columns), initial=MARGIN))
    rows: dict[int, float] = {}
    free = count()
    for node in depth_first(children):
        below = [rows[child] for child in children[node]]
        rows[node] = (below[0] + below[-1]) / 2 if below else float(next(free))
    return [
        Node(label, kind, lefts[depths[i]], MARGIN + ROW * (rows[i] + 0.5), widths[i], parents[i])
        for i, (label, kind) in enumerate(zip(labels, kinds, strict=True))
    ]


def depth_first(children: Sequence[Sequence[int]], node: int = 0) -> Iterator[int]:
    """Every node after its children."""
    for child in children[node]:
        yield from depth_first(children, child)
    yield node


def visible(text: str) -> str:
    """A token's text with its spaces and line ends to be seen, cut where it is long."""
    for invisible, sign in {" ": "\u00b7", "\n": "\u21b5", "\r": "\u240d", "\t": "\u21e5"}.items():
        text = text.replace(invisible, sign)
    text = "".join(letter if letter.isprintable() else "\ufffd" for letter in text)  # XML has no control characters
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}\u2026"


if __name__ == "__main__":
    main()
