"""Heads for the test model with weights that are the same on every machine, and what a GGUF file of them holds.

gguf_golden.json was written by llama.cpp's converter: tests/serving/llamacpp_golden.py.
"""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save_file
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from foredraft.heads import Target
from foredraft.heads.base import DraftHead
from tests.support import ROOT
from tests.support.head_factory import build_head

GOLDEN = Path(__file__).with_name("gguf_golden.json")
EMBEDDED = ROOT / "scripts" / "test_model"
CONVERT = ROOT / "tests" / "serving" / "llamacpp_convert.py"
FACTS: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
SMALL: dict[str, tuple[str, dict[str, Any]]] = FACTS["heads"]
OUTTYPES = ("f32", "f16", "bf16", "q8_0")  # that the converter writes


def gguf_head(name: str, target: Target) -> DraftHead:
    kind, changes = SMALL[name]
    head = build_head(kind, target, **changes).cpu()
    with torch.no_grad():
        for number, parameter in enumerate(head.parameters()):
            steps = torch.arange(parameter.numel()) * 7919 + 31 * number
            parameter.copy_(((steps % 2001 - 1000) / 1000).view_as(parameter))
    return head.eval()


def write_qwen(folder: Path) -> Path:
    """Write a small target of Qwen3.5's kind with the test model's tokenizer and an MTP layer in its file. Weights are the
    same on every machine. The embedding is large compared with what layers add, so the MTP layer, which starts from it,
    drafts well."""
    config = Qwen3_5TextConfig(**FACTS["qwen"])
    model = Qwen3_5ForCausalLM(config)
    layer = {f"mtp.layers.0.{name}": t for name, t in model.model.layers[-1].state_dict().items()}
    norms = {f"mtp.{name}.weight": torch.zeros(128) for name in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding")}
    weights = model.state_dict() | layer | norms | {"mtp.fc.weight": torch.zeros(128, 256)}
    for number, (name, tensor) in enumerate(weights.items()):
        # A hash of places: Murmur's last step.
        bits = (torch.arange(tensor.numel()) + 65537 * number) * 2654435761 % 2**32
        for factor in (2246822507, 3266489909):
            bits = (bits ^ bits >> 15) * factor % 2**32
        values = (bits >> 16).float() / 2**15 - 1  # multiples of 2^-15, which lose nothing when added to a norm's 1
        large = "embed_tokens" in name or "lm_head" in name
        weights[name] = (values * (1 if large else 2**-4)).view_as(tensor).clone()
    weights["mtp.fc.weight"][:, :128] += torch.eye(128)
    weights["lm_head.weight"][0] = 0  # of the end token, which llama.cpp never chooses when told to ignore it
    model.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED / name, folder)
    return folder


def contents(path: Path) -> dict[str, Any]:
    """Return {"keys": {name: value}, "tensors": {name: [number format, shape, SHA-256 of its bytes]}}, tensors in the
    file's order. Long values are digests; the file's name and counts are omitted."""
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
