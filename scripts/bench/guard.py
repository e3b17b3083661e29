"""Compare what a change of the machinery must leave alone: losses and acceptance of heads, and the texts of drafters.

    python scripts/bench/guard.py before.json                 record this version
    python scripts/bench/guard.py after.json before.json      record it and print what differs from before.json

Every head of conf/head is trained for 20 steps on the test model. Then each head, alone and joined with suffix matching, and
each drafter without a head decode four prompts with the fixed tree, as one batch, greedy and sampled with a seed. What a
machine or a torch version changes differs too, so record both files on one machine.
"""

import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from foredraft.heads import Target
from foredraft.inference import generate, load_drafter

ROOT = Path(__file__).resolve().parents[2]
HEADS = sorted(file.stem for file in (ROOT / "conf/head").glob("*.yaml") if file.stem != "auto")
DRAFTERS = ["none", "ngram", "suffix", "lookahead", "ngram+suffix"]
PROMPTS = [
    "def read(path):\n    with open(path) as file:\n",
    "class Queue:\n    def __init__(self, items):\n        self.items = list(items)\n\n    def push(self, item):\n",
    "import os\nimport sys\n",
    "for key, value in sorted(counts.items()):\n    print(",
]
TRAINING = ["trainer.max_steps=20", "trainer.logging_steps=1", "trainer.bf16=false", "max_length=512", "eval.steps=0"]
TRAINING += ["eval.final_num_prompts=2", "eval.timed_prompts=1", "eval.max_new_tokens=8", "eval.check_float32=false"]
TRAINING += ["self_generated_tokens=0"]


def train(head: str, directory: Path) -> list[float]:
    """Train a head for 20 steps. Return the losses."""
    command = [sys.executable, "-m", "foredraft", "demo", f"head={head}", f"output_dir={directory}", *TRAINING]
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    return [
        round(entry["loss"], 5) for entry in json.loads((directory / "history.json").read_text()) if "loss" in entry
    ]


def decode(target: Target, drafter: str) -> dict[str, Any]:
    """Return a digest of the texts and the acceptance length, greedy and sampled."""
    tokenizer = target.text_tokenizer
    ids = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    longest = max(map(len, ids))
    tokens = torch.tensor([[0] * (longest - len(row)) + row for row in ids])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in ids])
    facts = {}
    sampling: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": {"temperature": 1.0, "top_p": 0.9}}
    for name, settings in sampling.items():
        options = {} if drafter in ("none", "lookahead") else {"tree": "fixed"}
        out = generate(
            target,
            load_drafter(drafter, target, **options),
            tokens,
            mask,
            max_new_tokens=64,
            seed=[1, 2, 3, 4],
            **settings,
        )
        digest = hashlib.sha256(json.dumps(out.new_tokens).encode()).hexdigest()[:12]
        facts[name] = {"text": digest, "acceptance": round(out.acceptance_length, 4)}
    return facts


def record() -> dict[str, Any]:
    facts: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for head in HEADS:
            facts[f"losses of {head}"] = train(head, Path(folder, head))
            print(head, facts[f"losses of {head}"][-1], flush=True)
        for head in [*HEADS, *DRAFTERS]:
            for drafter in [head] if head in DRAFTERS else [head, f"{head}+suffix"]:
                target = Target.from_pretrained(str(ROOT / "scripts/test_model"), dtype="float32")
                path = drafter if head in DRAFTERS else drafter.replace(head, str(Path(folder, head, "head")), 1)
                facts[f"decoding with {drafter}"] = decode(target, path)
    return facts


def main() -> None:
    output, *before = sys.argv[1:]
    torch.set_num_threads(1)
    facts = record()
    Path(output).write_text(json.dumps(facts, indent=1) + "\n")
    if before:
        old = json.loads(Path(before[0]).read_text())
        changed = [name for name in sorted(facts.keys() | old.keys()) if facts.get(name) != old.get(name)]
        for name in changed:
            print(f"{name}: {old.get(name)} -> {facts.get(name)}")
        print(f"{len(changed)} of {len(facts)} differ")


if __name__ == "__main__":
    main()
