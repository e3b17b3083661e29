"""What a run ends with: a table for the terminal, and report.html, one page that needs nothing but itself.

The page has no script and loads nothing (its own content policy forbids it), so it can be mailed, archived and opened
years later. Whatever the metrics lack is left out of it.
"""

import math
import re
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import NamedTuple

from heads.hub.card import TRAINING, duration, finite, identical, measured, number, percent, rows
from inference.evaluation import plots
from inference.evaluation.plots import DEPTHS, Bar, Point, Series, depth_color


class Sample(NamedTuple):
    prompt: str
    pieces: list[tuple[str, int]]  # text of a token; 0: the target's own (root, bonus), d >= 1: accepted at depth d


class RunRecord(NamedTuple):
    title: str  # "eagle3 for scripts/embedded_target"
    metrics: dict  # what metrics.json holds
    history: list[dict]  # {"step", "loss", "acc_1", ..} of the log, {"step", "acceptance_length"} of the evaluations
    samples: list[Sample]
    config: str  # the resolved yaml


PAGE_STYLE = """
:root{color-scheme:light dark;--page:#fff;--soft:#f6f7f9;--line:#e4e7ec;--ink:#1a1d23;--muted:#636a76;
--good:#12784f;--bad:#b3341f}
@media (prefers-color-scheme:dark){:root{--page:#12151a;--soft:#191d24;--line:#2a2f38;--ink:#e9ecf1;--muted:#98a0ad;
--good:#4fcf98;--bad:#ff8a75}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);-webkit-text-size-adjust:100%;
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:980px;margin:0 auto;padding:40px 20px 64px}
h1{font-size:clamp(21px,5vw,26px);line-height:1.25;letter-spacing:-.01em;margin:0;overflow-wrap:anywhere}
h2{font-size:19px;margin:48px 0 16px;padding-top:20px;border-top:1px solid var(--line)}
h3{font-size:15px;margin:0}
p{margin:6px 0;max-width:90ch}
.muted,figcaption p,dt,.tile p{color:var(--muted);font-size:14px}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:28px 24px;margin:32px 0 24px}
.tile h3{font-weight:600;color:var(--muted)}
.tile b{display:block;font-size:42px;line-height:1.2;letter-spacing:-.02em;font-weight:650}
.tile p{margin:2px 0}
.good{color:var(--good)}.bad{color:var(--bad)}
.grid2{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,330px),1fr));gap:36px 48px}
figure{margin:0}
figcaption{margin-bottom:14px}
figcaption p{margin:2px 0 0}
dl{margin:0;display:grid;grid-template-columns:max-content 1fr;gap:6px 24px;font-size:14px}
dd{margin:0;overflow-wrap:anywhere;font-variant-numeric:tabular-nums}
pre{margin:12px 0 0;padding:16px 18px;background:var(--soft);border-radius:8px;white-space:pre-wrap;
overflow-wrap:anywhere;font:13.5px/1.75 ui-monospace,Menlo,Consolas,"DejaVu Sans Mono",monospace;tab-size:4}
.prompt{color:var(--muted)}
.own{font-weight:700}
.depth{padding:2px 0;border-radius:2px;-webkit-box-decoration-break:clone;box-decoration-break:clone}
.newline::before{content:"\\21B5";opacity:.5}
.legend{display:flex;flex-wrap:wrap;gap:4px 18px;list-style:none;margin:12px 0;padding:0;font-size:14px}
.legend span{font-family:ui-monospace,monospace;padding:1px 7px;margin-right:6px}
summary{cursor:pointer;font-weight:600;padding:6px 0}
details{margin-top:12px}
"""
TINTS = (f".d{i}{{background:var(--t{i});box-shadow:inset 0 -2px var(--d{i})}}" for i in range(1, len(DEPTHS) + 1))
TOKEN_STYLE = "\n".join(TINTS)


def table(metrics: dict) -> str:
    """The measurements as plain text, in ASCII where they are, so that any terminal can print it."""
    lines = measured(metrics)
    width = max((len(label) for label, _ in lines), default=0)
    return "\n".join(f"{label:<{width}}  {value}" for label, value in lines)


def verbatim(text: str) -> str:
    """`text` for the page, unchanged when read back: a parser would turn a raw carriage return into a newline."""
    return escape(text).replace("\r", "&#13;")


def said(words: str, value: float | None) -> str | None:
    return None if value is None else words.format(value)


def tile(label: str, value: str, *notes: str | None, kind: str = "") -> str:
    below = "".join(f"<p>{escape(note)}</p>" for note in notes if note)
    return f'<section class="tile"><h3>{escape(label)}</h3><b class="{kind}">{escape(value)}</b>{below}</section>'


def headline(metrics: dict) -> str:
    """The few numbers that matter, large."""
    known = {key: found for key in metrics if (found := finite(metrics[key])) is not None}
    tiles = []
    if (tau := known.get("acceptance_length")) is not None:
        sampled = said("{:.2f} when sampling", known.get("acceptance_length_sampled"))
        tiles.append(tile("Acceptance length", f"{tau:.2f}", "tokens per target forward", sampled))
    if (speedup := known.get("speedup")) is not None:
        slower = "slower, not faster" if speedup < 1 else None
        tiles.append(tile("Speedup", f"{speedup:.2f}\u00d7", "over plain decoding", slower))
    if (speed := known.get("tokens_per_second")) is not None:
        plain = known.get("plain_tokens_per_second")
        against = None if plain is None else f"against {number(plain)} plain"
        tiles.append(tile("Tokens per second", number(speed), against))
    same = {how: known[f"identical_{how}"] for how in ("greedy", "sampled") if f"identical_{how}" in known}
    if same:
        worst = min(same.values())  # one "yes" must not hide a "no" beside it
        value = percent(worst) if 0 < worst < 1 else identical(worst)
        notes = (f"{how}: {identical(share)}" for how, share in same.items())
        kind = "good" if worst == 1 else "bad"
        tiles.append(tile("Identical output", value, "as plain decoding in float32", *notes, kind=kind))
    return f'<div class="tiles">{"".join(tiles)}</div>' if tiles else ""


def prompts_note(metrics: dict) -> str:
    """Loops flatter acceptance, so the page says how many there were and what they would have added."""
    notes = (
        said("{:.0f} held-out prompts.", finite(metrics.get("prompts"))),
        said("{:.0f} repetitive ones counted apart.", finite(metrics.get("repetitive_prompts"))),
        said("Acceptance length with them: {:.2f}.", finite(metrics.get("acceptance_length_all"))),
    )
    shown = " ".join(note for note in notes if note)
    return f'<p class="muted">{shown}</p>' if shown else ""


def figure(title: str, note: str, chart: str) -> str:
    if not chart:
        return ""
    below = f"<p>{escape(note)}</p>" if note else ""
    return f"<figure><figcaption><h3>{escape(title)}</h3>{below}</figcaption>{chart}</figure>"


def logged(history: list[dict], key: str, scale: float = 1.0) -> list[Point]:
    """(step, value) of every entry that has the key. A loss that diverged stays in as NaN: the line shows the break."""
    pairs = [(finite(entry.get("step")), finite(entry[key])) for entry in history if key in entry]
    points = [(step, math.nan if value is None else scale * value) for step, value in pairs if step is not None]
    return sorted(points, key=lambda point: point[0])


def decoding_figures(metrics: dict) -> Iterable[str]:
    shares = [finite(share) for share in metrics.get("accepted_per_depth") or ()]
    bars = [Bar(str(d), math.nan if s is None else 100 * s, depth_color(d)) for d, s in enumerate(shares, 1)]
    title, note = "Accepted share per depth", "Of all steps, those that accepted at least this many drafts"
    yield figure(title, note, plots.bar_chart(title, bars, " %", "depth"))
    seconds = {name: finite(part) for name, part in (metrics.get("step_seconds") or {}).items()}
    known = [(name, part) for name, part in seconds.items() if part is not None]
    parts = [Bar(name, part, plots.part_color(i)) for i, (name, part) in enumerate(known)]
    title, note = "Where a step's time goes", f"One decoding step takes {duration(sum(part for _, part in known))}"
    yield figure(title, note, plots.stacked_bar(title, parts, duration))


def training_figures(history: list[dict]) -> Iterable[str]:
    loss = [Series("", logged(history, "loss"), depth_color(1))]
    yield figure("Loss", "Of the head, on training text", plots.line_chart("Loss over steps", loss))
    accuracy = (found for entry in history for key in entry if (found := re.fullmatch(r"acc_(\d+)", key)))
    depths = sorted({int(found[1]) for found in accuracy})
    lines = [Series(f"depth {d}", logged(history, f"acc_{d}", 100), depth_color(d)) for d in depths]
    note = "How often the head's first choice is the target's"
    yield figure("Agreement per depth", note, plots.line_chart("Agreement per depth over steps", lines, " %", floor=0))
    tau = [Series("", logged(history, "acceptance_length"), depth_color(1))]
    note = "On held-out prompts, while training; plain decoding is 1"
    yield figure("Acceptance length", note, plots.line_chart("Acceptance length over steps", tau, floor=1))


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    body = "".join(f"<dt>{escape(label)}</dt><dd>{escape(value)}</dd>" for label, value in pairs)
    return f"<dl>{body}</dl>" if body else ""


def token(piece: str, depth: int) -> str:
    how = f"drafted, accepted at depth {depth}" if depth else "the target's own"
    kind = f"depth d{min(depth, len(DEPTHS))}" if depth else "own"
    # The style sheet draws the mark of a newline, so that text copied from the page stays the text.
    newline = " newline" if "\n" in piece else ""
    return f'<span class="{kind}{newline}" title="{how}">{verbatim(piece)}</span>'


def sample_block(sample: Sample) -> str:
    tokens = "".join(token(piece, depth) for piece, depth in sample.pieces)
    drafted = sum(depth > 0 for _, depth in sample.pieces)
    share = f" ({percent(drafted / len(sample.pieces))})" if sample.pieces else ""
    note = f'<p class="muted">{drafted} of {len(sample.pieces)} tokens were drafted{share}.</p>'
    return f'{note}<pre><span class="prompt">{verbatim(sample.prompt)}</span>{tokens}</pre>'


def samples_section(samples: list[Sample]) -> str:
    if not samples:
        return ""
    deepest = max((depth for sample in samples for _, depth in sample.pieces), default=0)
    drafted = [(f"depth d{d}", f"drafted, depth {d}") for d in range(1, min(deepest, len(DEPTHS)) + 1)]
    keys = [("prompt", "prompt"), ("own", "the target's own"), *drafted]
    deeper = " and deeper" if deepest > len(DEPTHS) else ""
    legend = "".join(f'<li><span class="{kind}">ab</span>{words}</li>' for kind, words in keys)
    legend = f'<ul class="legend">{legend.removesuffix("</li>")}{deeper}</li></ul>'
    first, *others = map(sample_block, samples)
    more = "".join(folded(f"Sample {i}", block) for i, block in enumerate(others, 2))
    return f"<h2>A held-out sample, its tokens coloured by how they came</h2>{legend}{first}{more}"


def section(title: str, blocks: Iterable[str], kind: str = "") -> str:
    body = "".join(blocks)
    return f'<h2>{escape(title)}</h2><div class="{kind}">{body}</div>' if body else ""


def folded(title: str, body: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{body}</details>" if body else ""


def page(run: RunRecord) -> str:
    metrics = run.metrics
    about = [str(metrics[key]) for key in ("target", "head", "device", "dtype", "date") if metrics.get(key)]
    where = " \u00b7 ".join(word for word in about if word not in run.title)
    versions = [(str(name), str(version)) for name, version in (metrics.get("versions") or {}).items()]
    command = f"<pre>{verbatim(str(metrics['command']))}</pre>" if metrics.get("command") else ""
    config = f"<pre><code>{verbatim(run.config)}</code></pre>" if run.config else ""
    origin = (command, folded("Resolved config", config), folded("Versions", facts(versions)))
    took = figure(
        "What it took", f"On {metrics['device']}" if metrics.get("device") else "", facts(rows(metrics, TRAINING))
    )
    training = (*training_figures(run.history), took)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{escape(run.title)}</title>
<style>{PAGE_STYLE}{plots.STYLE}{TOKEN_STYLE}</style>
</head>
<body><main>
<h1>{escape(run.title)}</h1>
<p class="muted">{escape(where)}</p>
{headline(metrics)}
{prompts_note(metrics)}
{section("Decoding", decoding_figures(metrics), "grid2")}
{samples_section(run.samples)}
{section("Training", training, "grid2")}
{section("How this was made", origin)}
</main></body>
</html>
"""


def write_report(path: Path, run: RunRecord) -> None:
    # A byte-level token can end inside a character: what cannot be encoded is replaced, no reason to lose the page.
    path.write_text(page(run), encoding="utf-8", errors="replace", newline="\n")
