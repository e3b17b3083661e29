"""Line charts as inline SVG with axes in HTML, and bar charts as HTML.

The colors of a chart are CSS variables of its page (`COLORS`), so that one chart serves light and dark pages, and the
color of a depth is the same in a line, a bar and a token. An empty chart is the empty string.
"""

import math
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from markupsafe import Markup, escape

# Depth 1, 2, ...: warmer colors are further from the bonus token. (light, dark), each with a contrast of at least 3:1.
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
    "bad": ("#b3341f", "#ff8a75"),
}

MAX_POINTS = 300  # the width shows no more, and a page of a long run would have many megabytes

Point = tuple[float, float]


class Series(NamedTuple):
    label: str  # shown next to the line; if empty, the last value is shown
    points: Sequence[Point]  # (x, y), ordered by x; a y that is not finite interrupts the line
    color: str  # a name in COLORS


class Bar(NamedTuple):
    label: str
    value: float
    color: str  # a name in COLORS
    note: str  # text after the bar: its value, in words


def depth_color(depth: int) -> str:
    return f"d{min(depth, len(DEPTHS))}"


def thin(points: Sequence[Point]) -> tuple[list[Point], int]:
    """Combine groups of `every` neighbours to at most MAX_POINTS points. A value that is not finite makes its group NaN."""
    every = math.ceil(len(points) / MAX_POINTS)
    means = []
    for start in range(0, len(points), every):
        some = points[start : start + every]
        ys = [y for _, y in some]
        mean = math.fsum(y / len(some) for y in ys) if all(map(math.isfinite, ys)) else math.nan
        means.append((sum(x for x, _ in some) / len(some), mean))
    return means, every


def finite_runs(points: Sequence[Point]) -> list[list[Point]]:
    """Return the runs of points without NaN."""
    return [list(run) for is_finite, run in groupby(points, lambda point: math.isfinite(point[1])) if is_finite]


def line_chart(
    name: str, series: Sequence[Series], unit: str = "", floor: float | None = None, x_name: str = "step"
) -> str:
    """Draw lines over training steps or another count that starts at 0, in a picture that its page stretches. The y axis
    starts at `floor`, or at the lowest point."""
    series = [line for line in series if any(math.isfinite(y) for _, y in line.points)]
    if not series:
        return ""
    thinned = [thin(line.points) for line in series]
    runs = [finite_runs(points) for points, _ in thinned]
    ys = [y for parts in runs for run in parts for _, y in run] + ([] if floor is None else [floor])
    low, high, most = min(ys), max(ys), max(1.0, max(x for points, _ in thinned for x, _ in points))
    shapes, labels = [], []
    for line, parts in zip(series, runs, strict=True):
        few = sum(map(len, parts)) <= 40
        for run in parts:
            # Fractions of the span, because values may be close to the largest float. A flat line is in the middle.
            shares = [(y - low) / (high - low) if high > low else 0.5 for _, y in run]
            spots = [f"{100 * x / most:.2f} {100 - 100 * share:.2f}" for (x, _), share in zip(run, shares, strict=True)]
            shapes.append(f'<path d="M {" L ".join(spots)}" style="stroke:var(--{line.color})"/>')
            for spot, (x, y) in zip(spots, run, strict=True):
                if few or len(run) == 1:  # a single point has no line
                    words = f"{line.label} {x_name}".strip() + f" {x:,.0f}: {y:.2f}{unit}"
                    dot = f'<path class="dot" d="M {spot} h 0" style="stroke:var(--{line.color})">'
                    shapes.append(f"{dot}<title>{escape(words)}</title></path>")  # shown on hover
        last = line.label or f"{parts[-1][-1][1]:.2f}{unit}"
        labels.append(f'<li style="color:var(--{line.color})">{escape(last)}</li>')
    longest = max(every for _, every in thinned)
    axis = f"{x_name} 0 to {most:,.0f}" + (f", each point the mean of {longest} log entries" if longest > 1 else "")
    return Markup(
        f'<div class="lines" role="img" aria-label="{escape(name)}">\n<b>{high:.3g}{unit}</b><b>{low:.3g}{unit}</b>\n'
        f'<svg viewBox="0 0 100 100" preserveAspectRatio="none">\n{"".join(shapes)}\n</svg>\n'
        f"<ul>{''.join(labels)}</ul><p>{escape(axis)}</p></div>"
    )


def bar_chart(name: str, bars: Sequence[Bar]) -> str:
    """Draw horizontal bars that start at zero. A bar whose value is not finite is empty."""
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
