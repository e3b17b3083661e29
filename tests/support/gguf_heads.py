"""Heads for the embedded target with weights that are the same on every machine, and what a GGUF file of them holds.

    python -m tests.support.gguf_heads DIRECTORY_OF_LLAMA_CPP

writes gguf_golden.json again by llama.cpp's converter (`bash scripts/llamacpp_env.sh` gets it into .venv-llamacpp/llama.cpp).
"""

import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from foredraft.heads import Target, save_head
from foredraft.heads.base import DraftHead
from tests.support.head_factory import build_head

GOLDEN = Path(__file__).with_name("gguf_golden.json")
ROOT = Path(__file__).resolve().parents[2]
EMBEDDED = ROOT / "scripts" / "embedded_target"
CONVERT = ROOT / "tests" / "serving" / "llamacpp_convert.py"
BLOCK = {"block_size": 4, "num_layers": 2}
SMALL: dict[str, tuple[str, dict[str, Any]]] = {  # name -> kind in conf/head, and what is changed in its yaml
    "eagle3": ("eagle3", {"draft_vocab_size": None}),
    "eagle3 pruned": ("eagle3", {"draft_vocab_size": 200}),
    "dflash": ("dflash", BLOCK),
    "jetspec": ("jetspec", BLOCK),
    "dflash2": ("dflash2", {**BLOCK, "selector_top_k": 13, "selector_rank": 32}),
    "dspark": ("dspark", {**BLOCK, "markov_rank": 32}),
    "dspark pruned": ("dspark", {**BLOCK, "markov_rank": 32, "draft_vocab_size": 200}),
}
OUTTYPES = ("f32", "f16", "bf16", "q8_0")  # that the converter writes


def gguf_head(name: str, target: Target) -> DraftHead:
    kind, changes = SMALL[name]
    head = build_head(kind, target, **changes).cpu()
    with torch.no_grad():
        for number, parameter in enumerate(head.parameters()):
            steps = torch.arange(parameter.numel()) * 7919 + 31 * number
            parameter.copy_(((steps % 2001 - 1000) / 1000).view_as(parameter))
    return head.eval()


def write_target(path: Path, tokens: int, pre: str = "default") -> Path:
    """A GGUF file that has so many tokens, and no tensors."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([f"t{number}" for number in range(tokens)])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def contents(path: Path) -> dict[str, Any]:
    """{"keys": {name: value}, "tensors": {name: [number format, shape, SHA-256 of its bytes]}}, tensors in the file's order.
    Of long values the digest; of what the whole file is called and counted, nothing."""
    import gguf

    reader = gguf.GGUFReader(path)
    keys = {}
    for name, field in reader.fields.items():
        if not name.startswith(("GGUF.", "general.name", "general.size_label", "general.tags", "general.basename")):
            value = field.contents()
            long = isinstance(value, list) and len(value) > 20
            kinds = [kind.name for kind in field.types]
            keys[name] = [*kinds, digest(json.dumps(value).encode()) if long else value]
    tensors = {t.name: [t.tensor_type.name, t.shape.tolist(), digest(t.data.tobytes())] for t in reader.tensors}
    return {"keys": keys, "tensors": tensors}


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def main(sources: str) -> None:
    target = Target.from_pretrained(EMBEDDED, dtype="float32", device="cpu")
    golden: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in SMALL:
            save_head(gguf_head(name, target), Path(folder) / name, target)
            for outtype in OUTTYPES:
                out = Path(folder) / f"{name}-{outtype}.gguf"
                command = [
                    sys.executable,
                    str(CONVERT),
                    sources,
                    f"{folder}/{name}",
                    "--target-model-dir",
                    str(EMBEDDED),
                ]
                command += ["--outtype", outtype, "--outfile", str(out)]
                done = subprocess.run(command, capture_output=True, text=True)
                assert done.returncode == 0, done.stderr[-3000:]
                golden[f"{name} {outtype}"] = contents(out)
    GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
