"""Write the tables of README.md and docs from figures.json:  python scripts/bench/tables.py [--check]

A table stands between two markers, `<!-- figures: NAME -->` and `<!-- end -->`, and is never typed. --check changes nothing
and fails where a table is not what figures.json gives, or where measured figures stand in a table without markers.

An entry of figures.json has `columns` (title, digits, unit), `rows` (a cell is text, a number, [number, standard error] or
null), and what a figure is worth nothing without: command, commit, date, hardware, n, standard_error. With a `note` these are
written under the table. Without it the text around the table has to say them.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FIGURES = ROOT / "scripts" / "bench" / "figures.json"
TOLD = ("command", "commit", "date", "hardware", "n", "standard_error")
MARKED = re.compile(r"^<!-- figures: (?P<name>[\w-]+) -->\n(?P<table>.*?)^<!-- end -->$", re.M | re.S)
TABLE = re.compile(r"(?:^\|.*\n)+", re.M)
# What a measured figure looks like as a cell: 1.87x or 1.27 ± 0.02 anywhere, 2.44 in README and among the results.
CLEAR = re.compile(r"[*~]*\d[\d,]*(\.\d+)?(x| ± \d.*)[*~]*")
BARE = re.compile(r"[*~]*\d[\d,]*\.\d.*")
LOG = "docs/results/ideas.md"  # a diary in sentences, whose figures are not published claims
Entry = dict[str, Any]


def load() -> dict[str, Entry]:
    return json.loads(FIGURES.read_text())


def publish(name: str, entry: Entry) -> None:
    """Replace one table in figures.json; the others keep their place."""
    entries = load()
    entries[name] = {key: entry[key] for key in ("note", *TOLD, "columns", "rows") if key in entry}
    FIGURES.write_text(dump(entries))


def dump(entries: dict[str, Entry]) -> str:
    """Format as JSON with a line per row of a table."""
    blocks = []
    for name, entry in entries.items():
        lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in entry.items() if key != "rows"]
        rows = ",\n".join(f"   {json.dumps(row)}" for row in entry["rows"])
        blocks.append(f" {json.dumps(name)}: {{\n" + ",\n".join([*lines, f'  "rows": [\n{rows}\n  ]']) + "\n }")
    return "{\n" + ",\n".join(blocks) + "\n}\n"


def faults(name: str, entry: Entry) -> list[str]:
    """Return what is missing in an entry."""
    found = [f"{name} has no {key}" for key in TOLD if not entry.get(key)]
    wrong = [row[0] for row in entry["rows"] if len(row) != len(entry["columns"])]
    return found + [f"{name}: {row} has not {len(entry['columns'])} cells" for row in wrong]


def cell(value: Any, column: dict[str, Any]) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    number, error = value if isinstance(value, list) else (value, None)
    digits, unit = column.get("digits", 0), column.get("unit", "")
    spread = "" if error is None else f" ± {error:,.{digits}f}"
    return f"{number:,.{digits}f}{unit}{spread}"


def markdown(entry: Entry) -> str:
    columns = entry["columns"]
    lines = [" | ".join(column["title"] for column in columns)]
    lines.append("|".join("---:" if "digits" in column else "---" for column in columns))
    lines += [" | ".join(cell(*pair) for pair in zip(row, columns, strict=True)) for row in entry["rows"]]
    table = "".join(f"|{line}|\n" if number == 1 else f"| {line} |\n" for number, line in enumerate(lines))
    if "note" not in entry:
        return table
    errors = f"± is the standard error ({entry['standard_error']})"
    facts = f"n = {entry['n']}; {errors}; {entry['hardware']}; {entry['date']}, commit {entry['commit']}"
    return f"{table}\n{entry['note']}; {facts}: `{entry['command']}`\n"


def written(text: str, entries: dict[str, Entry]) -> str:
    """Return a document with the tables of figures.json between its markers."""

    def replace(found: re.Match[str]) -> str:
        if found["name"] not in entries:
            raise ValueError(f"figures: {found['name']} is not in {FIGURES.relative_to(ROOT)}")
        return f"<!-- figures: {found['name']} -->\n{markdown(entries[found['name']])}<!-- end -->"

    return MARKED.sub(replace, text)


def typed(text: str, name: str) -> list[str]:
    """Return the rows with measured figures in tables that stand between no markers."""
    bare = re.sub(r"```.*?```", "", MARKED.sub("", text), flags=re.S)
    figure = BARE if name == "README.md" or name.startswith("docs/results/") else CLEAR
    rows = [row for table in TABLE.findall(bare) for row in table.splitlines() if name != LOG]
    return [row for row in rows if any(figure.fullmatch(part.strip()) for part in row.strip("|").split("|"))]


def documents() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def main(arguments: list[str]) -> int:
    entries, check = load(), arguments == ["--check"]
    if found := [fault for name, entry in entries.items() for fault in faults(name, entry)]:
        print("\n".join(found))
        return 1
    for path in documents():
        text, name = path.read_text(), path.relative_to(ROOT).as_posix()
        new = written(text, entries)
        if not check:
            path.write_text(new)
        elif new != text:
            found.append(f"{name} has a table that figures.json does not give: run python scripts/bench/tables.py")
        found += [f"{name} has a typed figure: {row}" for row in typed(new, name)]
    print("\n".join(found) or f"{len(entries)} tables of figures.json are in place")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
