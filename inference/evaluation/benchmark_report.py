"""The results of a benchmark: figures.json, figures.csv, and the page report.html."""

import csv
import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from foredraft.heads.hub.card import aligned, duration
from foredraft.inference.evaluation import plots
from foredraft.inference.evaluation.figures import ALL, LOOPS, Spread
from foredraft.inference.evaluation.pages import write_page
from foredraft.inference.evaluation.plots import Bar, Series, depth_color
from foredraft.inference.evaluation.report import Figure, Sample
from foredraft.inference.evaluation.speed import MAX_PREEMPTED_SHARE

TIMES = "\u00d7"


class Results(NamedTuple):
    """Hold all results. Temperatures that are keys of JSON are strings."""

    metadata: dict[str, Any]  # target, device, dtype, versions, date, command, prompts
    rows: list[dict[str, Any]]  # from figures.decoder_figures, with "drafter", "category", "temperature"
    rivals: list[str]  # names of the systems that are not ours
    identity: list[dict[str, Any]]  # "drafter", "temperature", "texts", "identical", "rounding", "wrong"
    stages: list[dict[str, Any]]  # "drafter", "temperature", "seconds": {stage: seconds}
    alignment: dict[str, list[str]]  # drafter -> its faults
    errors: dict[str, str]  # drafter -> reason for its omission


def warnings(results: Results) -> Iterator[str]:
    """Yield the warnings that a reader must not miss."""
    for name, reason in results.errors.items():
        yield f"{name} failed and is omitted: {reason}"
    for name, faults in results.alignment.items():
        yield from (f"{name}: {fault}" for fault in faults)
    if (preempted := results.metadata["preempted_share"]) > MAX_PREEMPTED_SHARE:
        yield (
            f"other programs used this machine: half of the texts had no core for at least {preempted:.0%} of their time, "
            "even when timed again. Speeds vary with that, acceptance does not"
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


HEADINGS = (
    "drafter",
    "acceptance length",
    "as a chain",
    "tokens/s",
    "with prefill",
    "over baseline",
    "over transformers",
    "eta",
)


def cells(row: dict[str, Any]) -> list[str]:
    """Return the cells of a table row, in the order of HEADINGS."""
    return [
        row["drafter"],
        format_value(row["acceptance_length"]),
        format_value(row["chain_acceptance_length"]),
        format_value(row["tokens_per_second"]),
        format_value(row["tokens_per_second_with_prefill"]),
        format_value(row["speedup"], TIMES),
        format_value(row["over_best_rival"], TIMES),
        format_value(row["eta"]),
    ]


def verdict(results: Results, drafter: str, temperature: float) -> str:
    for row in results.identity:
        if (row["drafter"], row["temperature"]) == (drafter, temperature):
            if row["wrong"]:
                return "changes the text"
            return "identical" if not row["rounding"] else f"identical up to rounding in {count_texts(row['rounding'])}"
    return ""


def count_texts(texts: int) -> str:
    return f"{texts} text" if texts == 1 else f"{texts} texts"


Table = tuple[str, list[str], list[list[str]]]  # title, headings, rows


def tables(results: Results, chosen: Iterable[str]) -> Iterator[Table]:
    """Yield a table per temperature and chosen category. Columns without a figure are omitted. Whether texts are identical
    is known only for all categories together."""
    for temperature in dict.fromkeys(row["temperature"] for row in results.rows):
        for category in chosen:
            rows = [r for r in results.rows if (r["temperature"], r["category"]) == (temperature, category)]
            if rows:
                title = f"Temperature {temperature:g}, {category}: {count_texts(rows[0]['texts'])}"
                whole = category == ALL
                body = [[*cells(row), verdict(results, row["drafter"], temperature) if whole else ""] for row in rows]
                filled = [column for column in zip([*HEADINGS, "text"], *body) if any(column[1:])]
                headings, *body = map(list, zip(*filled))
                yield title, headings, body


def categories(results: Results) -> list[str]:
    """Return all categories except the one of all texts; loops come last."""
    found = dict.fromkeys(row["category"] for row in results.rows)
    return [*(name for name in found if name not in (ALL, LOOPS)), LOOPS]


def context_tables(results: Results) -> Iterator[Table]:
    """Yield tables of the acceptance length by context length, if texts cover several ranges of it."""
    for temperature in dict.fromkeys(row["temperature"] for row in results.rows):
        rows = [r for r in results.rows if (r["temperature"], r["category"]) == (temperature, ALL) and r["by_context"]]
        ends = sorted({int(end) for row in rows for end in row["by_context"]})
        if len(ends) > 1:
            title = f"Acceptance length by context length, temperature {temperature:g}"
            body = [[row["drafter"], *(format_value(row["by_context"].get(str(end))) for end in ends)] for row in rows]
            yield title, ["drafter", *(f"to {end:,}" for end in ends)], body


def figures(results: Results) -> Iterator[Figure]:
    for temperature in dict.fromkeys(row["temperature"] for row in results.rows):
        rows = [r for r in results.rows if r["temperature"] == temperature and r["category"] == ALL]
        label = f"at temperature {temperature:g}"
        bars = [
            Bar(
                row["drafter"],
                found.median,
                "grey" if row["drafter"] in results.rivals else "d1",
                format_value(found, TIMES),
            )
            for row in rows
            if (found := row["speedup_with_prefill"]) is not None
        ]
        note = "Over the baseline, prompts included; minimum and maximum of the repeats; other libraries are grey"
        yield f"Speedup {label}", note, plots.bar_chart(f"Speedup {label}", bars)
        lines = [
            Series(row["drafter"], [(d, 100 * share) for d, share in enumerate(shares, 1)], depth_color(number))
            for number, row in enumerate(rows, 1)
            if (shares := row["accepted_per_depth"])
        ]
        note = "Share of the steps that accepted all earlier drafts"
        chart = plots.line_chart(f"Acceptance by depth {label}", lines, " %", 0, "depth")
        yield f"Acceptance by depth {label}", note, chart


def stage_lines(results: Results) -> list[tuple[str, str]]:
    """Return where the time of a step goes, a line per system and temperature."""
    found = []
    for row in results.stages:
        total = sum(row["seconds"].values())
        parts = ", ".join(f"{name} {part / max(total, 1e-12):.0%}" for name, part in row["seconds"].items())
        found.append((f"{row['drafter']}, T={row['temperature']:g}", f"{duration(total)}: {parts}"))
    return found


def write(directory: Path, results: Results, samples: list[Sample]) -> None:
    """Write the three files. samples: texts for the page."""
    (directory / "figures.json").write_text(json.dumps(results._asdict(), indent=1) + "\n")
    write_csv(directory / "figures.csv", results)
    found = results.metadata
    facts = [(key, str(found[key])) for key in ("target", "device", "dtype", "date", "prompts")]
    values: dict[str, Any] = {
        "title": f"Drafters for {found['target']}",
        "where": " \u00b7 ".join(value for _, value in facts[1:]),
        "warnings": list(warnings(results)),
        "figures": list(figures(results)),
        "tables": [*tables(results, [ALL]), *context_tables(results)],
        "categories": list(tables(results, categories(results))),
        "samples": samples,
        "stages": stage_lines(results),
        "command": found["command"],
        "versions": list(found["versions"].items()),
    }
    write_page(directory / "report.html", "benchmark.html.jinja", **values)


def write_csv(path: Path, results: Results) -> None:
    """Write a row per drafter, category and temperature; a spread has three columns."""
    flat = [dict(flatten_row(row)) for row in results.rows]
    names = list(dict.fromkeys(key for row in flat for key in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(flat)


def flatten_row(row: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key in ("drafter", "temperature", "category"):
        yield key, row[key]
    for key, value in row.items():
        if isinstance(value, Spread):
            yield from ((f"{key}_{part}", number) for part, number in value._asdict().items())
        elif isinstance(value, dict):
            yield key, " ".join(f"{name}:{number:.4f}" for name, number in value.items())
        elif isinstance(value, list):
            yield key, " ".join(f"{share:.4f}" for share in value)
        elif key not in ("drafter", "temperature", "category"):
            yield key, "" if isinstance(value, float) and math.isnan(value) else value


def terminal(results: Results) -> str:
    """Return all tables as plain text for a terminal."""
    parts = []
    for title, headings, rows in (*tables(results, [ALL, *categories(results)]), *context_tables(results)):
        widths = [max(len(row[i]) for row in [headings, *rows]) for i in range(len(headings))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in [headings, *rows]]
        parts.append("\n".join([title, *lines]).replace(TIMES, "x"))
    parts.append(aligned(stage_lines(results)))
    parts += [f"warning: {line}" for line in warnings(results)]
    return "\n\n".join(parts)
