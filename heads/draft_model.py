"""A smaller causal language model with the target's vocabulary, used as a recurrent head (arXiv:2211.17192).

It takes tokens where other heads take embeddings, and uses only the target's text. Tuned on what the target writes
(DistillSpec, arXiv:2310.08461), it is saved like any model, so every engine can draft with it.
"""

import copy
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from foredraft.heads import lora
from foredraft.heads.base import PackedBatch, RecurrentHead
from foredraft.heads.caches.kv_cache import KVCache
from foredraft.heads.target_model import Target
from foredraft.heads.target_model.ends import refuse
from foredraft.heads.target_model.logits import check_logits
from foredraft.heads.target_model.sharding import full_tensor

# The logit of a token that is not in the small model's vocabulary; finite, so that differences of logits are finite.
MASKED_LOGIT = -1e4

UNPACKED = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class DraftModelHead(RecurrentHead):
    kind, depth, depth_key = "draft_model", 1, ""
    format = "a causal language model as transformers saves it"
    disk_prefixes: ClassVar[dict[str, str]] = {"model.": ""}

    def __init__(self, lm: Target, vocab_size: int):
        """Wrap the small model lm. vocab_size: the target's, which some models pad. Raises ValueError for a model whose
        state cannot be rolled back to where the target took another token."""
        check_branches(lm)
        super().__init__()
        self.lm, self.vocab_size = lm, vocab_size
        self.model = lm.model
        self.layers, self.cache_layers = [], lm.num_layers

    @classmethod
    def for_target(
        cls, target: Target, path: str | None = None, num_hidden_layers: int = 2, lora_r: int | None = None
    ) -> "DraftModelHead":
        """Load or make a model to tune: the one at `path`, or one of the target's own first `num_hidden_layers` layers.
        lora_r: tune low-rank additions to its layers, which are merged at the end; None tunes all weights. Raises ValueError
        if the vocabularies differ."""
        if path is None:
            lm = Target(
                first_layers(target, num_hidden_layers),
                target.tokenizer,
                f"{num_hidden_layers} layers of {target.name}",
            )
        else:
            lm = Target.from_pretrained(path, dtype="float32", device=target.device, pack=False)
            check_vocabulary(lm, target)
        check_logits(lm)
        untie(lm.model)
        head = cls(lm, target.vocab_size)
        if lora_r is None:
            head.model.requires_grad_(True)
        else:
            lora.add(head.model.base_model, lora_r)
        return head.to(target.device)

    def _apply(self, fn: Any, recurse: bool = True) -> "DraftModelHead":
        """Cast only weights. Buffers keep their dtype, above all rotary frequencies, because drafts would differ."""
        before = [(part, name, buffer) for part in self.modules() for name, buffer in part.named_buffers(recurse=False)]
        super()._apply(fn, recurse)
        for part, name, buffer in before:
            setattr(part, name, buffer.to(getattr(part, name).device))
        return self

    @property
    def vocabulary_parameters(self) -> list[nn.Parameter]:
        return [*super().vocabulary_parameters, *self.model.get_output_embeddings().parameters()]

    def on_train_end(self) -> None:
        lora.merge(self)

    @classmethod
    def from_config(cls, config: dict) -> "DraftModelHead":
        record = config["foredraft"]
        settings = {name: value for name, value in config.items() if name not in ("foredraft", "model_type")}
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **settings))
        return cls(Target(model), record["target"]["vocab_size"])

    def to_config(self) -> dict:
        return self.model.config.to_dict() | {"architectures": [type(self.model).__name__]}

    def forward(self, aux_hidden_states: Tensor, embeddings: Tensor, text: PackedBatch) -> list[Tensor]:
        last = [self.lm.num_layers]
        masks, dtype, positions = self.lm.masks, self.lm.dtype, text.positions
        packed = self.lm.capabilities.packed_rows
        if text.parts is not None and not packed:
            raise ValueError(f"context_parallel: {self.lm.name} cannot read parts of rows; set context_parallel=1")
        mask = (
            masks.packed(text.document_starts(), dtype, text.parts)
            if packed
            else masks(text.mask(), dtype, positions, positions)
        )
        output = self.lm.forward(self.embed(text.tokens), positions, mask, None, last, 1)
        return [output.aux_hidden_states.roll(-1, dims=1)]  # its output at token p + 1 names token p + 2

    def embed(self, tokens: Tensor, target: Target | None = None) -> Tensor:
        """Return the tokens. Those without an embedding in the small model are replaced by its last token."""
        return tokens.clamp(max=self.lm.model.get_input_embeddings().num_embeddings - 1)

    def draft_extend(self, aux_hidden_states: Tensor, tokens: Tensor, cache: KVCache) -> Tensor:
        new = tokens.shape[1]
        return self.draft_step(aux_hidden_states, tokens, cache.columns(new), cache.causal_mask(new), cache)

    def draft_step(
        self, hidden: Tensor, tokens: Tensor, positions: Tensor, mask: Tensor | None, cache: KVCache
    ) -> Tensor:
        last = [self.lm.num_layers]
        return self.lm.forward_tree(tokens, positions, mask, cache, last, keep_logits=1).aux_hidden_states

    def logits(self, hidden: Tensor, depth: int) -> Tensor:
        logits = self.lm.logits(hidden)[..., : self.vocab_size]
        missing = self.vocab_size - logits.shape[-1]  # rows that pad the target's vocabulary (Qwen2.5-0.5B's for 7B)
        return F.pad(logits, (0, missing), value=MASKED_LOGIT) if missing else logits


def check_branches(lm: Target) -> None:
    if not lm.capabilities.trees:
        raise ValueError(f"{lm.capabilities.why}, which a draft model must support: choose another, or train a head")


def first_layers(target: Target, count: int) -> PreTrainedModel:
    """Build a float32 model of the target's kind from its embedding, its first `count` layers and what follows the last
    layer. Raises ValueError if the target's weights are packed, because they are useless without their scales."""
    if not 0 < count < target.num_layers:
        raise ValueError(
            f"head.num_hidden_layers={count} must lie between 1 and {target.num_layers - 1}, below the target's depth"
        )
    if target.embeddings_only:
        refuse()
    check_branches(target)
    config = copy.deepcopy(target.model.config)
    for name in ("quantization_config", "distributed_config"):
        vars(config).pop(name, None)
    shape = config.get_text_config()
    shape.num_hidden_layers = count
    if target.layer_types is not None:
        shape.layer_types = target.layer_types[:count]
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    theirs = target.model.state_dict()
    same = {
        name: with_rows(full_tensor(theirs[name]).float(), len(tensor))
        for name, tensor in model.state_dict().items()
        if name in theirs and theirs[name].dtype in UNPACKED and theirs[name].shape[1:] == tensor.shape[1:]
    }
    if packed := [name for name, _ in model.named_parameters() if name not in same]:
        raise ValueError(
            f"head=draft_model uses the first layers of {target.name}, whose {packed[0]} is packed: load the target "
            "unquantized, or set head.path to a small model of its vocabulary"
        )
    model.load_state_dict(same, strict=False)
    return model.to(target.device)


def with_rows(weight: Tensor, rows: int) -> Tensor:
    """Return a weight of this height: the embedding and lm_head of a target may differ from its config's vocabulary, and
    from each other."""
    return torch.cat([weight[:rows], weight.new_zeros(max(0, rows - len(weight)), *weight.shape[1:])])


def untie(model: PreTrainedModel) -> None:
    """Give the lm_head its own weights if they are the embedding's, so that every name on disk is one tensor."""
    config, head = model.config.get_text_config(), model.get_output_embeddings()
    if config.tie_word_embeddings:
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
        config.tie_word_embeddings = model.config.tie_word_embeddings = False


def check_vocabulary(model: Target, target: Target) -> None:
    """Raise ValueError unless token ids mean the same to both models. Either may have tokens that the other lacks, usually
    added ones at the end."""
    if model.tokenizer is not None and target.tokenizer is not None:
        ours, theirs = model.tokenizer.get_vocab(), target.tokenizer.get_vocab()
        named = {number: token for token, number in ours.items()}
        for token, number in theirs.items():
            if ours.get(token, number) != number or named.get(number, token) != token:
                raise ValueError(
                    f"the draft model {model.name} has another vocabulary than {target.name}: {token!r} is "
                    f"{ours.get(token)} there and {number} here; choose a model with the same tokenizer"
                )
    elif model.vocab_size != target.vocab_size:
        raise ValueError(
            f"the draft model {model.name} has {model.vocab_size} tokens, {target.name} has {target.vocab_size}: "
            "choose a model with the same tokenizer"
        )
