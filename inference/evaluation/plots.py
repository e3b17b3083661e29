"""Line and bar charts as inline SVG text: what a report needs, without a plotting library, a script or a network.

Colours are CSS variables (`STYLE`), so one chart serves light and dark pages. The colour of a depth is the same in a
line, a bar and a token. A chart with nothing to draw is the empty string.
"""

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

# Depth 1, 2, ...: the further from the root, the warmer. (light, dark), each 3:1 or more in contrast with its page.
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
# The parts of a step; the second, the target's read, is grey as are its tokens: colour is what the head adds.
PARTS = (DEPTHS[0], ("#868d99", "#8b93a1"), DEPTHS[2], DEPTHS[5], DEPTHS[7])


def variables(shade: int) -> str:
    """The palette in CSS: --d1.. the colour of a depth, --t1.. its tint behind a token, --p1.. a part of a step."""
    tint = ("30", "40")[shade]  # the opacity, in hex
    depths = (f"--d{i}:{pair[shade]};--t{i}:{pair[shade]}{tint}" for i, pair in enumerate(DEPTHS, 1))
    return ";".join((*depths, *(f"--p{i}:{pair[shade]}" for i, pair in enumerate(PARTS, 1))))


STYLE = f"""
:root{{{variables(0)}}}
@media (prefers-color-scheme:dark){{:root{{{variables(1)}}}}}
svg{{display:block;width:100%;height:auto;overflow:visible}}
svg text{{font-size:12px;fill:var(--muted);font-variant-numeric:tabular-nums}}
@media (max-width:480px){{svg text{{font-size:13px}}}}
svg .strong{{fill:var(--ink);font-weight:600}}
svg .grid{{stroke:var(--line);stroke-width:1}}
svg .curve{{fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}}
svg .dot{{stroke:var(--page);stroke-width:1.5}}
"""
WIDTH, HEIGHT = 420, 236
LEFT, TOP, BOTTOM = 44, 12, 40
LETTER = 7.2  # a generous width of one letter, to leave room for labels without measuring fonts
MOST_POINTS = 300  # as many as the width can show; without a bound, a long run makes a page of many megabytes

Point = tuple[float, float]
Form = Callable[[float], str]
Scale = Callable[[float], float]


class Series(NamedTuple):
    label: str  # written at the end of the line; empty: the last value is written there
    points: Sequence[Point]  # (x, y) in order of x; a y that is not finite breaks the line
    color: str


class Bar(NamedTuple):
    label: str
    value: float
    color: str


def depth_color(depth: int) -> str:
    return f"var(--d{min(depth, len(DEPTHS))})"


def part_color(index: int) -> str:
    return f"var(--p{index % len(PARTS) + 1})"


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers, at least two, equally spaced, from at or below `low` to at or above `high`."""
    if high - low <= 1e-9 * max(abs(low), abs(high)):  # one value, as far as a picture can tell
        low, high = low - (abs(low) / 10 or 1), high + (abs(high) / 10 or 1)
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(nice * power for nice in (1, 2, 2.5, 5, 10) if nice * power >= rough * (1 - 1e-9))
    return [i * step for i in range(math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9) + 1)]


def plain(value: float) -> str:
    """An axis number: 0.25, 3, 1,500, 20k, 1.5e+06."""
    if 1e4 <= abs(value) < 1e6:
        return f"{value / 1000:g}k"
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e4 else f"{value:.3g}"


def thin(points: Sequence[Point]) -> tuple[list[Point], int]:
    """At most MOST_POINTS points, each the mean of `every` neighbours; with a NaN among them NaN, so breaks stay."""
    every = math.ceil(len(points) / MOST_POINTS) or 1
    groups = [points[i : i + every] for i in range(0, len(points), every)]
    return [(sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group)) for group in groups], every


def spread(heights: list[float], gap: float, low: float, high: float) -> list[float]:
    """`heights` moved apart to at least `gap`, in their order, and into low..high."""
    placed = dict.fromkeys(range(len(heights)), 0.0)
    order = sorted(placed, key=heights.__getitem__)
    edge = low
    for i in order:
        placed[i] = max(heights[i], edge)
        edge = placed[i] + gap
    edge = high
    for i in reversed(order):
        placed[i] = min(placed[i], edge)
        edge = placed[i] - gap
    return list(placed.values())


def svg(name: str, height: float, parts: Sequence[str]) -> str:
    body = "\n".join(parts)
    return f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(name)}">\n{body}\n</svg>'


def text(x: float, y: float, words: str, anchor: str = "start", kind: str = "", color: str = "") -> str:
    style = f' style="fill:{color}"' if color else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}"{style}>{escape(words)}</text>'


def rect(x: float, y: float, width: float, height: float, color: str, title: str) -> str:
    box = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" height="{max(height, 0.5):.1f}"'
    return f'<rect {box} rx="2" fill="{color}"><title>{escape(title)}</title></rect>'


def dot(x: float, y: float, color: str, title: str) -> str:
    spot = f'cx="{x:.1f}" cy="{y:.1f}" r="3.5"'
    return f'<circle class="dot" {spot} fill="{color}"><title>{escape(title)}</title></circle>'


def y_axis(marks: list[float], unit: str, right: float) -> tuple[Scale, list[str]]:
    """The grid with its labels, and the scale that it shows: from a value to a height."""

    def at(value: float) -> float:
        return HEIGHT - BOTTOM - (value - marks[0]) / (marks[-1] - marks[0]) * (HEIGHT - BOTTOM - TOP)

    lines = [f'<path class="grid" d="M{LEFT},{at(mark):.1f}H{right:.1f}"/>' for mark in marks]
    return at, lines + [text(LEFT - 8, at(mark) + 4, plain(mark) + unit, "end") for mark in marks]


def curve(points: list[Point]) -> str:
    """A path through the finite points. `h0` draws a dot where a point has no neighbour to be joined to."""
    path, joined = [], False
    for x, y in points:
        if math.isfinite(y):
            path.append(f"L{x:.1f},{y:.1f}" if joined else f"M{x:.1f},{y:.1f}h0")
        joined = math.isfinite(y)
    return "".join(path)


def line_chart(name: str, series: Sequence[Series], unit: str = "", floor: float | None = None) -> str:
    """Lines over training steps, from step 0. The y axis begins at `floor`, or just below the lowest point."""
    thinned = [(one, *thin(one.points)) for one in series]
    drawn = [(one, points) for one, points, _ in thinned if any(math.isfinite(y) for _, y in points)]
    if not drawn:
        return ""
    xs = [x for _, points in drawn for x, _ in points]
    finite = [[(x, y) for x, y in points if math.isfinite(y)] for _, points in drawn]
    ys = [y for points in finite for _, y in points]
    labels = [one.label or f"{points[-1][1]:.2f}{unit}" for (one, _), points in zip(drawn, finite, strict=True)]
    right = WIDTH - 8 - LETTER * max(map(len, labels))
    at_y, parts = y_axis(ticks(min(ys) if floor is None else min(floor, *ys), max(ys)), unit, right)
    last = max(max(xs), 1.0)

    def at_x(x: float) -> float:
        return LEFT + x / last * (right - LEFT)

    whole = [mark for mark in ticks(0, last, 4) if mark <= 1.01 * last and mark == round(mark)]
    parts += [text(at_x(mark), HEIGHT - BOTTOM + 18, plain(mark), "middle") for mark in whole]
    every = max(every for _, _, every in thinned)
    averaged = f"step (each point is the mean of {every} log entries)" if every > 1 else "step"
    parts.append(text((LEFT + right) / 2, HEIGHT - 4, averaged, "middle"))
    for (one, points), shown in zip(drawn, finite, strict=True):
        path = curve([(at_x(x), at_y(y)) for x, y in points])
        parts.append(f'<path class="curve" stroke="{one.color}" d="{path}"/>')
        if len(shown) <= 40:
            title = f"{one.label} step".strip()
            parts += [dot(at_x(x), at_y(y), one.color, f"{title} {plain(x)}: {y:.2f}{unit}") for x, y in shown]
    low, high = TOP + 4, HEIGHT - BOTTOM + 4
    heights = spread([at_y(points[-1][1]) + 4 for points in finite], min(14, (high - low) / len(drawn)), low, high)
    for (one, _), label, height in zip(drawn, labels, heights, strict=True):
        parts.append(text(right + 8, height, label, kind="strong", color=one.color))
    return svg(name, HEIGHT, parts)


def bar_chart(name: str, bars: Sequence[Bar], unit: str, x_name: str) -> str:
    """Upright bars of values from zero up. A value that is not finite keeps its place, empty."""
    values = [bar.value for bar in bars if math.isfinite(bar.value)]
    if not values:
        return ""
    at, parts = y_axis(ticks(0.0, max(values)) if max(values) > 0 else [0.0, 1.0], unit, WIDTH)
    pitch = (WIDTH - LEFT) / len(bars)
    width = min(0.7 * pitch, 56)
    for i, bar in enumerate(bars):
        middle = LEFT + (i + 0.5) * pitch
        if pitch > LETTER * len(bar.label):  # a label wider than its place would run into the next one
            parts.append(text(middle, HEIGHT - BOTTOM + 18, bar.label, "middle"))
        if math.isfinite(bar.value):
            words, top = f"{bar.value:.1f}{unit}", at(bar.value)
            title = f"{x_name} {bar.label}: {words}"
            parts.append(rect(middle - width / 2, top, width, at(0.0) - top, bar.color, title))
            if pitch > LETTER * len(words):
                parts.append(text(middle, top - 5, words, "middle", "strong"))
    return svg(name, HEIGHT, [*parts, text((LEFT + WIDTH) / 2, HEIGHT - 4, x_name, "middle")])


def stacked_bar(name: str, bars: Sequence[Bar], form: Form) -> str:
    """One lying bar, its parts side by side, and a line of legend for each: its name, its value, its share."""
    shown = [bar for bar in bars if math.isfinite(bar.value) and bar.value >= 0]
    total = sum(bar.value for bar in shown)
    if not total:
        return ""
    parts, x = [], 0.0
    for i, bar in enumerate(shown):
        share, y = bar.value / total, 74 + 26 * i
        parts += [
            rect(x, 0, share * WIDTH - 1.5, 42, bar.color, f"{bar.label}: {form(bar.value)}"),
            rect(0, y - 10, 12, 12, bar.color, bar.label),
            text(20, y, bar.label, kind="strong"),
            text(WIDTH - 80, y, form(bar.value), "end"),
            text(WIDTH, y, f"{100 * share:.1f} %", "end", "strong"),
        ]
        x += share * WIDTH
    return svg(name, 60 + 26 * len(shown), parts)
