"""The tiny random target and the text that its tokenizer knows, targets of two such layers, and prompts."""

import json
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from foredraft.heads import Target
from foredraft.heads.target_model.ends import in_layer
from foredraft.heads.target_model.files import INDEX

VOCAB = 320
TEXT = "def add(self, other):\n    return self.value + other.value\n\nclass Pair:\n    pass\n" * 40


def tiny_config(**changes) -> LlamaConfig:
    facts = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    }
    return LlamaConfig(**(facts | changes))


def tiny_model(**changes) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_config(**changes))
    for name, parameter in model.named_parameters():
        if "norm" in name:  # ones would hide a norm that is left out or applied twice
            torch.nn.init.uniform_(parameter, 0.5, 2.0)
    return model


def random_model(seed: int, layers: int = 2, device: torch.device | str = "cpu", **changes) -> Target:
    torch.manual_seed(seed)
    model = LlamaForCausalLM(tiny_config(num_hidden_layers=layers, **changes)).to(device)
    return Target(model, None, f"random {seed}")


def without_layers(target: Target, path: Path) -> Path:
    """Save a directory with its checkpoint in several files, of which only those of its ends are left."""
    target.model.save_pretrained(path, max_shard_size="20KB")
    if target.tokenizer is not None:
        target.tokenizer.save_pretrained(path)
    parts = json.loads((path / INDEX).read_text())["weight_map"]
    ends = {part for name, part in parts.items() if not in_layer(name)}
    missing = {*parts.values()} - ends
    assert missing
    for part in missing:
        (path / part).unlink()
    return path


def prompt(length: int, seed: int = 0) -> list[int]:
    """Return random tokens, repeated once, so that there is something to look up."""
    half = torch.randint(1, 300, (length // 2,), generator=torch.Generator().manual_seed(seed)).tolist()
    return (half + half + [7])[:length]
