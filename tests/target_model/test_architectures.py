"""Promise: an unmodified transformers decoder of any family reads a token tree as it would read each branch alone.

Tiny random models in float32. What we compare with is always a second copy of the model that no code of ours touches.
"""

import copy
import random
import re
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from foredraft.heads import Target
from foredraft.heads.attention import text_attention
from foredraft.heads.caches import layers as cache_layers
from foredraft.heads.caches.kv_cache import KVCache
from foredraft.heads.target_model.logits import check_logits
from foredraft.inference import generate
from foredraft.inference.drafters.base import Accepted, Drafter
from foredraft.inference.drafters.ngram import NgramDrafter
from foredraft.inference.evaluation.measure import left_pad
from foredraft.inference.sampling import Sampling
from foredraft.inference.tree import TokenTree, from_parents
from foredraft.train.hidden_states.online import forward_target
from tests.support.architectures import CONTEXT, FAMILIES, LENGTHS, VOCAB, WINDOW, a_few_families, pair, plain_model
from tests.support.batches import filled, packed


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make sliding layers keep no more than they need: texts are longer."""
    monkeypatch.setattr(cache_layers, "SLACK", 0)


def random_text(luck: random.Random, length: int) -> list[int]:
    return [luck.randrange(3, VOCAB) for _ in range(length)]


def random_tree(luck: random.Random, batch: int, nodes: int = 12) -> TokenTree:
    """Make branches of any shape. With 12 nodes one is longer than the window, and others lie between its nodes, so only
    positions determine what is within the window, not columns."""
    parents = [[luck.randrange(node) if node % 2 else max(0, node - 2) for node in range(nodes)] for _ in range(batch)]
    tokens = [random_text(luck, nodes) for _ in range(batch)]
    return from_parents(torch.tensor(tokens), torch.tensor(parents), depth=nodes)


def branch(tree: TokenTree, row: int, node: int) -> list[int]:
    """Return the nodes from the root down to `node`."""
    return tree.ancestors[row, node].nonzero()[:, 0].tolist()


def forward_tree(target: Target, tree: TokenTree, cache: KVCache) -> Tensor:
    return target.forward_tree(tree.tokens, cache.seq_lens + tree.depths, cache.mask(tree.ancestors), cache).logits


@torch.no_grad()
def alone(plain: hf.PreTrainedModel, text: list[int]) -> Tensor:
    """Return logits (length, vocab) of a forward of the raw model."""
    return plain(input_ids=torch.tensor([text]), use_cache=False).logits[0]


def continued(plain: hf.PreTrainedModel, prompts: list[list[int]], **limit: int) -> list[list[int]]:
    """Return each prompt with what transformers writes after it."""
    rows = [torch.tensor([prompt]) for prompt in prompts]
    return [plain.generate(ids, attention_mask=ids >= 0, do_sample=False, **limit)[0].tolist() for ids in rows]


def assert_same(ours: Tensor, theirs: Tensor, what: str) -> None:
    difference = (ours - theirs).abs().max().item()
    assert difference < 1e-4, f"{what}: logits differ by {difference:.3g}, of {theirs.abs().max().item():.3g}"


@pytest.mark.parametrize(
    "lengths", [pytest.param(LENGTHS[:1], marks=pytest.mark.nightly), LENGTHS], ids=["one row", "ragged"]
)
@a_few_families
def test_a_tree_is_read_as_each_of_its_branches_alone(family: str, attention: str, lengths: tuple[int, ...]) -> None:
    plain, target = pair(family, attention)
    luck = random.Random(1)
    texts = [random_text(luck, length) for length in lengths]
    tree = random_tree(luck, len(texts))
    assert tree.depths.max() > WINDOW
    logits = forward_tree(target, tree, filled(target, texts, 48, nodes=12))
    for row, text in enumerate(texts):
        for node in range(tree.tokens.shape[1]):
            nodes = branch(tree, row, node)
            theirs = alone(plain, text + tree.tokens[row, nodes].tolist())
            assert_same(logits[row, nodes], theirs[len(text) :], f"row {row}, branch {nodes}")


@torch.no_grad()
@a_few_families
def test_packed_rows_are_read_as_each_document_alone(family: str, attention: str, monkeypatch) -> None:
    monkeypatch.setattr(text_attention, "QUERIES", 3)  # which attend at a time
    plain, target = pair(family, attention)
    text = packed((9, 2, 7), (17,), (11, 5), low=3, high=VOCAB)
    last = forward_target(target, text, [1])[1]
    for row, numbers in enumerate(text.documents):
        for document in range(numbers.max() + 1):
            here = row, numbers == document
            assert_same(
                target.logits(last[here]), alone(plain, text.tokens[here].tolist()), f"document {row, document}"
            )


# Every family takes enough steps to leave its window far behind; in the long runs a slow drift would show.
LONG = {("llama", "sdpa"), ("gemma3_text", "sdpa"), ("gpt2", "eager")}


@a_few_families
def test_nothing_drifts_over_many_accepted_paths(family: str, attention: str) -> None:
    plain, target = pair(family, attention)
    luck = random.Random(2)
    rows, steps = (1, 120) if (family, attention) in LONG else (3, 20)
    texts = [random_text(luck, 10 + 2 * row) for row in range(rows)]
    prompts = [len(text) for text in texts]
    cache = filled(target, texts, CONTEXT, nodes=12)
    kept: list[list[Tensor]] = [[] for _ in texts]
    for _ in range(steps):
        tree = random_tree(luck, rows, nodes=8)
        logits = forward_tree(target, tree, cache)
        # A row that has finished keeps nothing while the others go on.
        paths = [
            [] if rows > 1 and luck.random() < 0.1 else branch(tree, row, luck.randrange(8)) for row in range(rows)
        ]
        cache.commit(paths)
        for row, path in enumerate(paths):
            texts[row] += tree.tokens[row, path].tolist()
            kept[row].append(logits[row, path])
    for row, text in enumerate(texts):
        assert cache.lengths[row] == len(text) > prompts[row] + steps
        assert_same(torch.cat(kept[row]), alone(plain, text)[prompts[row] :], f"row {row}")


class Tipped(Drafter):
    """Draft trees in which one branch is what its sequence will write, to a random depth, and the rest is random."""

    nodes = 8
    depth = nodes - 1

    def __init__(self, answers: list[list[int]]):
        self.answers = answers

    def begin(self, batch: int, capacity: int, sampling: Sampling) -> None:
        self.luck = random.Random(7)

    def propose(self, accepted: Accepted, gumbel: Tensor | None) -> TokenTree:
        tree = random_tree(self.luck, len(accepted.text), self.nodes)
        for row, text in enumerate(accepted.text):
            answer = next(answer for answer in self.answers if answer[: len(text)] == text)
            message = answer[len(text) - 1 :]
            for node, token in zip(branch(tree, row, self.luck.randrange(self.nodes)), message):
                tree.tokens[row, node] = token
        return tree


@a_few_families
def test_a_row_of_a_ragged_batch_writes_what_it_writes_alone(family: str, attention: str) -> None:
    plain, target = pair(family, attention)
    luck = random.Random(3)
    prompts = [random_text(luck, length) for length in (24, 5, 13)]
    theirs = continued(plain, prompts, max_new_tokens=24)
    for drafter in (Tipped(theirs), NgramDrafter()):
        ours = generate(target, drafter, *left_pad(prompts), max_new_tokens=24, eos_token_id=-1)
        assert [prompt + text for prompt, text in zip(prompts, ours.new_tokens)] == theirs
        if isinstance(drafter, Tipped):  # else little was accepted, and keeping it was not tested
            assert ours.acceptance_length > 1.5


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "mistral"])
def test_a_wrapped_model_still_writes_its_text_by_transformers(family: str) -> None:
    """Check the model itself, whose attention is ours then: with soft caps, sinks and a window."""
    plain, target = pair(family, "eager")
    prompts = [random_text(random.Random(3), 24)]
    assert continued(target.model, prompts, max_new_tokens=24) == continued(plain, prompts, max_new_tokens=24)


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_drafts_beyond_the_last_position_do_no_harm(family: str) -> None:
    """Use GPT-2 and OPT, whose table of positions ends there."""
    config = copy.deepcopy(FAMILIES[family])
    config.max_position_embeddings = 24
    plain = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    target = Target(copy.deepcopy(plain))
    assert target.context == 24
    luck = random.Random(8)
    prompts = [random_text(luck, length) for length in (20, 12)]  # the first is done while drafts are still read for it
    theirs = continued(plain, prompts, max_length=24)
    ours = generate(target, Tipped(theirs), *left_pad(prompts), max_new_tokens=50, eos_token_id=-1)
    assert [prompt + text for prompt, text in zip(prompts, ours.new_tokens)] == theirs


@a_few_families
def test_features_are_the_hidden_states_of_the_model(family: str, attention: str) -> None:
    plain, target = pair(family, attention)
    tokens = torch.tensor([random_text(random.Random(4), 21), random_text(random.Random(5), 21)])
    with torch.no_grad():
        states = plain(input_ids=tokens, output_hidden_states=True, use_cache=False).hidden_states
    last = target.num_layers
    assert len(states) == last + 1
    for layers in ([2], [last], [0, 2, last]):
        ours = target.forward(tokens, layers=layers).aux_hidden_states
        assert_same(ours, torch.cat([states[layer] for layer in layers], dim=-1), f"layers {layers}")


@a_few_families
def test_logits_are_rebuilt_from_the_last_hidden_state(family: str, attention: str) -> None:
    _, target = pair(family, attention)
    reading = target.forward(torch.tensor([random_text(random.Random(6), 21)]), layers=[target.num_layers])
    assert_same(target.logits(reading.aux_hidden_states), reading.logits, "rebuilt")
    check_logits(target)


def test_a_model_that_changes_its_logits_behind_the_head_is_found_out() -> None:
    target = Target(copy.deepcopy(pair("llama", "eager").plain), name="odd")

    def shift(module: Any, args: Any, output: Any) -> Any:
        output.logits = output.logits * 1.5
        return output

    target.model.register_forward_hook(shift)
    with pytest.raises(ValueError, match="odd changes its logits"):
        check_logits(target)


HALF = {"num_hidden_layers": 2}
LINEAR = HALF | {"layer_types": ["linear_attention", "full_attention"]}
# What reads chains only, and why.
CHAINS: dict[str, tuple[hf.PreTrainedConfig, str]] = {
    "mamba": (hf.MambaConfig(**HALF), "linear_attention"),
    "mamba2": (hf.Mamba2Config(**HALF), "linear_attention"),
    "falcon_mamba": (hf.FalconMambaConfig(**HALF), "linear_attention"),
    "jamba": (hf.JambaConfig(num_hidden_layers=8), "linear_attention"),
    "zamba2": (hf.Zamba2Config(**HALF, layers_block_type=["mamba", "hybrid"]), "hybrid, linear_attention"),
    "bamba": (hf.BambaConfig(**HALF), "linear_attention"),
    "falcon_h1": (hf.FalconH1Config(**HALF), "hybrid"),
    "qwen3_next": (hf.Qwen3NextConfig(**LINEAR), "linear_attention"),
    "minimax": (hf.MiniMaxConfig(**LINEAR), "linear_attention"),
    "lfm2": (hf.Lfm2Config(**HALF, layer_types=["conv", "full_attention"]), "conv"),
    "recurrent_gemma": (hf.RecurrentGemmaConfig(num_hidden_layers=3), "(linear_attention|recurrent)"),
    "rwkv": (hf.RwkvConfig(**HALF), "recurrent"),
    "xlstm": (hf.xLSTMConfig(**HALF, num_blocks=2), "recurrent"),
    # Not state-space models, and just as wrong under a tree: what else they remember, or how they place and mask keys.
    "deepseek_v32": (hf.DeepseekV32Config(**HALF), "(indexed|deepseek_sparse)_attention"),
    "llama4_text": (
        hf.Llama4TextConfig(**HALF, layer_types=["chunked_attention", "full_attention"]),
        "chunked_attention",
    ),
    "gpt_neo": (hf.GPTNeoConfig(num_layers=2, attention_types=[[["global", "local"], 1]]), "global, local"),
    "bloom": (hf.BloomConfig(n_layer=2), "position_ids"),
    "falcon": (hf.FalconConfig(**HALF, alibi=True), "alibi"),
    "openai-gpt": (hf.OpenAIGPTConfig(n_layer=2), "cache"),
    "blt": (hf.BltConfig(), "num_hidden_layers"),
    "xlm": (hf.XLMConfig(n_layers=1, emb_dim=32, n_heads=2, n_words=50), "a token in the place of a mask"),
    "xlnet": (
        hf.XLNetConfig(n_layer=1, d_model=32, n_head=2, d_inner=32, vocab_size=50),
        "a token in the place of a mask",
    ),
}
UNFIT: dict[str, tuple[hf.PreTrainedConfig, str]] = {
    "bert": (hf.BertConfig(**HALF), "an encoder"),
    "roberta": (hf.RobertaConfig(**HALF), "an encoder"),
    "gemma3_text": (hf.Gemma3TextConfig(**HALF, use_bidirectional_attention=True), "use_bidirectional_attention"),
}


def on_meta(config: hf.PreTrainedConfig) -> hf.PreTrainedModel:
    """Make a model without weights."""
    with torch.device("meta"):
        return hf.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("model_type", CHAINS)
def test_a_model_that_cannot_branch_says_why(model_type: str) -> None:
    config, reason = CHAINS[model_type]
    target = Target(on_meta(config))
    assert not target.capabilities.trees
    assert re.match(
        rf"^model_type {model_type} (has|has no|does not take|writes) {reason}\b", target.capabilities.why or ""
    )


@pytest.mark.parametrize("model_type", UNFIT)
def test_a_model_that_writes_no_text_is_refused_by_name(model_type: str) -> None:
    config, reason = UNFIT[model_type]
    with pytest.raises(ValueError, match=rf"^model_type {model_type} (has|is) {reason}\b"):
        Target(on_meta(config))


def test_what_does_not_read_on_has_no_head_to_train() -> None:
    config = hf.XLMConfig(n_layers=1, emb_dim=32, n_heads=2, n_words=50)
    target = Target(hf.AutoModelForCausalLM.from_config(config))
    assert not target.capabilities.caching and not target.capabilities.chains
    with pytest.raises(
        ValueError, match=r"^model_type xlm cannot continue from a cache.* cannot have a head; choose another target"
    ):
        target.forward(torch.tensor([[1, 2, 3]]))


def test_keys_that_tie_are_chosen_without_drafts() -> None:
    """Use Doge, beyond the number of keys that it keeps: in its first layer, equal tokens have equal scores."""
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = hf.AutoConfig.for_model(
        "doge", **sizes, num_attention_heads=4, num_key_value_heads=2, keep_window_size=16, initializer_range=0.3
    )
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config).eval()
    prompt = torch.tensor([[5, 9, 7, 5, 9] * 6])
    expected = copy.deepcopy(model).generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=24,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    short = Target(copy.deepcopy(model), context=16)
    assert short.capabilities.trees
    target = Target(model)
    assert not target.capabilities.chains and "target.context=16" in (target.capabilities.why or "")
    with pytest.warns(UserWarning, match="Drafting is disabled"):
        drafted = generate(target, NgramDrafter(), prompt, max_new_tokens=24, eos_token_id=-1)
    assert drafted.new_tokens[0] == expected[0, prompt.shape[1] :].tolist()


def test_streams_that_lie_before_the_batch_are_refused_by_name() -> None:
    """Use Gemma 3n: a mean over its third dimension would be one over the text."""
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "head_dim": 8}
    few = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_kv_shared_layers": 2, "laurel_rank": 4}
    per_layer = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB}
    kinds = {"layer_types": ["sliding_attention", "full_attention"] * 2, "activation_sparsity_pattern": [0.0] * 4}
    target = Target(plain_model(hf.AutoConfig.for_model("gemma3n_text", **sizes, **few, **per_layer, **kinds)))
    tokens = torch.arange(3, 9)[None].expand(4, -1)
    assert generate(target, NgramDrafter(), tokens, max_new_tokens=2).new_tokens
    with pytest.raises(
        ValueError, match=r"^model_type gemma3n_text returns hidden states of the shape \(4, 4, 6, 32\)"
    ):
        target.forward(tokens, layers=[2])
