"""Packed linear layers: the same products, gradients, state and text, for targets and heads."""

import copy

import pytest
import torch
from torch import nn

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
    assert [one.packed is two.packed for one, two in zip(packed_layers(copied), packed_layers(module))] == [True, True]
    assert copied[0] is not module[0] and copied[0].bias is not module[0].bias
    for state in (packed_state, copied.state_dict()):
        assert state.keys() == before.keys() and all(torch.equal(state[name], before[name]) for name in before)


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
