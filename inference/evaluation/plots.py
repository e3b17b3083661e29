"""Lines as inline SVG whose axes are HTML, and bars as HTML.

The colours in a chart are CSS variables of its page (`COLORS`), so that one chart serves light and dark pages, and the
colour of a depth is the same in a line, a bar and a token. A chart with nothing to draw is the empty string.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from markupsafe import Markup, escape

# Depth 1, 2, ...: the further from the bonus token, the warmer. (light, dark), each 3:1 or more in contrast with its page.
DEPTHS = (
    ("#2563b0", "#74a9ff"),
    ("#0b7c99", "#45c4dd"),
    ("#12846a", "#45d0a4"),
    ("#56851a", "#9bd05a"),
    ("#967b08", "#e0c34a"),
    ("#bd640a", "#f5a14d"),
    ("#c9402c", "#ff8370"),
    ("#a8326e", "#f27cb4"),
)
# CSS variable -> (light, dark).
COLORS = {f"d{depth}": pair for depth, pair in enumerate(DEPTHS, 1)} | {
    "page": ("#ffffff", "#12151a"),
    "soft": ("#f6f7f9", "#191d24"),
    "line": ("#e4e7ec", "#2a2f38"),
    "ink": ("#1a1d23", "#e9ecf1"),
    "muted": ("#636a76", "#98a0ad"),
    "grey": ("#868d99", "#8b93a1"),
    "good": ("#12784f", "#4fcf98"),
    "bad": ("#b3341f", "#ff8a75"),
}
# The parts of a step; the second, the target's forward, is grey as are its tokens: colour is what the head adds.
PARTS = ("d1", "grey", "d3", "d6", "d8")

MOST_POINTS = 300  # as many as the width can show; without a bound, a long run makes a page of many megabytes

Point = tuple[float, float]


class Series(NamedTuple):
    label: str  # stands beside the lines; empty: the last value does
    points: Sequence[Point]  # (x, y) in order of x; a y that is not finite breaks the line
    color: str  # a name in COLORS


class Bar(NamedTuple):
    label: str
    value: float
    color: str  # a name in COLORS
    note: str  # what stands after it: its value, in words


def depth_color(depth: int) -> str:
    return f"d{min(depth, len(DEPTHS))}"


def thin(points: Sequence[Point]) -> tuple[list[Point], int]:
    """At most MOST_POINTS, each the mean of `every` neighbours; NaN with one among them that is not finite: breaks stay."""
    every = math.ceil(len(points) / MOST_POINTS)
    means = []
    for start in range(0, len(points), every):
        some = points[start : start + every]
        ys = [y for _, y in some]
        mean = math.fsum(y / len(some) for y in ys) if all(map(math.isfinite, ys)) else math.nan
        means.append((sum(x for x, _ in some) / len(some), mean))
    return means, every


def stretches(points: Sequence[Point]) -> list[list[Point]]:
    """The runs of points without a NaN."""
    runs: list[list[Point]] = [[]]
    for point in points:
        if math.isfinite(point[1]):
            runs[-1].append(point)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def line_chart(
    name: str, series: Sequence[Series], unit: str = "", floor: float | None = None, x_name: str = "step"
) -> str:
    """Lines over training steps or something else that is counted, from 0, in a picture that its page stretches. The y axis
    begins at `floor`, or at the lowest point."""
    series = [one for one in series if any(math.isfinite(y) for _, y in one.points)]
    if not series:
        return ""
    thinned = [thin(one.points) for one in series]
    runs = [stretches(points) for points, _ in thinned]
    ys = [y for parts in runs for run in parts for _, y in run] + ([] if floor is None else [floor])
    low, high, most = min(ys), max(ys), max(1.0, max(x for points, _ in thinned for x, _ in points))
    shapes, labels = [], []
    for one, parts in zip(series, runs, strict=True):
        few = sum(map(len, parts)) <= 40
        for run in parts:
            # Shares of the span: the values may be as large as a float can be. A flat line lies in the middle.
            shares = [(y - low) / (high - low) if high > low else 0.5 for _, y in run]
            spots = [f"{100 * x / most:.2f} {100 - 100 * share:.2f}" for (x, _), share in zip(run, shares, strict=True)]
            shapes.append(f'<path d="M {" L ".join(spots)}" style="stroke:var(--{one.color})"/>')
            for spot, (x, y) in zip(spots, run, strict=True):
                if few or len(run) == 1:  # a point without neighbours has no line
                    words = f"{one.label} {x_name}".strip() + f" {x:,.0f}: {y:.2f}{unit}"
                    dot = f'<path class="dot" d="M {spot} h 0" style="stroke:var(--{one.color})">'
                    shapes.append(f"{dot}<title>{escape(words)}</title></path>")  # what a pointer shows
        last = one.label or f"{parts[-1][-1][1]:.2f}{unit}"
        labels.append(f'<li style="color:var(--{one.color})">{escape(last)}</li>')
    longest = max(every for _, every in thinned)
    axis = f"{x_name} 0 to {most:,.0f}" + (f", each point the mean of {longest} log entries" if longest > 1 else "")
    return Markup(
        f'<div class="lines" role="img" aria-label="{escape(name)}">\n<b>{high:.3g}{unit}</b><b>{low:.3g}{unit}</b>\n'
        f'<svg viewBox="0 0 100 100" preserveAspectRatio="none">\n{"".join(shapes)}\n</svg>\n'
        f"<ul>{''.join(labels)}</ul><p>{escape(axis)}</p></div>"
    )


def bar_chart(name: str, bars: Sequence[Bar]) -> str:
    """Lying bars from zero, one below the other. One whose value is not finite keeps its place, empty."""
    shares = [bar.value if math.isfinite(bar.value) else 0.0 for bar in bars]
    most = max(shares, default=0.0)
    if not most:
        return ""
    lines = [
        f'<dt>{escape(bar.label)}</dt><dd><i style="width:{70 * (share / most):.2f}%;background:var(--{bar.color})"></i>'
        f"{escape(bar.note)}</dd>"
        for bar, share in zip(bars, shares, strict=True)
    ]
    return Markup("\n".join([f'<dl class="bars" aria-label="{escape(name)}">', *lines, "</dl>"]))
