"""A published target: does it load, train two heads, decode with them what it writes alone, and export them?"""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from foredraft.heads import Target, load_head
from foredraft.heads.base import DraftHead
from foredraft.heads.checkpoint import write_head
from foredraft.heads.eagle3 import Eagle3Head
from foredraft.heads.formats import engines
from foredraft.heads.medusa import MedusaHead
from foredraft.heads.target_model.loading import model_class, read_config
from foredraft.inference import drafter_for, generate
from foredraft.inference.evaluation.measure import left_pad
from tests.conformance.checks import check_texts, support
from tests.conformance.families import default_settings
from tests.conformance.shrink import shrink
from tests.support.head_factory import learn

PROMPTS = (100, 5, 30)  # tokens of the ragged batch: texts cross windows, chunks and the boundaries of longrope


def check_target(published: dict[str, Any], new_tokens: int) -> str:
    """Raise ValueError if a user is refused. published: config.json. new_tokens: decoded per prompt. Returns how it is
    drafted for."""
    target = small_target(published)
    heads = [kind.for_target(target, 3) for kind in (Eagle3Head, MedusaHead)]
    for head in heads:
        learn(head.kind, head, target)
    for temperature in (0.0, 1.0):
        for head in heads:
            decode(target, head, temperature, new_tokens)
    export(heads, target)
    return support(target)


def small_target(published: dict[str, Any]) -> Target:
    """Load a target with this config's structure from the same files as a downloaded one."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shrink(published)))
        config = read_config(folder)
    model = model_class(config).from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and "norm" not in name:  # at the usual 0.02 keys look alike: no wrong mask would show
            torch.nn.init.normal_(parameter, std=0.15)
    # The text part of a wrapper is not saved alone (Mllama).
    if model_class(model.config) is not model_class(config):
        return Target(model)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return Target.from_pretrained(folder, dtype="float32", device="cpu")


def small_family(kind: type[PreTrainedConfig]) -> Target:
    return small_target(default_settings(kind))


def decode(target: Target, head: DraftHead, temperature: float, new_tokens: int) -> None:
    """Check that drafted text is the target's own."""
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(3, target.vocab_size, (length,), generator=generator).tolist() for length in PROMPTS]
    settings: dict[str, Any] = {"max_new_tokens": new_tokens, "eos_token_id": -1, "temperature": temperature, "seed": 3}
    alone = generate(target, None, *left_pad(prompts), **settings).new_tokens
    drafted = generate(target, drafter_for(head, target), *left_pad(prompts), **settings).new_tokens
    check_texts(drafted, alone, head.kind)


def export(heads: list[DraftHead], target: Target) -> None:
    """Write a head in an engine's layout, and load it again from there."""
    with tempfile.TemporaryDirectory() as folder:
        for head in heads:
            exported = engines.export_for("medusa" if isinstance(head, MedusaHead) else "vllm", head, target)
            write_head(head, Path(folder) / head.kind, target, exported.layout, exported.layout.weight_files)
            load_head(Path(folder) / head.kind, target)
