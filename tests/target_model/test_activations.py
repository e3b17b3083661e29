"""Activations on a CPU: the same bits for any number of rows."""

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN

from foredraft.heads import Target
from foredraft.heads.target_model.activations import BatchInvariantActivation, padded, wrap_activations

NAMES = ("silu", "gelu", "gelu_pytorch_tanh", "gelu_new", "quick_gelu", "sigmoid", "relu2")


@pytest.mark.parametrize("threads", [1, 3, 5])
@pytest.mark.parametrize("name", NAMES)
def test_a_row_has_the_same_bits_next_to_any_number_of_others(name, threads):
    before, activation = torch.get_num_threads(), ACT2FN[name]
    ours = BatchInvariantActivation(activation)
    torch.set_num_threads(threads)
    try:
        for width in (688, 1000, 4864):
            x = torch.randn(60, width, generator=torch.Generator().manual_seed(0))
            wanted = ours(x)
            torch.testing.assert_close(wanted, activation(x))
            for rows in (1, 2, 4, 7, 16, 33):
                assert torch.equal(ours(x[:rows]), wanted[:rows])
            assert torch.equal(ours(x.t()).t(), wanted)  # not contiguous
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2, 3, 7, 8, 48])
def test_shares_of_all_threads_are_whole_vectors(threads):
    for count in (0, 1, 64, 688, 16384, 16385, 32768, 77824, 100_001, 5_636_096):
        whole = padded(count, threads)
        for working in {max(1, min(threads, -(-whole // 32768))), threads if whole > 16384 else 1}:
            assert whole % (64 * working) == 0
        assert count <= whole < count + 64 * threads * threads


def test_only_activations_of_single_numbers_are_wrapped():
    model = nn.Sequential(nn.SiLU(), nn.Softmax(-1), nn.GLU(), nn.Sequential(ACT2FN["gelu_new"], nn.LayerNorm(4)))
    for _ in range(2):  # the second time nothing is left to wrap
        wrap_activations(model)
        wrapped = [
            type(module.inner).__name__ for module in model.modules() if isinstance(module, BatchInvariantActivation)
        ]
        assert wrapped == ["SiLU", "NewGELUActivation"]


def test_a_packed_target_has_them_and_saves_the_same_weights(target: Target, fresh: Target):
    kinds = {type(layer.mlp.act_fn) for layer in target.model.model.layers}
    assert kinds == {BatchInvariantActivation}
    assert target.model.state_dict().keys() == fresh.model.state_dict().keys()
    assert not any(isinstance(module, BatchInvariantActivation) for module in fresh.model.modules())
