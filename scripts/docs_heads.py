"""Tables about heads for scripts/docs.py: which engine loads which head, and what was measured (scripts/bench/figures.json).

`answers` builds every head for the test model and asks each exporter about it, so the tables show what the code does.
"""

import functools
from typing import Any

from foredraft.config import read
from foredraft.heads import Target
from foredraft.heads.formats.engines import FORMATS, export_for
from foredraft.inference import drafter_for
from foredraft.scripts.bench import tables
from foredraft.train.start import new_head
from foredraft.words import CONF, shipped

MEASURED = {
    "test-model-drafters-greedy": "Test model (6.5M parameters), 500 steps for every head, T=0",
    "test-model-drafters-sampled": "The same heads, T=1",
    "test-model-blocks": "Test model, 250 steps, trees of 32 nodes",
    "smollm2-equal-steps": "SmolLM2-135M-Instruct, 102,037 training positions for every head (below 0.1 is noise)",
    "smollm2-equal-time": "SmolLM2-135M-Instruct, three minutes of training for every head",
}
COLUMNS = {
    "vLLM": ("vllm", "mtp"),
    "SGLang": ("sglang",),
    "llama.cpp": ("gguf",),
    "speculators": ("speculators",),
    "transformers": ("transformers",),
}


def table(header: list[str], lines: list[list[str]]) -> str:
    every = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in every)


@functools.cache
def answers() -> dict[str, dict[str, Any]]:
    """Return per head what each exporter says about it: its command and note, or the ValueError that tells why not."""
    said: dict[str, dict[str, Any]] = {}
    for kind in sorted(file.stem for file in (CONF / "head").glob("*.yaml") if file.stem != "auto"):
        target = Target.from_pretrained(shipped("test_model"), dtype="float32", device="cpu")
        settings = read("train", f"head={kind}", "target=test_model").head
        head = new_head(settings, target)
        said[kind] = {"tree": drafter_for(head, target).branches}
        for name in FORMATS:
            try:
                export = export_for(name, head, target)
            except ValueError as error:
                said[kind][name] = error
            else:
                note = export.note.split("\n")[0].replace(target.name, "ORG/NAME")
                said[kind][name] = export.command(head, "ORG/NAME", "exported"), note
    return said


def support() -> str:
    lines = []
    for kind, said in answers().items():
        cells = [verdict(f"{kind}.md#export", [said[name] for name in names]) for names in COLUMNS.values()]
        lines.append([f"[{kind}]({kind}.md)", "yes", "yes" if said["tree"] else "chain", *cells])
    return table(["head", "train", "tree here", *COLUMNS], lines)


def verdict(page: str, said: list[Any]) -> str:
    """Return whether an engine loads a head; a refusal that names a key of the head is a condition."""
    if any(isinstance(answer, tuple) for answer in said):
        return "yes"
    if any("Qwen3.5" in str(answer) for answer in said):
        return "Qwen3.5"
    return f"[with conditions]({page})" if any("head." in str(answer) for answer in said) else "–"


def engines(kind: str) -> str:
    """Return the export formats of a head with the command that loads it, and for the others the reason why not."""
    made = [
        [f"`format={name}`", f"`{said[0]}`", said[1]]
        for name, said in answers()[kind].items()
        if isinstance(said, tuple)
    ]
    refused = [f"- `format={name}`: {said}." for name, said in answers()[kind].items() if isinstance(said, ValueError)]
    loads = [table(["export", "command", "note"], made)] if made else []
    return "\n\n".join([*loads, "Refused for the test model, with the reason:", "\n".join(refused)])


def measured(head: str) -> str:
    """Return the rows of a head, or of all, in each table of figures.json that has them."""
    parts = []
    for name, title in MEASURED.items():
        entry = tables.load()[name]
        lines = [row for row in entry["rows"] if head == "all" or row[0] in (head, "no drafts")]
        if any(row[0] != "no drafts" for row in lines):
            facts = f"{entry['hardware']}; {entry['date']}; n = {entry['n']}; `{entry['command']}`"
            parts.append(f"**{title}.** {facts}\n\n{tables.markdown({'columns': entry['columns'], 'rows': lines})}")
    return "\n".join(parts)


def cell(row: str, *titles: str) -> str:
    """Return a cell of the table of all drafters: the first of these columns that has a figure."""
    entry = tables.load()["test-model-drafters-greedy"]
    found = next(line for line in entry["rows"] if line[0] == row)
    columns = {column["title"]: number for number, column in enumerate(entry["columns"])}
    number = next(columns[title] for title in titles if found[columns[title]] is not None)
    return tables.cell(found[number], entry["columns"][number])


def seconds(head: str) -> str:
    """Return how long the test model's head was trained."""
    return cell(head, "training s")


def speedup(drafter: str) -> str:
    """Return the speed-up at T=0 on the test model."""
    return cell(drafter, "speed-up, tree=auto", "speed-up, fixed tree")
