"""Lines as inline SVG, and bars as HTML.

The colours in a chart are CSS variables of its page (`COLORS`), so that one chart serves light and dark pages, and the
colour of a depth is the same in a line, a bar and a token. A chart with nothing to draw is the empty string.
"""

import math
from collections.abc import Iterable, Sequence
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

WIDTH, HEIGHT = 420, 236
LETTER = 7.2  # a generous width of one letter: where labels would run into each other, some are left out
LINE = 16.0  # from one line of a legend to the next
MOST_POINTS = 300  # as many as the width can show; without a bound, a long run makes a page of many megabytes

Point = tuple[float, float]


class Series(NamedTuple):
    label: str  # stands beside the lines; empty: the last value stands at the line's end
    points: Sequence[Point]  # (x, y) in order of x; a y that is not finite breaks the line
    color: str  # a name in COLORS


class Bar(NamedTuple):
    label: str
    value: float
    color: str  # a name in COLORS
    note: str  # what stands after it: its value, in words


class Scale(NamedTuple):
    """Values from `low` to `high` as pixels from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        # Shares of the span first: the values may be as large as a float can be.
        return self.start + (self.end - self.start) * ((value - self.low) / (self.high - self.low))


def depth_color(depth: int) -> str:
    return f"d{min(depth, len(DEPTHS))}"


def text(x: float, y: float, words: str, color: str = "muted", anchor: str = "middle", weight: str = "normal") -> str:
    """Words whose middle stands at the height of y."""
    style = f"fill:var(--{color});font-weight:{weight}"
    return f'<text x="{x:.2f}" y="{y:.2f}" dy="0.35em" text-anchor="{anchor}" style="{style}">{escape(words)}</text>'


def line(points: Iterable[Point], color: str, width: float = 1) -> str:
    path = " L ".join(f"{x:.2f} {y:.2f}" for x, y in points)
    return (
        f'<path d="M {path}" fill="none" stroke-linejoin="round" style="stroke:var(--{color});stroke-width:{width}"/>'
    )


def dot(x: float, y: float, color: str, title: str) -> str:
    """title: what a pointer shows."""
    where = f'cx="{x:.2f}" cy="{y:.2f}" r="3" style="fill:var(--{color})"'
    return f"<circle {where}><title>{escape(title)}</title></circle>"


def svg(name: str, shapes: Iterable[str]) -> Markup:
    begin = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(name)}">'
    return Markup("\n".join([begin, *shapes, "</svg>"]))


def round_marks(low: float, high: float, most: int = 5) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten, at most `most` + 1, the first at most `low`, the last at least
    `high`."""
    least = max(abs(low), abs(high)) * 1e-3 or 1.0  # a smaller span would have marks that read alike
    if high - low < least:
        low, high = (low, high + least) if low >= 0 else (low - least, high)
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    for step in (power * factor for factor in (1, 2, 5, 10, 20)):
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        if last - first <= most:
            break
    return [number * step for number in range(first, last + 1)]


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


def upright_axis(marks: Sequence[float], unit: str, right: float) -> tuple[Scale, float, list[str]]:
    """The y scale, where the x axis begins, and the grid with its numbers, which ends at `right`."""
    words = [f"{mark:g}{unit}" for mark in marks]
    left = 8 + LETTER * max(map(len, words))
    scale = Scale(marks[0], marks[-1], HEIGHT - 40, 10)
    grid = [line([(left, scale(mark)), (right, scale(mark))], "line") for mark in marks]
    numbers = [text(left - 6, scale(mark), word, anchor="end") for mark, word in zip(marks, words, strict=True)]
    return scale, left, [*grid, *numbers]


def line_chart(
    name: str, series: Sequence[Series], unit: str = "", floor: float | None = None, x_name: str = "step"
) -> str:
    """Lines over training steps or something else that is counted, from 0. The y axis begins at `floor`, or just below the
    lowest point."""
    series = [one for one in series if any(math.isfinite(y) for _, y in one.points)]
    if not series:
        return ""
    thinned = [thin(one.points) for one in series]
    runs = [stretches(points) for points, _ in thinned]
    ys = [y for parts in runs for run in parts for _, y in run] + ([] if floor is None else [floor])
    last = [f"{parts[-1][-1][1]:.2f}{unit}" for parts in runs]
    beside = [one.label or words for one, words in zip(series, last, strict=True)]
    right = WIDTH - 12 - LETTER * max(map(len, beside))
    y_scale, left, shapes = upright_axis(round_marks(min(ys), max(ys)), unit, right)
    most = max(1.0, max(x for points, _ in thinned for x, _ in points))
    x_scale = Scale(0, most, left, right)
    shapes += [
        text(x_scale(mark), HEIGHT - 26, f"{mark:,.0f}")
        for mark in round_marks(0, most, 4)
        if mark <= most and mark == round(mark)
    ]
    longest = max(every for _, every in thinned)
    axis = x_name if longest == 1 else f"{x_name} (each point is the mean of {longest} log entries)"
    shapes.append(text((left + right) / 2, HEIGHT - 8, axis))
    for number, (one, parts) in enumerate(zip(series, runs, strict=True)):
        placed = [[(x_scale(x), y_scale(y)) for x, y in run] for run in parts]
        shapes += [line(run, one.color, 2) for run in placed]
        few = sum(map(len, parts)) <= 40
        for run, at in zip(parts, placed, strict=True):
            if few or len(run) == 1:  # a point without neighbours has no line
                begin = f"{one.label} {x_name}".strip()
                shapes += [
                    dot(*spot, one.color, f"{begin} {x:,.0f}: {y:.2f}{unit}")
                    for spot, (x, y) in zip(at, run, strict=True)
                ]
        middle = HEIGHT / 2 - LINE * (len(series) - 1) / 2 + LINE * number
        height = middle if one.label else placed[-1][-1][1]
        shapes.append(
            text(right + 8, height, beside[number], one.color, "start", weight="normal" if one.label else "bold")
        )
    return svg(name, shapes)


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
