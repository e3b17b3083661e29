"""A tiny random target with a tokenizer, saved as transformers saves any model: what most tests draft for."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from heads import Target

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


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory) -> Path:
    """A directory as a user would have it: config, float32 weights, tokenizer."""
    path = tmp_path_factory.mktemp("target")
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_config())
    for name, parameter in model.named_parameters():
        if "norm" in name:  # ones would hide a norm that is left out or applied twice
            torch.nn.init.uniform_(parameter, 0.5, 2.0)
    model.save_pretrained(path)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|endoftext|>", eos_token="<|endoftext|>")
    fast.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def target(tiny_path) -> Target:
    return Target.from_pretrained(tiny_path, dtype="float32", device="cpu")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
