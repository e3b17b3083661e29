"""The report of a benchmark, alone or at the end of a training run: report.html, figures.json, figures.csv, and tables for
the terminal. All of them omit what was not measured."""

import csv
import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from foredraft.heads.hub.card import MEASURED, TRAINING, aligned, duration, finite, lists, rows
from foredraft.inference.evaluation import plots
from foredraft.inference.evaluation.plots import COLORS, DEPTHS, Bar, Point, Series, depth_color
from foredraft.inference.evaluation.results import ALL, LOOPS, Results, Sample, Spread

TIMES = "\u00d7"
MAX_PREEMPTED_SHARE = 0.1  # share of time without a core above which speeds are not reliable
TILES = 5  # measurements in large type

Figure = tuple[str, str, str]  # title, note, chart ("" for an empty one)
Table = tuple[str, list[str], list[list[str]]]  # title, headings, rows


class Report(NamedTuple):
    title: str  # "eagle3 for scripts/test_model"
    metrics: dict  # the content of metrics.json, or the metadata of the results
    results: Results | None  # None: nothing was decoded
    samples: list[Sample]
    history: Sequence[dict] = ()  # the entries of the log, with "step" and "loss", "acc_1" or "acceptance_length"
    config: str = ""  # the resolved yaml


def write_report(directory: Path, report: Report) -> None:
    """Write report.html, and figures.json and figures.csv if something was decoded."""
    metrics, results = report.metrics, report.results
    where = [str(metrics[key]) for key in ("target", "head", "device", "dtype", "date") if metrics.get(key)]
    where += [metrics["prompts"]] if isinstance(metrics.get("prompts"), str) else []
    values: dict[str, Any] = {
        "title": report.title,
        "where": " \u00b7 ".join(word for word in where if word not in report.title),
        "tiles": rows(metrics, MEASURED[:TILES]),
        "measured": rows(metrics, MEASURED[TILES:]) + lists(metrics),
        "samples": report.samples,
        "training": list(training_figures(report.history)),
        "cost": rows(metrics, TRAINING),
        "device": metrics.get("device"),
        "command": metrics.get("command"),
        "versions": list((metrics.get("versions") or {}).items()),
        "config": report.config,
        "warnings": [] if results is None else list(warnings(results)),
        "decoding": [] if results is None else list(decoding_figures(results)),
        "tables": [] if results is None else list(tables(results, [ALL])),
        "categories": [] if results is None else list(tables(results, categories(results))),
        "stages": [] if results is None else stage_lines(results),
    }
    write_page(directory / "report.html", values)
    if results is not None:
        write_figures(directory, results)


def write_page(path: Path, values: dict[str, Any]) -> None:
    """Write a page without scripts, which loads nothing (its content policy forbids it), so that it can be mailed, archived
    and opened years later."""
    loader = PackageLoader("foredraft.inference.evaluation")
    pages = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    # A parser would turn a raw carriage return into a newline.
    pages.filters["verbatim"] = lambda text: Markup(str(escape(text)).replace("\r", "&#13;"))
    pages.globals |= {"colors": COLORS, "last_depth": len(DEPTHS)}
    # A byte-level token can end within a character. Characters that cannot be encoded are replaced.
    page = pages.get_template("report.html.jinja").render(values)
    path.write_text(page, encoding="utf-8", errors="replace", newline="\n")


def write_figures(directory: Path, results: Results) -> None:
    """Write figures.json, and figures.csv with a row per drafter, category and temperature; a spread has three columns."""
    (directory / "figures.json").write_text(json.dumps(results._asdict(), indent=1) + "\n")
    flat = [dict(flatten_row(row)) for row in results.rows]
    with (directory / "figures.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in flat for key in row)))
        writer.writeheader()
        writer.writerows(flat)


def flatten_row(row: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in row.items():
        if isinstance(value, Spread):
            yield from ((f"{key}_{part}", number) for part, number in value._asdict().items())
        elif isinstance(value, list):
            yield key, " ".join(f"{share:.4f}" for share in value)
        else:
            yield key, value


def terminal(results: Results) -> str:
    """Return all tables as plain text for a terminal."""
    parts = []
    for title, headings, body in tables(results, [ALL, *categories(results)]):
        widths = [max(map(len, column)) for column in zip(headings, *body)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in [headings, *body]]
        parts.append("\n".join([title, *lines]).replace(TIMES, "x"))
    parts.append(aligned(stage_lines(results)))
    parts += [f"warning: {line}" for line in warnings(results)]
    return "\n\n".join(parts)


# Results of the benchmark


def warnings(results: Results) -> Iterator[str]:
    """Yield the warnings that a reader must not miss."""
    for name, reason in results.errors.items():
        yield f"{name} failed and is omitted: {reason}"
    for name, faults in results.alignment.items():
        yield from (f"{name}: {fault}" for fault in faults)
    if (preempted := results.metadata["preempted_share"]) > MAX_PREEMPTED_SHARE:
        yield (
            f"other programs used this machine: half of the texts had no core for at least {preempted:.0%} of their time, "
            "so speeds vary, acceptance does not"
        )
    for row in results.identity:
        if row["wrong"]:
            yield (
                f"{row['drafter']} changes the text: at temperature {row['temperature']:g}, {row['wrong']} of {row['texts']} "
                "texts differ from the baseline by more than rounding"
            )


def format_value(value: Any, unit: str = "") -> str:
    if value is None:
        return ""
    if isinstance(value, Spread):
        digits = 2 if unit else 1
        ends = "" if value.least == value.most else f" ({value.least:.{digits}f} to {value.most:.{digits}f})"
        return f"{value.median:.{digits}f}{unit}{ends}"
    return f"{value:.2f}{unit}" if isinstance(value, float) else str(value)


COLUMNS = {  # heading -> key of a row, and unit
    "drafter": ("drafter", ""),
    "acceptance length": ("acceptance_length", ""),
    "chain": ("chain_acceptance_length", ""),
    "tokens/s": ("tokens_per_second", ""),
    "speed-up": ("speedup", TIMES),
}


def verdict(results: Results, drafter: str, temperature: float) -> str:
    for row in results.identity:
        if (row["drafter"], row["temperature"]) == (drafter, temperature) and row["texts"]:
            if row["wrong"]:
                return "changes the text"
            return "identical" if not row["rounding"] else f"identical up to rounding in {count_texts(row['rounding'])}"
    return ""


def count_texts(texts: int) -> str:
    return f"{texts} text" if texts == 1 else f"{texts} texts"


def tables(results: Results, chosen: Iterable[str]) -> Iterator[Table]:
    """Yield a table per temperature and chosen category. Columns without a figure are omitted. Whether texts are identical
    is known only for all categories together."""
    for temperature in dict.fromkeys(row["temperature"] for row in results.rows):
        for category in chosen:
            found = [r for r in results.rows if (r["temperature"], r["category"]) == (temperature, category)]
            if found:
                texts, timed = (max(row[key] for row in found) for key in ("texts", "timed_texts"))
                title = f"Temperature {temperature:g}, {category}: {count_texts(texts)}"
                title += f", {timed} of them timed" if timed < texts else ""
                body = [[format_value(row[key], unit) for key, unit in COLUMNS.values()] for row in found]
                for row, cells in zip(found, body):
                    if row["acceptance_error"]:  # zero without drafts
                        cells[1] += f" ± {row['acceptance_error']:.2f}"
                    cells.append(verdict(results, row["drafter"], temperature) if category == ALL else "")
                filled = [column for column in zip([*COLUMNS, "text"], *body) if any(column[1:])]
                headings, *body = map(list, zip(*filled))
                yield title, headings, body


def categories(results: Results) -> list[str]:
    """Return all categories except the one of all texts, if there are several; loops come last."""
    names = [name for name in dict.fromkeys(row["category"] for row in results.rows) if name not in (ALL, LOOPS)]
    return [*(names if len(names) > 1 else []), LOOPS]


def decoding_figures(results: Results) -> Iterator[Figure]:
    for temperature in dict.fromkeys(row["temperature"] for row in results.rows):
        found = [r for r in results.rows if r["temperature"] == temperature and r["category"] == ALL]
        title = f"Speedup at temperature {temperature:g}"
        bars = [
            Bar(name, speedup.median, "grey" if name in results.rivals else "d1", format_value(speedup, TIMES))
            for name, speedup in ((row["drafter"], row["speedup"]) for row in found)
            if speedup is not None
        ]
        note = "Over the baseline, prompts included; minimum and maximum of the repeats; other libraries are grey"
        yield title, note, plots.bar_chart(title, bars)
        title = f"Acceptance by depth at temperature {temperature:g}"
        lines = [
            Series(row["drafter"], [(d, 100 * share) for d, share in enumerate(shares, 1)], depth_color(place))
            for place, row in enumerate(found, 1)
            if (shares := row["accepted_per_depth"])
        ]
        note = "Share of the steps that accepted at least this number of drafts"
        yield title, note, plots.line_chart(title, lines, " %", 0, "depth")


def stage_lines(results: Results) -> list[tuple[str, str]]:
    """Return where the time of a step goes, a line per system and temperature."""
    lines = []
    for row in results.stages:
        total = sum(row["seconds"].values())
        parts = ", ".join(f"{name} {seconds / max(total, 1e-12):.0%}" for name, seconds in row["seconds"].items())
        lines.append((f"{row['drafter']}, T={row['temperature']:g}", f"{duration(total)}: {parts}"))
    return lines


# History of a training run


def series_of(history: Sequence[dict], key: str, scale: float = 1.0) -> list[Point]:
    """Return (step, value) of the entries that have the key. A diverged loss is NaN, which interrupts the line."""
    pairs = [(finite(entry.get("step")), finite(entry[key])) for entry in history if key in entry]
    points = [(step, math.nan if value is None else scale * value) for step, value in pairs if step is not None]
    return sorted(points, key=lambda point: point[0])


def training_figures(history: Sequence[dict]) -> Iterator[Figure]:
    accuracy = (found for entry in history for key in entry if (found := re.fullmatch(r"(?:held_out_)?acc_(\d+)", key)))
    depths = sorted({int(found[1]) for found in accuracy})

    def by_depth(prefix: str) -> list[Series]:
        return [Series(f"depth {d}", series_of(history, f"{prefix}{d}", 100), depth_color(d)) for d in depths]

    loss = [Series("training", series_of(history, "loss"), depth_color(1))]
    loss.append(Series("held out", series_of(history, "held_out_loss"), depth_color(2)))
    tau = [Series("", series_of(history, "acceptance_length"), depth_color(1))]
    first = "How often the head's first choice is the target's"
    for title, note, lines, unit, floor in (
        ("Held-out accuracy per depth", f"{first}, on held-out text", by_depth("held_out_acc_"), " %", 0),
        ("Loss", "Loss of the head", loss, "", None),
        ("Accuracy per depth", f"{first}, on training text", by_depth("acc_"), " %", 0),
        ("Acceptance length", "On held-out prompts, during training; the baseline is 1", tau, "", 1),
    ):
        yield title, note, plots.line_chart(f"{title} over steps", lines, unit, floor)
