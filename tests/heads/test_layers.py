"""What layers compute, and what they keep for their gradients: as little as they say, and the same gradients."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DeepseekV3Config, LlamaConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

from foredraft.heads.attention.masked import attend
from foredraft.heads.latent_attention import LatentAttention
from foredraft.heads.layers import MLP, RMSNorm, Rotary, split_fused_projection
from foredraft.heads.llama_config import LATENT, LayerConfig
from tests.support.modes import LiveBytes

WIDTH, INNER, ROWS = 16, 48, 10


def learn(way, parameters, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    out = way(x)
    (out.float() * torch.linspace(-1, 1, WIDTH)).sum().backward()
    found = [out.detach(), x.grad, *(parameter.grad.clone() for parameter in parameters)]
    for parameter in parameters:
        parameter.grad = None
    return found


@pytest.mark.parametrize("autocast", [False, True])
def test_the_mlp_learns_as_its_definition_and_keeps_two_products(autocast):
    torch.manual_seed(0)
    mlp = MLP(WIDTH, INNER)
    x = torch.randn(2, ROWS, WIDTH)

    def plainly(x: Tensor) -> Tensor:
        return mlp.down_proj(F.silu(mlp.gate_proj(x)) * mlp.up_proj(x))

    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for mine, plain in zip(*(learn(way, list(mlp.parameters()), x) for way in (mlp, plainly)), strict=True):
            assert torch.equal(mine, plain)
        if not autocast:
            with LiveBytes([x, *mlp.parameters()]) as live:
                out = mlp(x)
            assert live.now == out.nbytes + 2 * (2 * ROWS * INNER * 4)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_first_half_that_stays_is_computed_once(autocast, bias):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(2 * WIDTH, outputs, bias=bias) for outputs in (WIDTH, 8)]
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    x, stays = torch.randn(2, ROWS, WIDTH), torch.randn(2, ROWS, WIDTH)

    def apart(x: Tensor) -> Tensor:
        first, weight = split_fused_projection(layers, stays)
        assert weight.dtype == (torch.bfloat16 if autocast else torch.float32)
        return (first + F.linear(x, weight))[..., :WIDTH]

    def together(x: Tensor) -> Tensor:
        return torch.cat([layer(torch.cat([stays, x], dim=-1)) for layer in layers], dim=-1)[..., :WIDTH]

    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        ours, theirs = (learn(way, parameters, x) for way in (apart, together))
    close = {"rtol": 0.02, "atol": 0.02} if autocast else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(ours, theirs, **close)


@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")])
def test_the_norm_learns_as_its_definition(dtypes):
    torch.manual_seed(0)
    x = torch.randn(2, ROWS, WIDTH).to(getattr(torch, dtypes[0]))
    norm = RMSNorm(WIDTH, 1e-5)
    norm.weight.data = torch.randn(WIDTH).to(getattr(torch, dtypes[1]))

    def plainly(x: Tensor) -> Tensor:
        weight = norm.weight.to(torch.promote_types(x.dtype, norm.weight.dtype))
        return F.rms_norm(x.to(weight.dtype), weight.shape, weight, 1e-5).to(x.dtype)

    plain = learn(plainly, [norm.weight], x)
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            torch.testing.assert_close(learn(norm, [norm.weight], x), plain)


@torch.no_grad()
@pytest.mark.parametrize("query", [None, 6])
@pytest.mark.parametrize("yarn", [False, True])
def test_latent_attention_is_deepseeks(query: int | None, yarn: bool):
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 100.0}
    if yarn:
        scale = {"factor": 8.0, "mscale": 1.0, "mscale_all_dim": 0.7, "original_max_position_embeddings": 8}
        rope |= {"rope_type": "yarn"} | scale
    sizes = dict(zip(LATENT, (query, 5, 6, 4, 7), strict=True)) | {"hidden_size": WIDTH}
    sizes |= {"num_attention_heads": 3, "num_key_value_heads": 3, "rms_norm_eps": 1e-6, "max_position_embeddings": 64}
    theirs_config = DeepseekV3Config(**sizes, rope_parameters=dict(rope))
    theirs_config._attn_implementation = "eager"
    theirs = DeepseekV3Attention(theirs_config, 0).eval()
    for parameter in theirs.parameters():
        parameter.data = torch.randn_like(parameter)
    config = LayerConfig(**sizes, head_dim=4, rope_parameters=dict(rope))
    ours = LatentAttention(config, WIDTH)
    ours.load_state_dict(theirs.state_dict())
    x, positions = torch.randn(2, ROWS, WIDTH), torch.arange(ROWS).repeat(2, 1) + 3
    hidden = torch.full((ROWS, ROWS), -torch.inf).triu(1)[None, None]
    expected, _ = theirs(x, DeepseekV3RotaryEmbedding(theirs_config)(x, positions), hidden)
    q, k, v, _ = ours.project(x, *Rotary(config)(positions, 64, x.dtype))
    torch.testing.assert_close(ours.project_out(attend(q, k, v, None)), expected, atol=1e-5, rtol=1e-5)


def test_a_position_keeps_its_angle_however_long_the_text():
    """Use longrope, whose factors change at 16: keys in a cache are not rotated again."""
    scale = {"short_factor": [1.0, 1.5], "long_factor": [4.0, 9.0], "original_max_position_embeddings": 16}
    rope = {"rope_type": "longrope", "rope_theta": 100.0} | scale
    sizes = {"hidden_size": 16, "num_attention_heads": 4, "head_dim": 4, "max_position_embeddings": 1024}
    positions, rotary = torch.arange(24)[None], Rotary(LlamaConfig(**sizes, rope_parameters=rope))
    short, long = (rotary(positions, longest, torch.float32) for longest in (24, 600))
    assert torch.equal(torch.stack(short), torch.stack(long))
    plain = Rotary(LlamaConfig(**sizes, rope_parameters=rope | {"long_factor": scale["short_factor"]}))
    same = (torch.stack(plain(positions, 24, torch.float32)) == torch.stack(short)).all(-1).all(0)[0, 0]
    assert same[:16].all() and not same[16:].any()
