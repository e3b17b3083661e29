"""A published head, its config.json shrunken, with random weights in its layout: is it recognized, and does it draft?"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from foredraft.heads import Target, load_head
from foredraft.heads.base import DraftHead
from foredraft.inference import drafter_for, generate
from tests.conformance.checks import check_texts
from tests.conformance.shrink import CONTEXT, DROPPED, HIDDEN, VOCAB
from tests.support import golden

DRAFT = 100
# Layers of targets, by a part of the head's name, where its ids do not tell.
DEPTHS = {"gpt-oss-120b": 36, "step-3.5-flash": 45}
LLAMA: dict[str, Any] = {  # what files that were not seen whole do not say
    "hidden_size": HIDDEN,
    "intermediate_size": golden.MLP,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
}


def check_head(published: dict[str, Any], new_tokens: int, name: str = "") -> DraftHead:
    """Raise ValueError if a user is refused. name: of the file, which may reveal what the file does not."""
    config = {name: value for name, value in published.items() if name not in DROPPED}
    config = shrink_head(filled(config, name.lower()) if published.get("_partial") else config)
    depth = next((layers for part, layers in DEPTHS.items() if part in name.lower()), None)
    target = a_target(golden.layer_ids(config), depth)
    with tempfile.TemporaryDirectory() as folder:
        golden.write(Path(folder), config, golden.weights(config | {"vocab_size": VOCAB}))
        head = load_head(folder, target)
    prompt = torch.arange(3, 23)[None]
    settings: dict[str, Any] = {"max_new_tokens": new_tokens, "eos_token_id": -1}
    drafted = generate(target, drafter_for(head, target), prompt, **settings)
    check_texts(drafted.new_tokens, generate(target, None, prompt, **settings).new_tokens, "drafted")
    if all(step.nodes == 1 for step in drafted.steps):
        raise RuntimeError("nothing was drafted")
    return head


def shrink_head(config: dict[str, Any]) -> dict[str, Any]:
    """Shrink a config for a target of width 32: sizes become small, unusual settings stay unusual."""
    for inner in ("transformer_layer_config", "model"):
        if isinstance(config.get(inner), dict):
            outer = {key: value for key, value in config.items() if key != inner}
            return shrink_head(outer | {"hidden_size": 1}) | {inner: shrink_head(config[inner])}
    attention = config.get("num_attention_heads") or 0
    wide = (config.get("head_dim") or 0) * attention not in (0, config.get("hidden_size"))
    uneven = attention > 0 and (config.get("hidden_size") or 0) % attention != 0
    few = (config.get("num_key_value_heads") or 1) < attention
    full = (config.get("draft_vocab_size") or 0) >= (config.get("vocab_size") or 100_000)  # of a file not seen whole
    small = {
        **LLAMA,
        **golden.LATENT,
        "target_hidden_size": HIDDEN,
        "num_attention_heads": 7 if uneven else 4,
        "num_key_value_heads": (1 if uneven else 2) if few else 4,
        "head_dim": 16 if wide else 8,
        "draft_vocab_size": VOCAB if full else DRAFT,
    }
    shrunken = config | {key: value for key, value in small.items() if config.get(key) is not None}
    if "mask_token_id" in shrunken:
        shrunken["mask_token_id"] = VOCAB - 2
    own = shrunken.get("dflash_config")
    return shrunken | ({"dflash_config": shrink_head(own)} if own else {})


def filled(config: dict[str, Any], name: str) -> dict[str, Any]:
    """Add the usual values in the place of what was not seen of a file. Kinds that one key identifies stay unchanged."""
    if "medusa_num_heads" in config:
        return config
    if golden.is_block(config):
        config = config if "dflash_config" in config else {"mask_token_id": VOCAB - 2} | config
        inner = LLAMA | config.get("transformer_layer_config", {})
        return config | {"transformer_layer_config": inner} if "speculators_model_type" in config else LLAMA | config
    if "transformer_layer_config" in config or "speculators_config" in config:
        inner = LLAMA | (config.get("transformer_layer_config") or {})
        usual = {"speculators_model_type": "eagle3", "norm_before_residual": True, "draft_vocab_size": DRAFT}
        return usual | config | {"transformer_layer_config": inner}
    eagle3 = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFT} if "eagle3" in name else {}
    return LLAMA | eagle3 | config


def a_target(ids: list[int], depth: int | None) -> Target:
    """Make a Llama of this depth, or with the number of layers that the head's layer ids point to, in either of the two
    numberings of three ids."""
    sizes = range(max(ids, default=0) + 1, max(ids, default=0) + 8)
    usual = (n for n in sizes if ids in ([2, n // 2, n - 3], [1, n // 2 - 1, n - 4]))
    layers = depth or next(usual, max(8, max(ids, default=0) + 3))
    config = LlamaConfig(**LLAMA, num_hidden_layers=layers, max_position_embeddings=CONTEXT, initializer_range=0.1)
    return Target(LlamaForCausalLM(config), name=f"a Llama of {layers} layers")
