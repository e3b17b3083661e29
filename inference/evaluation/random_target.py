"""Targets of any size with random weights: what decoding costs there, not what drafting gains."""

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from foredraft.heads.target import Target
from foredraft.heads.target.loading import model_class, read_config, resolve_dtype


def random_target(
    tokenizer: str,
    hidden_size: int = 384,
    num_layers: int = 32,
    dtype: str = "bfloat16",
    device: str | None = None,
    seed: int = 0,
) -> Target:
    """A Llama of this shape with the tokenizer of that directory or Hub id; the defaults give 57M parameters."""
    words = AutoTokenizer.from_pretrained(tokenizer)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=hidden_size,
        intermediate_size=8 * hidden_size // 3,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 64,
        num_key_value_heads=hidden_size // 64,
        max_position_embeddings=4096,
        initializer_range=0.05,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).to(resolve_dtype(dtype))
    count = sum(parameter.numel() for parameter in model.parameters())
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    return Target(model.to(where), words, f"random Llama of {count / 1e6:.0f}M parameters")


def shaped_target(path: str, dtype: str = "bfloat16", device: str | None = None, seed: int = 0) -> Target:
    """A model of the shape that a config.json describes, without a tokenizer."""
    config = read_config(path)
    torch.manual_seed(seed)
    with torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")):
        model = model_class(config).from_config(config, dtype=resolve_dtype(dtype))
    return Target(model, name=path)
