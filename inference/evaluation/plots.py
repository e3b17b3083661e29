"""Line and bar charts as inline SVG, drawn by matplotlib without a window.

The colours in a chart are CSS variables of its page (`COLORS`), so that one chart serves light and dark pages, and the
colour of a depth is the same in a line, a bar and a token. A chart with nothing to draw is the empty string.
"""

import io
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from xml.etree import ElementTree

import numpy as np
from markupsafe import Markup

if TYPE_CHECKING:  # imported by the first chart: it takes half a second, and only a page needs it
    from matplotlib.axes import Axes

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
# CSS variable -> (light, dark). No light colour appears twice: `svg` finds the variable by it.
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
VARIABLES = {light: f"var(--{name})" for name, (light, _) in COLORS.items()}
# The parts of a step; the second, the target's read, is grey as are its tokens: colour is what the head adds.
PARTS = ("d1", "grey", "d3", "d6", "d8")

WIDTH, HEIGHT = 420, 236
LETTER = 7.2  # a generous width of one letter: where labels would run into each other, some are left out
MOST_POINTS = 300  # as many as the width can show; without a bound, a long run makes a page of many megabytes
DOT = 6.0  # a dot is a line of no length with round ends: matplotlib's markers are references to ids
TITLE = "title: "  # begins the gid of what has a title
SHAPE: tuple[str, ...] = ("d", "x", "y", "style")  # what a path or a text keeps
STYLE = Path(__file__).with_name("templates") / "chart.mplstyle"

Point = tuple[float, float]


class Series(NamedTuple):
    label: str  # stands beside the lines; empty: the last value stands at the line's end
    points: Sequence[Point]  # (x, y) in order of x; a y that is not finite breaks the line
    color: str  # a name in COLORS


class Bar(NamedTuple):
    label: str
    value: float
    color: str  # a name in COLORS


def depth_color(depth: int) -> str:
    return f"d{min(depth, len(DEPTHS))}"


@contextmanager
def empty_axes(height: float) -> Iterator["Axes"]:
    """To be drawn on; what is set and drawn here follows STYLE, never the user's matplotlibrc."""
    from matplotlib import style
    from matplotlib.figure import Figure  # not pyplot, which would choose a window

    with style.context(["default", STYLE]):
        axes = Figure(figsize=(WIDTH / 72, height / 72), layout="constrained").subplots()
        axes.set_frame_on(False)
        yield axes


def svg(axes: "Axes", name: str) -> Markup:
    """The chart as an element of a page, by its paths and texts alone: matplotlib's style sheet and ids would hold for the
    whole page. A gid that begins with TITLE becomes the title that a pointer shows."""
    buffer = io.StringIO()
    figure: Any = axes.get_figure()
    figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    root = ElementTree.fromstring(buffer.getvalue().replace(' xmlns="http://www.w3.org/2000/svg"', ""))
    picture = ElementTree.Element("svg", {"viewBox": root.attrib["viewBox"], "role": "img", "aria-label": name})
    for group in root.iter("g"):
        for shape in (child for child in group if child.tag in ("path", "text")):
            kept: dict[str, str] = {key: tidy(shape.attrib[key]) for key in SHAPE if key in shape.attrib}
            node = ElementTree.SubElement(picture, shape.tag, kept)
            node.text = shape.text
            if group.get("id", "").startswith(TITLE):
                ElementTree.SubElement(node, "title").text = group.attrib["id"].removeprefix(TITLE)
    return Markup(ElementTree.tostring(picture, encoding="unicode"))


def tidy(attribute: str) -> str:
    """An attribute with the page's fonts, its colours as variables, and coordinates of two digits."""
    attribute = re.sub(r"font-(size|family)[^;]*(; )?", "", attribute)
    attribute = re.sub("#[0-9a-f]{6}", lambda color: VARIABLES[color[0]], attribute)
    return re.sub(r"\d+\.\d+", lambda number: f"{float(number[0]):.2f}", attribute)


def thin(points: Sequence[Point]) -> tuple[np.ndarray, np.ndarray, int]:
    """xs, ys: at most MOST_POINTS, each the mean of `every` neighbours; with a NaN among them NaN, so breaks stay."""
    values = np.array(points, dtype=float)
    values[~np.isfinite(values)] = math.nan
    every = math.ceil(len(values) / MOST_POINTS)
    starts = np.arange(0, len(values), every)
    means = np.add.reduceat(values, starts) / np.diff(starts, append=len(values))[:, None]
    return means[:, 0], means[:, 1], every


def write(axes: "Axes", words: str, at: Point, offset: Point, color: str, **how: str) -> None:
    """A number beside what it belongs to. at: in the chart's values; offset: in pixels from there."""
    look: dict[str, Any] = {"color": COLORS[color][0], "weight": "bold", "annotation_clip": False, **how}
    axes.annotate(words, at, offset, textcoords="offset points", **look)


def line_chart(
    name: str, series: Sequence[Series], unit: str = "", floor: float | None = None, x_name: str = "step"
) -> str:
    """Lines over training steps or something else that is counted, from 0. The y axis begins at `floor`, or just below the
    lowest point."""
    series = [one for one in series if any(math.isfinite(y) for _, y in one.points)]
    if not series:
        return ""
    with empty_axes(HEIGHT) as axes:
        longest = max(draw_line(axes, one, unit, x_name) for one in series)
        axes.set_xlim(0, max(1.0, max(x for one in series for x, _ in one.points)))
        if floor is not None:
            axes.update_datalim([(0, floor)])
            axes.autoscale_view(scalex=False)
        axes.locator_params(axis="x", nbins=4, steps=[1, 2, 5, 10], integer=True)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.yaxis.set_major_formatter("{x:g}" + unit)
        axes.grid(axis="y")
        axes.set_xlabel(x_name if longest == 1 else f"{x_name} (each point is the mean of {longest} log entries)")
        if any(one.label for one in series):
            axes.figure.legend(loc="outside right center")
        return svg(axes, name)


def draw_line(axes: "Axes", series: Series, unit: str, x_name: str) -> int:
    """Of how many entries each point is the mean."""
    xs, ys, every = thin(series.points)
    color = COLORS[series.color][0]
    axes.plot(xs, ys, color=color, linewidth=2, label=series.label)
    shown = np.flatnonzero(np.isfinite(ys))
    joined = {*shown - 1, *shown + 1}
    for i in shown:
        if len(shown) <= 40 or i not in joined:  # a point without neighbours has no line
            title = f"{TITLE}{f'{series.label} {x_name}'.strip()} {xs[i]:,.0f}: {ys[i]:.2f}{unit}"
            axes.plot(xs[[i, i]], ys[[i, i]], color=color, linewidth=DOT, gid=title)
    if not series.label:
        last = shown[-1]
        write(axes, f"{ys[last]:.2f}{unit}", (xs[last], ys[last]), (7, 0), series.color, va="center")
    return every


def bar_chart(name: str, bars: Sequence[Bar], unit: str, x_name: str) -> str:
    """Upright bars of values from zero up. A value that is not finite keeps its place, empty."""
    if not any(math.isfinite(bar.value) for bar in bars):
        return ""
    letters = (WIDTH - 44) / len(bars) / LETTER  # that fit over or under a bar
    with empty_axes(HEIGHT) as axes:
        for place, bar in enumerate(bars):
            if math.isfinite(bar.value):
                words = f"{bar.value:.1f}{unit}"
                title = f"{TITLE}{x_name} {bar.label}: {words}"
                axes.bar(place, bar.value, 0.7, color=COLORS[bar.color][0], gid=title)
                if len(words) < letters:
                    write(axes, words, (place, bar.value), (0, 3), "ink", ha="center")
        axes.set_xlim(-0.5, len(bars) - 0.5)
        axes.set_ylim(0, None if any(bar.value > 0 for bar in bars) else 1)
        every = math.ceil((max(len(bar.label) for bar in bars) + 1) / letters)
        axes.set_xticks(range(0, len(bars), every), [bar.label for bar in bars[::every]])
        axes.set_xlabel(x_name)
        axes.yaxis.set_major_formatter("{x:g}" + unit)
        axes.grid(axis="y")
        return svg(axes, name)


def interval_chart(name: str, bars: Sequence[tuple[Bar, float, float]], unit: str, mark: float) -> str:
    """One lying bar per entry, with a line from its least to its greatest value. mark: a value to compare with."""
    if not bars:
        return ""
    most = max(high for _, _, high in bars)
    with empty_axes(30 + 30 * len(bars)) as axes:
        for place, (bar, low, high) in enumerate(bars):
            words = f"{bar.value:.2f}{unit}"
            title = f"{TITLE}{bar.label}: {words}, from {low:.2f} to {high:.2f}"
            axes.barh(place, bar.value, 0.6, color=COLORS[bar.color][0], gid=title)
            axes.plot([low, high], [place, place], color=COLORS["ink"][0], linewidth=1.5)
            write(axes, words, (high, place), (6, 0), "ink", va="center")
        axes.axvline(mark, color=COLORS["grey"][0], linewidth=1)
        axes.set_xlim(0, 1.12 * most)
        axes.set_ylim(len(bars) - 0.5, -0.5)  # the first on top
        axes.xaxis.set_major_formatter("{x:g}" + unit)
        axes.set_yticks(range(len(bars)), [bar.label for bar, _, _ in bars])
        return svg(axes, name)


def share_chart(name: str, bars: Sequence[Bar], form: Callable[[float], str]) -> str:
    """One lying bar per part of a whole, with its value and its share."""
    bars = [bar for bar in bars if math.isfinite(bar.value) and bar.value >= 0]
    total = sum(bar.value for bar in bars)
    if not total:
        return ""
    with empty_axes(8 + 34 * len(bars)) as axes:
        for place, bar in enumerate(bars):
            words = f"{form(bar.value)}, {100 * bar.value / total:.1f} %"
            axes.barh(place, bar.value, 0.6, color=COLORS[bar.color][0], gid=f"{TITLE}{bar.label}: {words}")
            write(axes, words, (bar.value, place), (6, 0), "ink", va="center")
        axes.set_xlim(0, max(bar.value for bar in bars))
        axes.set_ylim(len(bars) - 0.5, -0.5)  # the first on top
        axes.set_xticks([])
        axes.set_yticks(range(len(bars)), [bar.label for bar in bars])
        return svg(axes, name)
