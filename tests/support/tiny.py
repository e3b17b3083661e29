"""The tiny random target, and the text that its tokenizer knows."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

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
