"""Packed linear layers: the same products, gradients, state and text, for targets and heads."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from foredraft.heads import Target, save_head
from foredraft.heads.target_model import packing
from foredraft.heads.target_model.packing import PackedLinear, pack
from foredraft.inference import generate, load_drafter
from tests.support import nightly_but
from tests.support.decoding import with_trees
from tests.support.head_factory import make_head

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")


@pytest.fixture
def everything_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pack layers on any CPU."""
    monkeypatch.setattr(packing, "is_faster", lambda dtype: True)


def packed_layers(module: nn.Module) -> list[PackedLinear]:
    return [layer for layer in module.modules() if isinstance(layer, PackedLinear)]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 33])
def test_products_and_gradients_of_inputs_are_those_of_linear(bias: bool, rows: int):
    linear = nn.Linear(48, 80, bias=bias).requires_grad_(False)
    layer, x = PackedLinear(linear), torch.randn(2, rows, 48, requires_grad=True)
    torch.testing.assert_close(layer(x), linear(x), rtol=1e-5, atol=1e-5)
    strided = torch.randn(rows, 2, 48).transpose(0, 1)
    torch.testing.assert_close(layer(strided), linear(strided), rtol=1e-5, atol=1e-5)
    weights = torch.randn(2, rows, 80)
    ours, theirs = (torch.autograd.grad((made(x) * weights).sum(), x)[0] for made in (layer, linear))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_the_weight_comes_back_bit_by_bit(everything_is_packed):
    module = nn.Sequential(nn.Linear(40, 24), nn.Linear(24, 8, bias=False)).requires_grad_(False)
    before = copy.deepcopy(module.state_dict())
    pack(module)
    assert len(packed_layers(module)) == 2
    packed_state, copied = module.state_dict(), copy.deepcopy(module)
    assert [
        one.packed.tensor is two.packed.tensor for one, two in zip(packed_layers(copied), packed_layers(module))
    ] == [True, True]
    assert copied[0] is not module[0] and copied[0].bias is not module[0].bias
    for state in (packed_state, copied.state_dict()):
        assert state.keys() == before.keys() and all(torch.equal(state[name], before[name]) for name in before)


class Layers(nn.Module):
    """Hold queries, keys and values, which get one input, and a layer that gets another of the same width."""

    def __init__(self, bias: bool):
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(24, 40, bias=bias), nn.Linear(24, 16, bias=False)
        self.v_proj, self.o_proj = nn.Linear(24, 16, bias=bias), nn.Linear(24, 24)

    def forward(self, x):
        parts = [self.q_proj(x), self.k_proj(x), self.v_proj(x), self.o_proj(x.tanh())]
        return torch.cat(parts, -1)


@pytest.mark.parametrize("bias", [False, True])
def test_layers_of_one_input_are_one_product(bias: bool, everything_is_packed):
    module, x = nn.Sequential(Layers(bias)).requires_grad_(False), torch.randn(2, 5, 24)
    plain = copy.deepcopy(module)
    pack(module)
    assert packing.num_weights(module) == packing.num_weights(plain)
    copied = copy.deepcopy(module)
    assert copied[0].q_proj.packed is copied[0].k_proj.packed is not module[0].q_proj.packed
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    (module(ours).square().sum() + plain(theirs).square().sum()).backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)
    sizes: list[int] = []
    for one in (module, copied):
        for layer in packed_layers(one):
            vars(layer.packed).update(multiply=Counted(layer.packed.multiply, sizes))
        torch.testing.assert_close(one(x), plain(x), rtol=1e-5, atol=1e-5)
        state = one.state_dict()
        assert state.keys() == plain.state_dict().keys()
        assert all(torch.equal(tensor, state[name]) for name, tensor in plain.state_dict().items())
    assert sizes == [72, 24, 72, 24]


class Counted:
    """Note the width of each product."""

    def __init__(self, multiply: Callable[..., Tensor], sizes: list[int]):
        self.multiply, self.sizes = getattr(multiply, "multiply", multiply), sizes

    def __call__(self, *given: Any) -> Tensor:
        out = self.multiply(*given)
        self.sizes.append(out.shape[-1])
        return out


def test_layers_of_one_product_give_their_own_in_any_order_and_alone(everything_is_packed):
    module = nn.Sequential(Layers(True)).requires_grad_(False)
    plain = copy.deepcopy(module)
    pack(module)
    for names in (["v_proj", "k_proj", "q_proj"], ["q_proj", "q_proj"], ["k_proj", "v_proj"], ["q_proj", "v_proj"]):
        x = torch.randn(3, 24)
        for name in names:
            wanted = getattr(plain[0], name)(x)
            torch.testing.assert_close(getattr(module[0], name)(x), wanted, rtol=1e-5, atol=1e-5)
            if names == ["q_proj", "q_proj"]:
                x += 1  # the same tensor with another text's states


def test_what_is_trained_stays_as_it_is(everything_is_packed):
    module = nn.Sequential(nn.Linear(512, 512), nn.Linear(8, 8).requires_grad_(False))
    pack(module)
    assert packed_layers(module) == [module[1]]
    pack(module[0].requires_grad_(False))  # a module itself has nobody to take its place
    assert packed_layers(module) == [module[1]]
    pack(module)
    assert packed_layers(module) == [*module]


@pytest.mark.parametrize(
    "kind", nightly_but(["eagle3", "medusa", "hydra", "dflash", "eagle", "mtp"], "eagle3", "dflash")
)
def test_texts_are_the_same(kind: str, everything_is_packed, tiny_path, tmp_path):
    packed, target = (
        Target.from_pretrained(tiny_path, dtype="float32", device="cpu", pack=pack) for pack in (True, False)
    )
    save_head(make_head(kind, target), tmp_path / "head", target)
    assert len(packed_layers(with_trees(packed).model)) > 7 and not packed_layers(target.model)
    drafter = load_drafter(tmp_path / "head", packed, tree="fixed")
    ids = torch.arange(5, 25)[None] % target.vocab_size
    for settings in ({}, {"do_sample": True, "temperature": 1.0, "seed": 3}):
        plain = generate(target, None, ids, max_new_tokens=24, eos_token_id=-1, **settings).sequences
        for one in (None, drafter):
            assert torch.equal(
                generate(packed, one, ids, max_new_tokens=24, eos_token_id=-1, **settings).sequences, plain
            )


@pytest.mark.parametrize(("instructions", "packs"), [("AVX512", True), ("AVX2", True), ("DEFAULT", False)])
def test_the_processor_decides_what_is_packed_and_no_clock(instructions: str, packs: bool, monkeypatch):
    """Check it, since two runs of one command would differ at near-ties otherwise, and so would the processes of one run."""
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: instructions)
    monkeypatch.setattr("time.perf_counter", lambda: pytest.fail("a clock was read"))
    packing.is_faster.cache_clear()
    linears = nn.Sequential(nn.Linear(512, 512)).requires_grad_(False)
    pack(linears)
    packing.is_faster.cache_clear()
    assert bool(packed_layers(linears)) is packs
