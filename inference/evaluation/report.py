"""The report of a run: a table for the terminal, and report.html. Both omit what the metrics do not contain."""

import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from foredraft.heads.hub.card import TRAINING, aligned, duration, finite, identical, measured, number, percent, rows
from foredraft.inference.evaluation import plots
from foredraft.inference.evaluation.pages import write_page
from foredraft.inference.evaluation.plots import Bar, Point, Series, depth_color
from foredraft.inference.text import Detokenizer


class Sample(NamedTuple):
    prompt: str
    pieces: list[tuple[str, int]]  # text of a token, and its draft depth (0: a bonus token, chosen by the target)
    title: str = ""

    @classmethod
    def of(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        prompt: list[int],
        tokens: list[int],
        accepted: Iterable[int],
        emitted: Iterable[int],
        title: str = "",
    ) -> "Sample":
        """Create a sample from the tokens of a text. accepted, emitted: of each step, as `generation.Step` counts them. The
        first token comes from the prompt's forward."""
        depths = [0]
        for drafts, count in zip(accepted, emitted, strict=True):
            depths += [*range(1, drafts + 1), 0][:count]
        detokenizer = Detokenizer(tokenizer, skip_special_tokens=False, prompt=prompt)
        pieces = [(detokenizer.push(token), depth) for token, depth in zip(tokens, depths, strict=False)]
        return cls(tokenizer.decode(prompt), pieces, title)

    @property
    def drafted(self) -> int:
        return sum(depth > 0 for _, depth in self.pieces)

    @property
    def deepest(self) -> int:
        return max((depth for _, depth in self.pieces), default=0)

    @property
    def share(self) -> str:
        return f" ({percent(self.drafted / len(self.pieces))})" if self.pieces else ""


class RunRecord(NamedTuple):
    title: str  # "eagle3 for scripts/test_model"
    metrics: dict  # the content of metrics.json
    history: list[dict]  # {"step", "loss", "acc_1", ..} of the log, {"step", "acceptance_length"} of the evaluations
    samples: list[Sample]
    config: str  # the resolved yaml


class Tile(NamedTuple):
    """Describe one number in large type."""

    label: str
    value: str
    notes: list[str]
    kind: str = ""  # good, bad


Figure = tuple[str, str, str]  # title, note, chart ("" for an empty one)


def table(metrics: dict) -> str:
    """Return the measurements as plain text, in ASCII if possible, so that any terminal can print it."""
    return aligned(measured(metrics))


def format_measured(*notes: tuple[str, float | None]) -> list[str]:
    """Fill in the notes whose number was measured, and omit the others."""
    return [words.format(value) for words, value in notes if value is not None]


def headline(metrics: dict) -> Iterator[Tile]:
    """Yield the few numbers that matter most."""
    known = {key: found for key in metrics if (found := finite(metrics[key])) is not None}
    shares = [percent(share) for share in map(finite, metrics.get("held_out_agreement") or ()) if share is not None]
    if shares:
        notes = [f"at depth 1; by depth {', '.join(shares)}"]
        predicted = ("predicts an acceptance length of {:.2f} in chains", known.get("predicted_acceptance_length"))
        yield Tile("Held-out agreement", shares[0], notes + format_measured(predicted))
    if (tau := known.get("acceptance_length")) is not None:
        sampled = format_measured(("{:.2f} when sampling", known.get("acceptance_length_sampled")))
        yield Tile("Acceptance length", f"{tau:.2f}", ["tokens per target forward", *sampled])
    if (speedup := known.get("speedup")) is not None:
        slower = ["slower, not faster"] if speedup < 1 else []
        yield Tile("Speedup", f"{speedup:.2f}\u00d7", ["over the baseline (autoregressive)", *slower])
    if (speed := known.get("tokens_per_second")) is not None:
        baseline = known.get("baseline_tokens_per_second")
        yield Tile("Tokens per second", number(speed), [] if baseline is None else [f"baseline: {number(baseline)}"])
    same = {how: known[f"identical_{how}"] for how in ("greedy", "sampled") if f"identical_{how}" in known}
    if same:
        worst = min(same.values())  # one "yes" must not hide a "no"
        value = percent(worst) if 0 < worst < 1 else identical(worst)
        notes = ["to the baseline in float32", *(f"{how}: {identical(share)}" for how, share in same.items())]
        yield Tile("Identical output", value, notes, "good" if worst == 1 else "bad")


def prompt_notes(metrics: dict) -> list[str]:
    """Return notes on the prompts. Loops overestimate acceptance, so the page shows their number and effect. Speeds of a
    machine that other programs use are not reliable."""
    preempted = finite(metrics.get("preempted_share"))
    shared = [] if preempted is None else [f"Other programs used the core in {percent(preempted)} of the median time."]
    return shared + format_measured(
        ("{:.0f} held-out prompts.", finite(metrics.get("prompts"))),
        ("{:.0f} repetitive ones are counted separately.", finite(metrics.get("repetitive_prompts"))),
        ("Acceptance length with them: {:.2f}.", finite(metrics.get("acceptance_length_all"))),
    )


def series_of(history: list[dict], key: str, scale: float = 1.0) -> list[Point]:
    """Return (step, value) of the entries that have the key. A diverged loss is NaN, which interrupts the line."""
    pairs = [(finite(entry.get("step")), finite(entry[key])) for entry in history if key in entry]
    points = [(step, math.nan if value is None else scale * value) for step, value in pairs if step is not None]
    return sorted(points, key=lambda point: point[0])


def decoding_figures(metrics: dict) -> Iterator[Figure]:
    shares = [finite(share) for share in metrics.get("accepted_per_depth") or ()]
    bars = [
        Bar(f"depth {d}", math.nan, "muted", "-")
        if s is None
        else Bar(f"depth {d}", s, depth_color(d), f"{100 * s:.1f} %")
        for d, s in enumerate(shares, 1)
    ]
    title, note = "Accepted share per depth", "Share of all steps that accepted at least this number of drafts"
    yield title, note, plots.bar_chart(title, bars)
    seconds = {name: finite(part) for name, part in (metrics.get("step_seconds") or {}).items()}
    known = {name: part for name, part in seconds.items() if part is not None}
    whole = sum(known.values()) or math.nan
    parts = [
        Bar(name, part, plots.PARTS[i % len(plots.PARTS)], f"{duration(part)}, {percent(part / whole)}")
        for i, (name, part) in enumerate(known.items())
    ]
    title, note = "Where a step's time goes", f"One decoding step takes {duration(sum(known.values()))}"
    yield title, note, plots.bar_chart(title, parts)


def training_figures(history: list[dict]) -> Iterator[Figure]:
    accuracy = (found for entry in history for key in entry if (found := re.fullmatch(r"(?:held_out_)?acc_(\d+)", key)))
    depths = sorted({int(found[1]) for found in accuracy})
    held = [Series(f"depth {d}", series_of(history, f"held_out_acc_{d}", 100), depth_color(d)) for d in depths]
    note = "How often the head's first choice is the target's, on held-out text"
    title = "Held-out accuracy per depth"
    yield title, note, plots.line_chart(f"{title} over steps", held, " %", floor=0)
    loss = [Series("training", series_of(history, "loss"), depth_color(1))]
    loss.append(Series("held out", series_of(history, "held_out_loss"), depth_color(2)))
    yield "Loss", "Loss of the head", plots.line_chart("Loss over steps", loss)
    lines = [Series(f"depth {d}", series_of(history, f"acc_{d}", 100), depth_color(d)) for d in depths]
    note = "How often the head's first choice is the target's, on training text"
    yield "Accuracy per depth", note, plots.line_chart("Accuracy per depth over steps", lines, " %", floor=0)
    tau = [Series("", series_of(history, "acceptance_length"), depth_color(1))]
    note = "On held-out prompts, during training; the baseline is 1"
    yield "Acceptance length", note, plots.line_chart("Acceptance length over steps", tau, floor=1)


def write_report(path: Path, run: RunRecord) -> None:
    metrics = run.metrics
    about = [str(metrics[key]) for key in ("target", "head", "device", "dtype", "date") if metrics.get(key)]
    values: dict[str, Any] = {
        "title": run.title,
        "where": " \u00b7 ".join(word for word in about if word not in run.title),
        "tiles": list(headline(metrics)),
        "notes": prompt_notes(metrics),
        "decoding": list(decoding_figures(metrics)),
        "samples": run.samples,
        "training": list(training_figures(run.history)),
        "cost": rows(metrics, TRAINING),
        "device": metrics.get("device"),
        "command": metrics.get("command"),
        "versions": list((metrics.get("versions") or {}).items()),
        "config": run.config,
    }
    write_page(path, "report.html.jinja", **values)
