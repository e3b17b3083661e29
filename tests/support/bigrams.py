"""A chat target of one layer that writes gibberish with the right shape: the next byte depends on the last one alone."""

from itertools import pairwise
from pathlib import Path

import torch
from transformers import GenerationConfig, LlamaForCausalLM

from tests.support.chats import CHATML, tokenizer
from tests.support.tiny import tiny_config

WIDTH = 272
TALK = """<|im_start|>user
How do the bees of this valley find their way home when the evening is dark?<|im_end|>
<|im_start|>user
Which river would a traveller cross on foot, and where does the old road start again?<|im_end|>
<|im_start|>assistant
They remember the light of the morning, and the shape of every hill that stands between them and the hive.<|im_end|>
<|im_start|>assistant
A bridge was built there long ago. Few people cross it now, but the stones are still good and wide.<|im_end|>
"""


def save_bigram_chat(path: Path, template: str = CHATML, text: str = TALK) -> Path:
    """Save a directory as a user would have it. text: determines which token follows which, and how often."""
    words = tokenizer(template, eos="<|im_end|>")
    ids = words(text, add_special_tokens=False)["input_ids"]
    logits = torch.full((WIDTH, WIDTH), -12.0)
    counts = torch.zeros(WIDTH, WIDTH)
    for first, second in pairwise(ids):
        counts[first, second] += 1
    logits = torch.where(counts > 0, counts.log(), logits)
    config = tiny_config(
        vocab_size=WIDTH,
        hidden_size=WIDTH,
        num_hidden_layers=1,
        max_position_embeddings=1024,
        eos_token_id=words.eos_token_id,
        bos_token_id=0,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.fill_(1.0 if "norm" in name else 0.0)
        model.model.embed_tokens.weight.copy_(torch.eye(WIDTH))
        model.lm_head.weight.copy_(logits.T / WIDTH**0.5)  # a normed one-hot row is that large
    model.generation_config = GenerationConfig(eos_token_id=words.eos_token_id)
    model.save_pretrained(path)
    words.save_pretrained(path)
    return path
