"""The words, units and digits of a measurement, and the model card of a head.

They are written once, here, because the table at the end of a run, its report and the card on the Hub show the same
numbers: a reader who compares two of them must not wonder which one rounded. Nothing is shown that was not measured: a
key that is missing or not finite is left out.
"""

import json
import math
from collections.abc import Callable
from numbers import Real
from pathlib import Path

from huggingface_hub.utils import HFValidationError, validate_repo_id

from heads.formats.engines import SGLANG, VLLM

Rows = list[tuple[str, str]]


def finite(value: object) -> float | None:
    """`value` as a float, or None where it is no measurement (missing, text, NaN, infinite)."""
    return float(value) if isinstance(value, Real) and math.isfinite(value) else None


def number(value: float) -> str:
    """Three digits that matter: 0.0123, 4.21, 79.6, 187, 12,345."""
    if abs(value) >= 999.5:
        return f"{value:,.0f}"
    value = float(f"{value:.3g}")  # first, so that 99.96 becomes 100 and not 100.0
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}"


def percent(share: float) -> str:
    """Only none is "0 %" and only all is "100 %": 0.9996 of the prompts is not all of them."""
    if share in (0.0, 1.0):
        return f"{100 * share:.0f} %"
    return f"{min(max(100 * share, 0.1), 99.9) if 0 < share < 1 else 100 * share:.1f} %"


def identical(share: float) -> str:
    return {1.0: "yes", 0.0: "no"}.get(share) or f"on {percent(share)} of the prompts"


def scaled(value: float, base: float, units: str) -> str:
    """`value` in the largest of `units` (smallest first, each `base` times the last) that keeps it at 1 or more."""
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
    ("acceptance_length_sampled", "acceptance length, sampled", "{:.2f}".format),
    ("acceptance_length_all", "acceptance length, repetitive prompts included", "{:.2f}".format),
    ("speedup", "speedup over plain decoding", "{:.2f}x".format),
    ("tokens_per_second", "tokens/s", number),
    ("plain_tokens_per_second", "tokens/s, plain decoding", number),
    ("identical_greedy", "identical to plain decoding in float32, greedy", identical),
    ("identical_sampled", "identical to plain decoding in float32, sampled with the same seed", identical),
    ("identical_in_dtype", "prompts identical in this dtype, where rounding decides near-ties", percent),
    ("prompts", "held-out prompts", "{:.0f}".format),
    ("repetitive_prompts", "repetitive prompts, counted apart", "{:.0f}".format),
)
TRAINING: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("parameters", "parameters of the head", parameters),
    ("train_seconds", "training time", duration),
    ("train_tokens_per_second", "training tokens/s", number),
    ("peak_memory_bytes", "peak memory", size),
)


def rows(metrics: dict, wanted: tuple[tuple[str, str, Callable[[float], str]], ...]) -> Rows:
    """The (label, value) of every wanted metric that was measured."""
    values = ((label, finite(metrics.get(key)), form) for key, label, form in wanted)
    return [(label, form(value)) for label, value, form in values if value is not None]


def lists(metrics: dict) -> Rows:
    """The rows whose value is a list: accepted share by depth, and the parts of one decoding step."""
    shares = [finite(share) for share in metrics.get("accepted_per_depth") or ()]
    parts = {name: finite(seconds) for name, seconds in (metrics.get("step_seconds") or {}).items()}
    found = {
        # A depth without a number keeps its place, or the ones after it would name the wrong depth.
        "accepted share, by depth": ["-" if share is None else percent(share) for share in shares],
        "time of a decoding step": [f"{name} {duration(part)}" for name, part in parts.items() if part is not None],
    }
    return [(label, ", ".join(values)) for label, values in found.items() if values]


def setting(metrics: dict) -> Rows:
    """Where the numbers were measured: what a reader needs before comparing them with others."""
    return [(key, str(metrics[key])) for key in ("device", "dtype", "date") if metrics.get(key)]


def measured(metrics: dict) -> Rows:
    return rows(metrics, MEASURED) + lists(metrics) + rows(metrics, TRAINING) + setting(metrics)


def lossless(metrics: dict) -> str:
    """What the metrics show about identity with plain decoding, and not a word more."""
    said = []
    for key, how in (
        ("identical_greedy", "Greedy decoding in float32"),
        ("identical_sampled", "Sampling in float32 with the same seed"),
    ):
        share = finite(metrics.get(key))
        if share is None:
            found = "identity with plain decoding was not measured."
        elif share == 1:
            found = "the output was identical to plain decoding, token for token, on every prompt measured."
        elif share == 0:
            found = "the output was **not** identical to plain decoding."
        else:
            found = f"the output was identical to plain decoding on {percent(share)} of the prompts, **not** on all."
        said.append(f"- {how}: {found}")
    rounded = finite(metrics.get("identical_in_dtype"))
    if rounded is not None and rounded < 1:
        said.append(
            f"- In {metrics.get('dtype')}, {percent(rounded)} of the timed texts were identical: forwards of one row and of "
            "many round differently there, which decides near-ties. `scripts/lossless.py` audits where texts part."
        )
    return "\n".join(said)


def markdown_table(header: tuple[str, str], body: Rows) -> str:
    def line(cells: tuple[str, str]) -> str:
        return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"

    return "\n".join([line(header), "|---|---|", *map(line, body)])


def front_matter(head: dict) -> str:
    """The YAML that the Hub reads. Its values are written as JSON, which is YAML without quoting rules of our own."""
    fields: dict[str, object] = {"library_name": "foredraft", "pipeline_tag": "text-generation"}
    try:
        validate_repo_id(head["target"])
        if not Path(head["target"]).exists():  # scripts/embedded_target is a directory, and looks like a Hub id
            fields["base_model"] = head["target"]
    except HFValidationError:
        pass  # a path on somebody's disk: the Hub refuses a card that names it as its base model
    fields["tags"] = ["speculative-decoding", "draft-head", head["kind"]]
    if head.get("license"):
        fields["license"] = head["license"]
    lines = (f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in fields.items())
    return "\n".join(("---", *lines, "---"))


def engines(head: dict, place: str) -> str:
    """How to draft with this head in the engines that read it."""
    if head["kind"] == "eagle3":
        facts = {"target": head["target"], "head": place, "depth": head.get("depth") or 3}
        vllm, sglang = VLLM.format(method="eagle3", **facts), SGLANG.format(method="EAGLE3", **facts)
        plain = "the latter reads the paper's layer only, of three fused hidden states and no further norms"
        return f"In vLLM and in SGLang these files load as they are ({plain}):\n\n```bash\n{vllm}\n{sglang}\n```"
    return (
        "Other engines want other names for the same weights; foredraft writes them:\n\n```bash\n"
        f"python scripts/export.py head={json.dumps(place)} format=vllm output_dir=exported\n```"
    )


def model_card(metrics: dict, head: dict, data: dict | None) -> str:
    """The README.md of a saved head.

    metrics: as in metrics.json. head: kind, target, and where known parameters, depth, layers, draft_vocab_size,
    license, format, revision (of the target), sha256 (of the weights), repo (its name on the Hub), adapter (is there one for
    the target?). data: what the head was trained on, as names and values.
    """
    unchanged = "The target itself is unchanged and not part of these files."
    if head.get("adapter"):
        unchanged = (
            "**The target's text changes.** These files hold an adapter for the target too (LoRA, as peft reads it), which "
            "`load_drafter` puts on it: the adapted target writes other text than the target as it was published, with "
            "these heads and without. What is said below of identity is against the adapted target."
        )
    numbers = measured({**metrics, "parameters": None})  # the first table has them
    about = {
        "kind": head["kind"],
        "target": head["target"],
        "revision of the target": head.get("revision"),
        "parameters": parameters(head["parameters"]) if head.get("parameters") else None,
        "depth": head.get("depth"),
        "layers": head.get("layers"),
        "draft vocabulary": f"{head['draft_vocab_size']:,} tokens" if head.get("draft_vocab_size") else None,
        "format of the files": head.get("format"),
        "SHA-256 of the weights": head.get("sha256"),
        "license of the weights": head.get("license") or "not stated",
    }
    place = head.get("repo") or "<this directory, or its id on the Hub>"
    command = " ".join(str(metrics.get("command") or "").split())
    where = f"\nMeasured by\n\n    {command}\n" if command else ""
    target = json.dumps(str(head["target"]), ensure_ascii=False)
    trained_on = [(key, str(value)) for key, value in (data or {}).items() if value is not None]
    return f"""{front_matter(head)}

# {head["kind"]} draft head for {head["target"]}

A draft head for speculative decoding with foredraft: it proposes the next tokens, the target reads them in one forward
and keeps those that it agrees with. {unchanged}

{markdown_table(("", "this head"), [(key, str(value)) for key, value in about.items() if value is not None])}

## Measured

{markdown_table(("", "measured"), numbers) if numbers else "Nothing was measured for this head."}
{where}
## Is the output the target's own?

{lossless(metrics)}

## Use

```python
from heads import Target
from inference import generate, load_drafter
from transformers import AutoTokenizer

target = Target.from_pretrained({target})
drafter = load_drafter({json.dumps(place)}, target)
tokenizer = AutoTokenizer.from_pretrained({target})
input_ids = tokenizer("def main():", return_tensors="pt").input_ids
out = generate(target, drafter, input_ids, max_new_tokens=128)
```

{engines(head, place)}

## Data

{markdown_table(("", "trained on"), trained_on) if trained_on else "What this head was trained on was not recorded."}
"""
