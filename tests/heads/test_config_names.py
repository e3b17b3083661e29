"""Promise: every head trains for, drafts for and is saved for a target whose config has other names for the usual sizes
(`attribute_map`: GPT-2's n_embd, MPT's d_model), leaves some of them out, or gives one for each layer."""

import copy
import warnings

import pytest
import torch
import transformers as hf
from hydra.errors import InstantiationException

from foredraft.heads import Target, load_head, save_head
from foredraft.heads.base import DraftHead, PackedBatch
from foredraft.heads.eagle import EagleHead
from foredraft.heads.layers import DecoderLayer
from foredraft.heads.llama_config import config_like, head_rope
from foredraft.inference import drafter_for, generate
from tests.conformance.families import default_settings, families
from tests.conformance.shrink import shrink
from tests.support import names
from tests.support.head_factory import OVERRIDES, build_head, criterion

VOCAB = 128
USUAL = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
OPENAI = USUAL | {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 96, "initializer_range": 0.2}
ROTATED = OPENAI | {"rotary_dim": 8}
CONFIGS = {
    "gpt2": hf.GPT2Config(**OPENAI),
    "gptj": hf.GPTJConfig(**ROTATED),
    "codegen": hf.CodeGenConfig(**ROTATED | {"n_head": 8, "rotary_dim": 4}),
    "gpt_bigcode": hf.GPTBigCodeConfig(**OPENAI, multi_query=True),
    "gpt_neo": hf.GPTNeoConfig(
        **USUAL,
        hidden_size=32,
        num_layers=4,
        num_heads=4,
        max_position_embeddings=96,
        attention_types=[[["global", "local"], 2]],
        window_size=8,
        initializer_range=0.2,
    ),
    "bloom": hf.BloomConfig(**USUAL, hidden_size=32, n_layer=4, n_head=4, initializer_range=0.2),
    "mpt": hf.MptConfig(**USUAL, d_model=32, n_layers=4, n_heads=4, max_seq_len=96, initializer_range=0.2),
    "dbrx": hf.DbrxConfig(
        **USUAL,
        d_model=32,
        n_layers=4,
        n_heads=4,
        max_seq_len=96,
        initializer_range=0.2,
        attn_config={"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        ffn_config={"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
    ),
    "xglm": hf.XGLMConfig(
        **USUAL, d_model=32, num_layers=4, attention_heads=4, ffn_dim=64, max_position_embeddings=96, init_std=0.2
    ),
    "ctrl": hf.CTRLConfig(**OPENAI, dff=64),
    "mamba2": hf.Mamba2Config(
        **USUAL, hidden_size=32, num_hidden_layers=4, num_heads=8, head_dim=8, n_groups=2, state_size=16, chunk_size=16
    ),
}
KINDS = [name for name in names("head") if name != "auto"]
OF_TREES = ("draft_model",)  # what drafts with layers of the target's own kind, under masks and positions of ours
BY_DAY = [("gpt2", kind) for kind in KINDS] + [("mpt", kind) for kind in KINDS]
BY_DAY += [(family, "eagle3") for family in CONFIGS if family not in ("gpt2", "mpt")]
REST = [(family, kind) for family in CONFIGS for kind in KINDS if (family, kind) not in BY_DAY]


def make_target(family: str) -> Target:
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(CONFIGS[family], dtype=torch.float32)
    return Target(model, name=family)


def train_a_step(kind: str, head: DraftHead, target: Target) -> float:
    model = criterion(kind, head, target)
    head.on_train_begin(target)
    documents, positions = torch.tensor([[0] * 20 + [1] * 28]), torch.tensor([[*range(20), *range(28)]])
    text = PackedBatch(torch.randint(3, VOCAB, (1, 48)), documents >= 0, documents, positions)
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=1e-3)
    loss = model(*text[:4], **model.prepare(text, step=0)).loss
    loss.backward()
    optimizer.step()
    head.on_train_end()
    head.eval()
    return loss.item()


@pytest.mark.parametrize(
    ("family", "kind"), [*BY_DAY, *(pytest.param(*case, marks=pytest.mark.nightly) for case in REST)]
)
def test_a_head_trains_is_saved_and_drafts(family: str, kind: str, tmp_path) -> None:
    target, settings = make_target(family), OVERRIDES.get(kind, {})
    if kind in OF_TREES and not target.capabilities.trees:
        with pytest.raises(InstantiationException, match=f"{target.capabilities.why}.*choose another"):
            build_head(kind, target, **settings)
        return
    head = build_head(kind, target, **settings)
    assert 0 < train_a_step(kind, head, target) < 50
    save_head(head, tmp_path / "head", target)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = load_head(tmp_path / "head", target)
    state = head.state_dict()
    assert again.state_dict().keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in again.state_dict().items())
    prompt, limits = torch.arange(3, 23)[None], {"max_new_tokens": 12, "eos_token_id": -1}
    drafted = generate(target, drafter_for(again, target), prompt, **limits)
    assert drafted.new_tokens == generate(target, None, prompt, **limits).new_tokens
    assert any(step.nodes > 1 for step in drafted.steps)


def test_a_kind_of_layers_without_a_rope_gives_the_heads_none() -> None:
    sliding = {"rope_type": "default", "rope_theta": 500.0}
    ropes = {"rope_parameters": {"full_attention": None, "sliding_attention": sliding}}
    assert head_rope(ropes) == sliding


def test_a_size_for_each_layer_gives_the_heads_the_largest(tiny_path) -> None:
    target = Target.from_pretrained(tiny_path, dtype="float32", device="cpu")
    target.config = copy.deepcopy(target.config)
    target.config.__dict__["intermediate_size"] = [64, 64, 96, 64, 64, 64]  # Gemma 3n's
    assert EagleHead.for_target(target).config.intermediate_size == 96


@pytest.mark.nightly
@pytest.mark.parametrize("family", families())
def test_the_config_of_every_family_shapes_a_layer(family: str) -> None:
    kind = families()[family]
    try:
        config = kind(**{key: value for key, value in shrink(default_settings(kind)).items() if key != "model_type"})
        with torch.device("meta"):
            target = Target(hf.AutoModelForCausalLM.from_config(config), name=family)
    except (ValueError, ImportError) as error:
        pytest.skip(f"transformers makes none: {error}")
    if family == "blt":  # several transformers one in the other, and decoded plainly
        with pytest.raises(ValueError, match="no hidden_size"):
            config_like(target)
        return
    with torch.device("meta"):
        DecoderLayer(config_like(target))
