"""scripts/bench/draw_tree.py: every token is in the picture, and the accepted path stands out."""

import xml.etree.ElementTree as ET
from pathlib import Path

import torch

from foredraft.heads import Target
from foredraft.heads.eagle3 import Eagle3Head
from foredraft.inference import drafter_for, generate
from foredraft.inference.engine import Engine
from foredraft.inference.request import Request
from foredraft.scripts.bench.draw_tree import decode, tree_svg

SVG = "{http://www.w3.org/2000/svg}"
#   the -> cat -> sat
#       |      -> ran
#       -> dog
LABELS, PARENTS = ["the", " cat", " <dog>", " sat\n", "ran & ran"], [0, 0, 0, 1, 1]


def nodes(svg: str) -> list[tuple[str, str, float, float, float]]:
    """(kind, label, left, width, top) of every node."""
    found = []
    for group in ET.fromstring(svg).iter(f"{SVG}g"):
        box, text = group.find(f"{SVG}rect"), group.find(f"{SVG}text")
        assert box is not None and text is not None
        place = (float(box.attrib["x"]), float(box.attrib["width"]), float(box.attrib["y"]))
        found.append((group.attrib["class"].removeprefix("node "), text.text or "", *place))
    return found


def test_a_tree_shows_every_token_and_marks_the_accepted_ones():
    svg = tree_svg(LABELS, PARENTS, [0, 1, 3], "on")
    drawn = nodes(svg)
    assert [(kind, label) for kind, label, *_ in drawn] == [
        ("bonus", "the"), ("accepted", "\u00b7cat"), ("rejected", "\u00b7<dog>"), ("accepted", "\u00b7sat\u21b5"),
        ("rejected", "ran\u00b7&\u00b7ran"), ("next", "on"),
    ]  # fmt: skip
    assert "2 of 4 drafts accepted, 3 new tokens" in svg
    edges = [edge.attrib["class"] for edge in ET.fromstring(svg).iter(f"{SVG}path")]
    assert edges == ["edge accepted", "edge rejected", "edge accepted", "edge rejected", "edge next"]
    assert svg == tree_svg(LABELS, PARENTS, [0, 1, 3], "on")


def test_no_node_covers_another_and_children_stand_right_of_their_parent():
    drawn = nodes(tree_svg([*LABELS, "x" * 40], [*PARENTS, 2], [0], "it"))
    assert drawn[5][1] == "x" * 13 + "\u2026"  # a long label is cut
    for child, parent in zip(range(1, 7), (*PARENTS[1:], 2, 0), strict=True):
        assert drawn[child][2] > drawn[parent][2] + drawn[parent][3]
    places = [(x, x + width, y, y + 24) for _, _, x, width, y in drawn]
    for i, (left, right, top, bottom) in enumerate(places):
        for other in places[i + 1 :]:
            assert right <= other[0] or other[1] <= left or bottom <= other[2] or other[3] <= top


def test_a_tree_without_an_accepted_draft_still_gains_a_token():
    svg = tree_svg(["the", "a"], [0, 0], [0], "\x00")
    assert "0 of 1 drafts accepted, 1 new token<" in svg
    assert nodes(svg)[-1][:2] == ("next", "\ufffd")


def test_the_steps_drawn_are_those_of_generate(tiny_path: Path):
    target = Target.from_pretrained(str(tiny_path), dtype="float32", device="cpu")
    torch.manual_seed(2)
    drafter = drafter_for(Eagle3Head.for_target(target).eval(), target, nodes=8, depth=3, min_probability=0.0)
    engine = Engine(target, drafter)
    prompt = list(range(5, 17))
    engine.add(Request(prompt, max_new_tokens=20))
    steps = list(decode(engine))
    expected = generate(target, None, torch.tensor([prompt]), max_new_tokens=20, eos_token_id=-1).new_tokens[0]
    # A step's last token is the next one's bonus token, and the last step may be cut at the end of the text.
    written = [steps[0].tokens[0]]
    for step in steps:
        assert step.tokens[0] == written[-1]
        assert all(step.parents[child] == parent for parent, child in zip(step.accepted, step.accepted[1:]))
        written += [*(step.tokens[node] for node in step.accepted[1:]), step.next]
    assert written[:20] == expected
    assert all(0 < len(step.tokens) <= 8 for step in steps)
