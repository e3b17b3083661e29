"""Products of training by oneDNN: torch's numbers up to rounding, in every shape that heads multiply."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from foredraft.heads.target_model import Target
from foredraft.train import products
from foredraft.train.optimizer import multiplies_faster_in_bfloat16
from foredraft.train.products import Product, faster_products
from tests.support.head_factory import make_trainer

CPU = torch.device("cpu")


@pytest.fixture
def calls(monkeypatch) -> list[torch.Size]:
    """Let this CPU be one on which oneDNN is faster. Return the shapes of the weights that it gets."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("the products of this processor are not oneDNN's")
    monkeypatch.setattr(products, "is_faster", lambda: True)
    found, multiply = [], products.multiply

    def noted(x, weight, bias=None):
        found.append(weight.shape)
        return multiply(x, weight, bias)

    monkeypatch.setattr(products, "multiply", noted)
    return found


def gradients(x, weight, bias, given) -> list[torch.Tensor]:
    out = F.linear(x, weight, bias)
    learned = [each for each in (x, weight, bias) if each is not None and each.requires_grad]
    return [out.detach(), *torch.autograd.grad(out, learned, given)]


@pytest.mark.parametrize("shape", [(40, 48), (2, 20, 48), (1, 4, 10, 48)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("weights", ["learned", "frozen", "a half", "a transpose"])
def test_a_product_and_its_gradients_are_torchs(calls, shape, bias, weights):
    torch.manual_seed(0)
    x, offset = torch.randn(shape, requires_grad=True), torch.randn(30, requires_grad=True) if bias else None
    weight = {"a half": torch.randn(30, 96).chunk(2, dim=1)[1], "a transpose": torch.randn(48, 30).t()}.get(weights)
    weight = torch.randn(30, 48) if weight is None else weight
    weight.requires_grad_(weights != "frozen")
    given = torch.randn(30).expand(*shape[:-1], 30)  # as the gradient of a sum
    expected = gradients(x, weight, offset, given)
    assert not calls
    with faster_products(CPU):
        found = gradients(x, weight, offset, given)
    assert len(calls) == (2 if weights == "frozen" else 3)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
    assert F.linear is products.torch_linear


@pytest.mark.parametrize("reason", ["few rows", "bfloat16", "autocast", "float64"])
def test_other_products_are_left_to_torch(calls, reason):
    dtype = {"bfloat16": torch.bfloat16, "float64": torch.float64}.get(reason, torch.float32)
    x = torch.randn(3 if reason == "few rows" else 64, 48, dtype=dtype, requires_grad=True)
    autocast = torch.autocast("cpu", torch.bfloat16) if reason == "autocast" else contextlib.nullcontext()
    with faster_products(CPU), autocast:
        F.linear(x, torch.randn(30, 48, dtype=dtype)).sum().backward()
    assert not calls and x.grad is not None


@pytest.mark.parametrize(
    "bias",
    [
        torch.arange(60.0)[::2],
        torch.tensor([3.0]).expand(30),
        torch.tensor([3.0]),
        torch.arange(64.0 * 30).view(64, 30),
    ],
    ids=["strided", "expanded", "broadcast", "a row each"],
)
def test_every_bias_that_torch_adds_is_added(calls, bias):
    x, weight = torch.randn(64, 48), torch.randn(30, 48)
    expected = F.linear(x, weight, bias)
    with faster_products(CPU):
        torch.testing.assert_close(F.linear(x, weight, bias), expected, rtol=1e-5, atol=1e-4)


def test_what_does_not_fit_is_refused_by_torch_and_what_is_empty_is_computed(calls):
    with faster_products(CPU):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            F.linear(torch.randn(64, 48), torch.randn(30, 47))
        assert F.linear(torch.randn(64, 48), torch.randn(48)).shape == (64,)
        assert F.linear(torch.randn(64, 48), torch.randn(30, 48).to_sparse_csr()).shape == (64, 30)
        assert torch.equal(F.linear(torch.zeros(64, 0), torch.zeros(30, 0)), torch.zeros(64, 30))
        assert F.linear(torch.randn(64, 48), torch.zeros(0, 48)).shape == (64, 0)
    assert not calls


def test_gradients_have_gradients_and_torch_func_transforms_products(calls):
    x, weight = torch.randn(64, 48, requires_grad=True), torch.randn(30, 48, requires_grad=True)

    def penalties() -> list[torch.Tensor]:
        (gradient,) = torch.autograd.grad(F.linear(x, weight).pow(2).sum(), x, create_graph=True)
        return [
            *torch.autograd.grad(gradient.pow(2).sum(), [x, weight]),
            torch.func.vmap(F.linear)(x[None], weight[None]),
        ]

    expected = penalties()
    with faster_products(CPU):
        torch.testing.assert_close(penalties(), expected, rtol=1e-4, atol=1e-2)
    assert calls


def test_only_the_outer_context_ends_it_and_an_error_does(calls):
    with faster_products(CPU):
        with faster_products(CPU), contextlib.suppress(ZeroDivisionError):
            raise ZeroDivisionError
        assert F.linear is products.linear
    assert F.linear is products.torch_linear


def test_layers_that_are_computed_again_use_the_same_products(calls):
    layer, x = nn.Linear(48, 48), torch.randn(64, 48, requires_grad=True)
    with faster_products(CPU):
        checkpoint(lambda x: layer(F.silu(layer(x))), x, use_reentrant=False).sum().backward()
    assert len(calls) == 8  # twice two forwards, and two products for each one's gradients


@pytest.mark.parametrize("optim", ["adamw", "muon"])
def test_a_training_uses_them_and_has_the_same_losses(calls, target: Target, tmp_path, monkeypatch, optim):
    def losses(name: str) -> list[float]:
        torch.manual_seed(0)
        trainer = make_trainer(target, tmp_path / name, optim, max_steps=4, logging_steps=1)
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    found = losses("onednn")
    assert len(found) == 4 and len(calls) > 40
    count = len(calls)
    monkeypatch.setattr(products, "is_faster", lambda: False)
    assert found == pytest.approx(losses("torch"), rel=1e-4) and len(calls) == count


def test_gradients_come_from_the_tensors_of_the_forward(calls):
    """Check that autograd refuses weights that were changed in place since."""
    x, weight = torch.randn(64, 48, requires_grad=True), torch.randn(30, 48)
    out = Product.apply(x, weight, None)
    weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize(
    ("maker", "amx", "half", "expected"),
    [
        ("AMD EPYC", False, True, True),
        ("AMD EPYC", False, False, False),
        ("Xeon", True, True, True),
        ("Xeon", False, True, False),
    ],
)
def test_products_are_in_bfloat16_where_that_is_faster(monkeypatch, maker, amx, half, expected):
    monkeypatch.setattr(products, "device_name", lambda device: maker)
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr("foredraft.train.optimizer.has_bfloat16_products", lambda device: half)
    assert multiplies_faster_in_bfloat16(CPU) is expected
    assert multiplies_faster_in_bfloat16(torch.device("cuda")) is half
