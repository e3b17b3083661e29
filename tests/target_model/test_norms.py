"""Norms of a target as one operation each."""

import copy

import pytest
import torch
import transformers as hf
from torch.utils._python_dispatch import TorchDispatchMode

from foredraft import Target
from foredraft.heads.target_model.norms import fuse_norms
from tests.support import architectures

SIZES = architectures.SIZES | {"num_hidden_layers": 2, "initializer_range": 0.02}


class Operations(TorchDispatchMode):
    """Note the operations of a forward."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def squares(model, ids) -> int:
    """Return how many squares a forward computes: one for each norm that transformers' code computes."""
    with torch.inference_mode(), Operations() as tape:
        model(ids)
    return tape.names.count("pow")


@pytest.mark.parametrize(
    ("config", "fusible", "others"),
    [
        (hf.LlamaConfig(**SIZES), 5, 0),
        (hf.Qwen3Config(**SIZES, head_dim=8), 9, 0),  # with norms of queries and keys
        (hf.Gemma3TextConfig(**SIZES, head_dim=8), 0, 13),  # which add one to their weights
        (hf.LlamaConfig(**SIZES, attention_bias=True, rms_norm_eps=1e-2), 5, 0),
    ],
    ids=["llama", "qwen3", "gemma3", "large epsilon"],
)
def test_norms_become_one_operation_if_they_are_plain(config, fusible, others):
    torch.manual_seed(0)
    plain = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, parameter in plain.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, 1, 0.3)
    fused, ids = copy.deepcopy(plain), torch.randint(48, (2, 9))
    fuse_norms(fused)
    assert (squares(plain, ids) - squares(fused, ids), squares(fused, ids)) == (fusible, others)
    with torch.no_grad():
        torch.testing.assert_close(fused(ids).logits, plain(ids).logits)
        half = [copy.deepcopy(model).bfloat16() for model in (plain, fused)]
        torch.testing.assert_close(half[1](ids).logits, half[0](ids).logits, rtol=0.05, atol=0.05)


def test_a_replaced_forward_and_a_gated_norm_stay():
    """Check that what accelerate puts around a norm is kept, and that a norm of two inputs is passed over."""
    gated = hf.models.qwen3_next.modeling_qwen3_next.Qwen3NextRMSNormGated(8)
    hooked = hf.models.llama.modeling_llama.LlamaRMSNorm(8)
    hooked.forward = lambda x: x + 1
    fuse_norms(torch.nn.ModuleList([gated, hooked]))
    assert "forward" not in vars(gated) and torch.equal(hooked(torch.zeros(8)), torch.ones(8))


def test_a_fused_forward_can_be_wrapped_as_a_method():
    """Check it as compressed-tensors does when it decompresses a model in its first forward."""
    (norm,) = norms = torch.nn.ModuleList([hf.models.llama.modeling_llama.LlamaRMSNorm(8)])
    fuse_norms(norms)
    x, original = torch.randn(2, 8), norm.forward.__func__
    fused = norm(x)
    norm.forward = (lambda self, states: original(self, states)).__get__(norm)
    assert torch.equal(norm(x), fused)
    norm.forward = original.__get__(norm)
    assert torch.equal(norm(x), fused) and norm.forward.__self__ is norm


def test_a_model_with_fused_norms_can_be_stored(tmp_path):
    model = hf.AutoModelForCausalLM.from_config(hf.LlamaConfig(**SIZES)).eval()
    fuse_norms(model)
    torch.save(model, tmp_path / "model.pt")
    ids = torch.tensor([[1, 2, 3]])
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert torch.equal(loaded(ids).logits, model(ids).logits) and squares(loaded, ids) == 0


def test_a_loaded_target_has_such_norms(tiny_path):
    target = Target.from_pretrained(tiny_path, dtype="float32", device="cpu")
    assert squares(target.model, torch.tensor([[1, 2, 3]])) == 0
