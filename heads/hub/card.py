"""Format measurements with their names and units, and write the model card of a head.

This is in one place because the table at the end of a run, its report and the card on the Hub show the same numbers, which
must be rounded alike. Values that were not measured (missing or not finite) are omitted.
"""

import json
import math
from collections.abc import Callable
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any

from huggingface_hub.utils import HFValidationError, validate_repo_id
from jinja2 import Environment, PackageLoader, StrictUndefined

from foredraft.heads.target_model.resolve_path import PREFIX

Rows = list[tuple[str, str]]


def finite(value: object) -> float | None:
    """Return `value` as a float, or None if it is not a measurement (missing, text, NaN, infinite)."""
    return float(value) if isinstance(value, Real) and math.isfinite(value) else None


def number(value: float) -> str:
    """Format with three significant digits: 0.0123, 4.21, 79.6, 187, 12,345."""
    if abs(value) >= 999.5:
        return f"{value:,.0f}"
    value = float(f"{value:.3g}")  # first, so that 99.96 becomes 100 and not 100.0
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}"


def percent(share: float) -> str:
    """Format a share. Only none is "0 %" and only all is "100 %": 0.9996 of the prompts is not all of them."""
    if share in (0.0, 1.0):
        return f"{100 * share:.0f} %"
    return f"{min(max(100 * share, 0.1), 99.9) if 0 < share < 1 else 100 * share:.1f} %"


def identical(share: float) -> str:
    return {1.0: "yes", 0.0: "no"}.get(share) or f"on {percent(share)} of the prompts"


def scaled(value: float, base: float, units: str) -> str:
    """Format `value` in the largest of `units` (smallest first, each `base` times the last) that keeps it at 1 or more."""
    names = units.split()
    while len(names) > 1 and abs(value) >= base:
        value, names = value / base, names[1:]
    return f"{number(value)} {names[0]}"


def duration(seconds: float) -> str:
    if seconds < 60:
        return scaled(seconds * 1000, 1000, "ms s")
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def size(count: float) -> str:
    return scaled(count, 1000, "bytes kB MB GB TB")


def parameters(count: float) -> str:
    return scaled(count / 1e6, 1000, "M B") if count >= 1e6 else f"{count:,.0f}"


MEASURED: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("acceptance_length", "acceptance length (tokens per target forward)", "{:.2f}".format),
    ("speedup", "speed-up over the AR baseline", "{:.2f}x".format),
    ("tokens_per_second", "tokens/s", number),
    ("identical_greedy", "identical to the baseline in float32, greedy", identical),
    ("identical_sampled", "identical to the baseline in float32, sampled with the same seed", identical),
    ("acceptance_length_sampled", "acceptance length, sampled", "{:.2f}".format),
    ("acceptance_length_all", "acceptance length, repetitive prompts included", "{:.2f}".format),
    (
        "predicted_acceptance_length",
        "acceptance length of chains, predicted by the held-out agreement",
        "{:.2f}".format,
    ),
    ("speedup_auto", "speedup with tree=auto", "{:.2f}x".format),
    ("baseline_tokens_per_second", "tokens/s, AR baseline", number),
    ("identical_in_dtype", "prompts identical in the dtype of the measurement", percent),
    ("preempted_share", "time in which other programs had the core, of a median text", percent),
    ("prompts", "held-out prompts", "{:.0f}".format),
    ("repetitive_prompts", "repetitive prompts, counted apart", "{:.0f}".format),
)
TRAINING: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("parameters", "parameters of the head", parameters),
    ("train_steps", "training steps", number),
    ("train_steps_unlimited", "training steps without a limit of time, which may accept more", number),
    ("train_tokens", "training tokens", number),
    ("train_seconds", "training time", duration),
    ("train_tokens_per_second", "training tokens/s", number),
    ("peak_memory_bytes", "peak memory", size),
)


def rows(metrics: dict, wanted: tuple[tuple[str, str, Callable[[float], str]], ...]) -> Rows:
    """Return (label, value) of every wanted metric that was measured."""
    values = ((label, finite(metrics.get(key)), form) for key, label, form in wanted)
    return [(label, form(value)) for label, value, form in values if value is not None]


def lists(metrics: dict) -> Rows:
    """Return the rows with lists: shares by depth, acceptance by data set, and the parts of one decoding step."""

    def shares(key: str) -> list[str]:
        # A depth without a number keeps its place, so that later ones name the right depth.
        return ["-" if finite(share) is None else percent(share) for share in metrics.get(key) or ()]

    def lengths(key: str) -> list[str]:
        values = ((name, finite(value)) for name, value in (metrics.get(key) or {}).items())
        return [f"{name} {value:.2f}" for name, value in values if value is not None]

    parts = {name: finite(seconds) for name, seconds in (metrics.get("step_seconds") or {}).items()}
    lists_by_label = {
        "held-out agreement, by depth": shares("held_out_agreement"),
        "accepted share, by depth": shares("accepted_per_depth"),
        "acceptance length, by data set": lengths("acceptance_length_by_set"),
        "acceptance length, by context": lengths("acceptance_length_by_context"),
        "time of a decoding step": [f"{name} {duration(part)}" for name, part in parts.items() if part is not None],
    }
    return [(label, ", ".join(values)) for label, values in lists_by_label.items() if values]


def measured(metrics: dict) -> Rows:
    conditions = [(key, str(metrics[key])) for key in ("drafts", "device", "dtype", "date") if metrics.get(key)]
    return rows(metrics, MEASURED) + lists(metrics) + rows(metrics, TRAINING) + conditions


def aligned(pairs: Rows, indent: str = "") -> str:
    """Format the rows as lines of text with aligned values."""
    width = max((len(label) for label, _ in pairs), default=0)
    return "\n".join(f"{indent}{label:<{width}}  {value}" for label, value in pairs)


def front_matter(head: dict) -> dict[str, Any]:
    """Return the metadata that the Hub reads."""
    fields: dict[str, Any] = {"library_name": "foredraft", "pipeline_tag": "text-generation"}
    target = head["target"]
    name = "/".join(target.split("/")[:2]) if target.lower().endswith(".gguf") else target  # of ORG/NAME/FILE.gguf
    try:
        validate_repo_id(name)
        # The path of a local directory or file may look like a Hub id.
        if not Path(target).exists() and not name.lower().endswith(".gguf"):
            fields["base_model"] = name
    except HFValidationError:
        pass  # a path on somebody's disk: the Hub refuses a card with it as base model
    fields["tags"] = ["speculative-decoding", "draft-head", head["kind"]]
    if head.get("license"):
        fields["license"] = head["license"]
    return fields


def gguf_file(facts: dict | None) -> str | None:
    """Describe the quantization: a head learns from dequantized weights, and accepts less with others."""
    if facts is None:
        return None
    return f"{facts['file']} ({facts['weights']}; SHA-256 {facts['sha256']}...), dequantized"


def about(head: dict) -> Rows:
    """Return the rows that describe the head itself."""
    shown = {
        "kind": head["kind"],
        "target": head["target"],
        "revision of the target": head.get("revision"),
        "weights of the target": gguf_file(head.get("gguf")),
        "parameters": parameters(head["parameters"]) if head.get("parameters") else None,
        "depth": head.get("depth"),
        "layers": head.get("layers"),
        "draft vocabulary": f"{head['draft_vocab_size']:,} tokens" if head.get("draft_vocab_size") else None,
        "format of the files": head.get("format"),
        "SHA-256 of the weights": head.get("sha256"),
        "license of the weights": head.get("license") or "not stated",
    }
    return [(key, str(value)) for key, value in shown.items() if value is not None]


def model_card(metrics: dict, head: dict, data: dict | None) -> str:
    """Return the README.md of a saved head.

    metrics: as in metrics.json. head: kind, target, and if known gguf (of a target from such a file), parameters, depth,
    layers, draft_vocab_size, engines (heads/formats/engines.py), module (of a class that is not foredraft's), license,
    format, revision (of the target), sha256 (of the weights), repo (its name on the Hub). data: what the head was trained
    on, as names and values."""
    markdown = Environment(
        loader=PackageLoader("foredraft.heads.hub"), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    markdown.filters["json"] = partial(json.dumps, ensure_ascii=False)
    markdown.filters["cell"] = lambda text: " ".join(text.split()).replace("|", "\\|")
    matter = front_matter(head)
    shares = [finite(metrics.get(f"identical_{key}")) for key in ("greedy", "sampled", "in_dtype")]
    place = head.get("repo") or "<this directory, or its id on the Hub>"
    template = markdown.get_template("model_card.md.jinja")
    return template.render(
        front_matter=matter,
        has_public_target="base_model" in matter or head["target"].startswith(PREFIX),
        kind=head["kind"],
        target=str(head["target"]),
        place=place,
        about=about(head),
        measured=measured({**metrics, "parameters": None}),  # `about` has them
        command=" ".join(str(metrics.get("command") or "").split()),
        identity=zip(("Greedy decoding in float32", "Sampling in float32 with the same seed"), shares[:2], strict=True),
        identical_in_dtype=shares[2],
        dtype=metrics.get("dtype"),
        percent=percent,
        engines=head.get("engines") or [],
        module=head.get("module"),
        data=[(key, str(value)) for key, value in (data or {}).items() if value is not None],
    )
