"""Packed linear layers: the same products, gradients, state and text, for targets and heads."""

import copy

import pytest
import torch
from torch import nn

from foredraft.heads import Target, save_head
from foredraft.heads.target_model import packing
from foredraft.heads.target_model.packing import PackedLinear, join, pack
from foredraft.inference import generate, load_drafter
from tests.support.head_factory import make_head

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")


@pytest.fixture
def everything_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pack small layers, too, on any CPU."""
    monkeypatch.setattr(packing, "SMALLEST", dict.fromkeys(packing.SMALLEST, 1))
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


def test_what_is_trained_or_small_stays_as_it_is(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(packing, "is_faster", lambda dtype: True)
    module = nn.Sequential(nn.Linear(512, 512), nn.Linear(8, 8).requires_grad_(False))
    pack(module)
    assert not packed_layers(module)
    pack(module[0].requires_grad_(False))  # a module itself has nobody to take its place
    pack(module)
    assert packed_layers(module) == [module[0]]


@pytest.mark.parametrize("kind", ["eagle3", "medusa", "hydra", "dflash", "eagle", "mtp"])
def test_texts_are_the_same(kind: str, everything_is_packed, tiny_path, target: Target, tmp_path):
    save_head(make_head(kind, target), tmp_path / "head", target)
    packed = Target.from_pretrained(tiny_path, dtype="float32", device="cpu")
    assert len(packed_layers(packed.model)) > 7 and not packed_layers(target.model)
    drafter = load_drafter(str(tmp_path / "head"), packed, tree="fixed")
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


class Layer(nn.Module):
    """Build two layers of one input and a third of another, which is as wide."""

    def __init__(self, writes: bool, bias: bool):
        super().__init__()
        self.writes = writes
        self.one, self.two, self.third = nn.Linear(24, 40, bias=bias), nn.Linear(24, 16, bias=False), nn.Linear(24, 24)

    def forward(self, x):
        x = x.clone()
        first = self.one(x)
        if self.writes:
            x += 1
        return first.sum(-1, keepdim=True) + self.two(x).mean(-1, keepdim=True) + self.third(x.tanh())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("writes", [False, True])
def test_layers_of_one_input_become_one_product(bias: bool, writes: bool, everything_is_packed):
    module, x = nn.Sequential(*(Layer(writes, bias) for _ in range(3))).requires_grad_(False), torch.randn(2, 5, 24)
    wanted, before, unpacked = module(x), copy.deepcopy(module.state_dict()), copy.deepcopy(module)
    pack(module)
    join(module, lambda: module(x))
    assert sum(layer.is_joined for layer in packed_layers(module)) == (
        0 if writes else 6
    )  # an input that is written to in between is another
    copied = copy.deepcopy(module)
    for one in (module, copied):
        torch.testing.assert_close(one(x), wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(one(x[:1]), wanted[:1], rtol=1e-5, atol=1e-5)
        assert all(torch.equal(tensor, before[name]) for name, tensor in one.state_dict().items())
        assert one.state_dict().keys() == before.keys()
    if not writes:
        assert copied[0].one.packed is copied[0].two.packed is not module[0].one.packed
        assert copied[0].one.packed.tensor is module[0].one.packed.tensor
        # Asked for alone, or in another order, each gives its own.
        linear = nn.Linear(24, 16, bias=False)
        linear.weight.data = before["1.two.weight"]
        for row in x:
            module[1].one(row + 1)  # whose outputs nobody else asks for
            torch.testing.assert_close(module[1].two(row), linear(row), rtol=1e-5, atol=1e-5)
    gradient, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    module(gradient).sum().backward()
    unpacked(theirs).sum().backward()
    torch.testing.assert_close(gradient.grad, theirs.grad, rtol=1e-5, atol=1e-5)


def test_modules_of_a_kind_are_joined_alike(everything_is_packed):
    """Join also one that no forward reaches, as an expert; join none of a kind whose layers are called in different ways."""
    module = nn.ModuleList([Layer(False, False) for _ in range(2)]).requires_grad_(False)
    pack(module)
    join(module, lambda: module[0](torch.randn(1, 24)))
    assert [(layer.two.is_joined, layer.third.is_joined) for layer in module] == [(True, False)] * 2
    module = nn.ModuleList([Layer(writes, False) for writes in (False, True)]).requires_grad_(False)
    pack(module)
    join(module, lambda: [layer(torch.randn(1, 24)) for layer in module])
    assert not any(layer.is_joined for layer in packed_layers(module))


def test_a_target_is_loaded_in_inference_mode_too(everything_is_packed, tiny_path):
    with torch.inference_mode():
        packed = Target.from_pretrained(tiny_path, dtype="float32", device="cpu")
        text = generate(packed, None, torch.arange(5, 25)[None], max_new_tokens=4).sequences
    assert text.shape[1] > 20 and any(layer.is_joined for layer in packed_layers(packed.model))


def test_a_layer_that_is_called_by_keyword_is_left_alone(everything_is_packed):
    class ByKeyword(Layer):
        def forward(self, x):
            return self.one(input=x).sum(-1, keepdim=True) + self.two(input=x).mean(-1, keepdim=True)

    module, x = nn.Sequential(ByKeyword(False, False)).requires_grad_(False), torch.randn(1, 24)
    pack(module)
    wanted = module(x)
    join(module, lambda: module(x))
    assert torch.equal(module(x), wanted) and not any(layer.is_joined for layer in packed_layers(module))


def test_a_model_that_the_forward_of_two_tokens_fails_on_is_packed_all_the_same(everything_is_packed):
    module, x = nn.Sequential(Layer(False, False)).requires_grad_(False), torch.randn(1, 24)
    pack(module)
    wanted = module(x)

    def fail() -> None:
        module(x)
        raise IndexError("no text is that short")

    join(module, fail)
    assert torch.equal(module(x), wanted)
    assert packed_layers(module) and not any(layer.is_joined for layer in packed_layers(module))
