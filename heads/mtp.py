"""FastMTP: one multi-token-prediction layer, applied repeatedly to its own output (arXiv:2509.18362).

Some targets ship such a layer, trained only for the first draft: Qwen's `mtp.*`, MiMo's `model.mtp_layers.0.*`, and
DeepSeek's and GLM's layer after the last one, which transformers does not load.
At label position p it takes the target's last hidden state of position p, after the final norm, and the embedding of token
p + 1, both normed. Its output is normed, goes through the target's lm_head, and is the hidden state for the next draft.
MiMo's layer takes the target's state before that norm, and so its own here: engines draft one token with it.

A new head starts from the target's layer. If the target ships none, it passes the hidden state through, as EAGLE-1 does.
Training repeats the step on its own output, over the keys that drafting has (heads/eagle3.py). In the paper every step
attends to keys of the same step instead, which drafting lacks.
"""

import json
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from foredraft.heads import llama_config
from foredraft.heads.eagle import HiddenStateHead
from foredraft.heads.eagle3 import SLIDING
from foredraft.heads.layers import DecoderLayer, NormedAttention, RMSNorm, Rotary
from foredraft.heads.target_model import Target
from foredraft.heads.target_model.config_names import settings_of
from foredraft.heads.target_model.files import checkpoint_file, stored_tensors, weight_map
from foredraft.heads.target_model.sharding import weight_of

PREFIX, MIMO_PREFIX = "mtp.", "model.mtp_layers.0."  # of its weights in a target's files
# Names of the same modules in other targets.
MIMO = {
    "token_layernorm": "pre_fc_norm_embedding",
    "hidden_layernorm": "pre_fc_norm_hidden",
    "input_proj": "fc",  # concatenates the hidden state and then the embedding
    "final_layernorm": "norm",
}
DEEPSEEK = {
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "eh_proj": "fc",
    "shared_head.norm": "norm",
}
COPIES = ("embed_tokens.weight", "shared_head.head.weight")  # duplicates of the target's own weights
COUNT_KEYS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")  # in a config.json
# Qwen3-Next and its successors store a norm's weight minus 1.
ZERO_CENTERED = ("qwen3_next", "qwen3_5")


class MTPHead(HiddenStateHead):
    """Draft the target's next last hidden state with a multi-token-prediction layer. Weights have the names in the files of
    targets that ship such a layer: mtp.{fc, norm, pre_fc_norm_hidden, pre_fc_norm_embedding, layers.0.*}. The embedding and
    the lm_head belong to the target and are not saved."""

    kind = "mtp"
    disk_prefixes: ClassVar[dict[str, str]] = {
        "layer.": f"{PREFIX}layers.0.",
        **{name: PREFIX + name for name in ("fc.", "norm.", "pre_fc_norm_")},
    }

    def __init__(self, config: dict[str, Any]):
        super().__init__()
        self.config, self.depth = llama_config.from_json(config), config["foredraft"]["depth"]
        width, eps = self.config.hidden_size, self.config.rms_norm_eps
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = RMSNorm(width, eps), RMSNorm(width, eps)
        self.fc = nn.Linear(2 * width, width, bias=False)
        attention = NormedAttention(self.config, width, normed=config["qk_norm"], gated=config["attn_output_gate"])
        self.layer = DecoderLayer(self.config, attention)
        self.norm = RMSNorm(width, eps)
        self.rotary, self.window = Rotary(self.config), config.get("mtp_window")
        self.takes_unnormed = config.get("takes_unnormed", False)

    @classmethod
    def for_target(cls, target: Target, ttt_steps: int = 3) -> "MTPHead":
        """Make a new head from the layer that the target ships. ttt_steps: training steps, each on the output of the one
        before. Raises ValueError if the shipped layer is not supported."""
        layer, shipped = llama_config.settings_like(target), shipped_layer(target)
        settings = layer | attention_settings(shipped, layer["num_attention_heads"] * layer["head_dim"])
        settings |= {"takes_unnormed": has_weights(target, MIMO_PREFIX), "mtp_window": shipped_window(target)}
        head = cls(settings | {"foredraft": {"depth": ttt_steps}})
        if shipped:
            head.load_shipped(shipped, target)
        else:
            head.init_like(target)
        head.attach(target)
        return head.to(target.device)

    @torch.no_grad()
    def init_like(self, target: Target) -> None:
        """Pass the hidden state through, so that training starts from the target's own prediction of the token before."""
        size = llama_config.probe(target, [target.num_layers]).pow(2).mean().sqrt()
        self.init_passthrough()
        for norm in (self.pre_fc_norm_hidden, self.norm):
            norm.weight.fill_(size)

    def load_shipped(self, shipped: dict[str, Tensor], target: Target) -> None:
        """Load the weights of the target's own layer, named without `mtp.`."""
        ours = {name.replace("layer.", "layers.0.", 1): tensor for name, tensor in self.state_dict().items()}
        other = sorted(shipped.keys() ^ ours.keys())
        other += [name for name in ours if name in shipped and shipped[name].shape != ours[name].shape]
        if other:
            raise ValueError(
                f"the MTP layer of {target.name} is not supported ({PREFIX}{other[0]}): it is quantized, or has experts or "
                "another kind of attention. Use head=eagle, which trains its own layer"
            )
        weights = shift_norms(shipped, target)
        self.load_state_dict({name.replace("layers.0.", "layer.", 1): tensor for name, tensor in weights.items()})

    def to_config(self) -> dict[str, Any]:
        attention = self.layer.self_attn
        flags = {"attn_output_gate": attention.gated, "qk_norm": attention.normed}
        flags |= {"takes_unnormed": self.takes_unnormed, "mtp_window": self.window}
        return llama_config.to_json(self.config) | {"attention_bias": self.config.attention_bias} | flags

    def first_hidden(self, aux_hidden_states: Tensor) -> Tensor:
        if not self.takes_unnormed:
            return aux_hidden_states
        return without_weight(aux_hidden_states, weight_of(self.target.model.get_decoder().norm))

    def feed_back(self, out: Tensor) -> Tensor:
        return without_weight(out, self.norm.weight) if self.takes_unnormed else out

    def inputs(self, hidden: Tensor, embeddings: Tensor) -> tuple[Tensor, Tensor]:
        both = self.pre_fc_norm_embedding(embeddings.to(self.dtype)), self.pre_fc_norm_hidden(hidden.to(self.dtype))
        fused = self.fc(torch.cat(both, dim=-1))
        return self.layer.input_layernorm(fused), fused

    def finish(self, out: Tensor) -> Tensor:
        return self.norm(out)


def without_weight(normed: Tensor, weight: Tensor) -> Tensor:
    """Return normed states without the norm's weight: up to their size, which the next norm ignores, the states before it."""
    return normed / weight.where(weight != 0, 1)


def shipped_layer(target: Target) -> dict[str, Tensor]:
    """Return the MTP layer in the target's files, with the names of Qwen's tensors but without `mtp.`; empty if the target
    ships none. Raises ValueError if its config announces one that is missing."""
    layouts = {PREFIX: {}, MIMO_PREFIX: MIMO, f"model.layers.{target.num_layers}.": DEEPSEEK}
    prefix, names = next(((p, n) for p, n in layouts.items() if has_weights(target, p)), ("", {}))
    if not prefix:
        file = checkpoint_file(target, "config.json")
        settings = {} if file is None else json.loads(file.read_text())
        settings = settings.get("text_config") or settings
        announced = next((f"{name}={settings[name]}" for name in COUNT_KEYS if settings.get(name)), None)
        if announced is not None:
            raise ValueError(
                f"the config of {target.name} has {announced}, but its files contain no MTP layer of a supported name "
                f"({', '.join(layouts)}*): download all of its files, or use head=eagle, which trains its own layer"
            )
        return {}
    stored = stored_tensors(target, lambda name: name.removeprefix(prefix) if name.startswith(prefix) else None)
    if not names:
        return stored
    layer: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        part = name.removesuffix(".weight")
        if name not in COPIES:
            layer[f"{names[part]}.weight" if part in names else f"layers.0.{name}"] = tensor
    if names is MIMO:
        layer["fc.weight"] = torch.cat(layer["fc.weight"].chunk(2, dim=1)[::-1], dim=1)
        if "layers.0.self_attn.q_proj.bias" in layer:  # as in Qwen2
            layer["layers.0.self_attn.o_proj.bias"] = torch.zeros(target.hidden_size)
    return layer


def attention_settings(layer: dict[str, Tensor], width: int) -> dict[str, bool]:
    """Return the settings that the weights of an MTP layer, named without `mtp.`, show. width: of all its queries."""
    prefix = "layers.0.self_attn."
    return {
        "attention_bias": f"{prefix}q_proj.bias" in layer,
        "attn_output_gate": len(layer.get(f"{prefix}q_proj.weight", ())) == 2 * width,
        "qk_norm": f"{prefix}q_norm.weight" in layer,
    }


def shipped_window(target: Target) -> int | None:
    """Return how far back the MTP layer that the target ships looks, its own position included; None for all of the text.
    Raises ValueError if such a layer has another rope than full attention."""
    settings = settings_of(target.config)
    kinds = settings.get("mtp_layer_types")  # EXAONE's layer is of the type of the target's first one if this is absent
    kinds = settings.get("layer_types") if kinds is None and target.config.model_type == "exaone_moe" else kinds
    if not kinds or kinds[0] != SLIDING:
        return None
    if SLIDING in (settings.get("rope_parameters") or {}):
        raise ValueError(
            f"the MTP layer of {target.name} has the rope of its layers with a window, which is not supported: use "
            "head=eagle, which trains its own layer"
        )
    return settings["sliding_window"]


def has_weights(target: Target, prefix: str) -> bool:
    return any(name.startswith(prefix) for name in weight_map(target))


def shift_norms(weights: dict[str, Tensor], target: Target, sign: int = 1) -> dict[str, Tensor]:
    """Add what the target's files subtract from the weights of norms, or subtract it (sign -1), in float32, since a small
    difference to 1 is lost in half precision."""
    centered = target.config.model_type.startswith(ZERO_CENTERED)
    return {name: t.float() + sign if centered and "norm" in name else t for name, t in weights.items()}
