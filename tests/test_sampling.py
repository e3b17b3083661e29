"""The noise and the warpers, each against its definition."""

import torch
from transformers import MinPLogitsWarper, RepetitionPenaltyLogitsProcessor, TopKLogitsWarper, TopPLogitsWarper

from foredraft.inference.sampling import Noise, Sampling, SamplingParams, gumbel_of


def test_noise_is_standard_gumbel_and_independent():
    noise = Noise([1, 2], 2000, "cpu").at(torch.arange(40).expand(2, -1)).double()
    uniform = torch.exp(-torch.exp(-noise))  # the Gumbel distribution's distribution function: uniform in 0..1
    assert abs(uniform.mean() - 0.5) < 0.003 and abs(uniform.var() - 1 / 12) < 0.001
    counts = torch.histc(uniform, bins=50, min=0, max=1)
    chi2 = ((counts - counts.mean()) ** 2 / counts.mean()).sum()
    assert chi2 < 95  # 49 degrees of freedom: 95 has a chance of 1e-4
    for other in (noise.roll(1, 1), noise.roll(1, 2), noise.flip(0)):  # next position, next token, other seed
        assert abs(torch.corrcoef(torch.stack([noise.flatten(), other.flatten()]))[0, 1]) < 0.01


def test_noise_is_finite_and_falls_with_the_bits():
    """Also where bits or fraction round to 0 or 1, or the sign has no counterpart."""
    bits = torch.tensor([0, 0, 1, -3, 2**30, 2**31 - 1, -(2**31)], dtype=torch.int32)
    noise = gumbel_of(bits, torch.tensor([2.0**-25, 1 - 2.0**-24, *[0.5] * 5]))
    assert noise.isfinite().all() and (noise.diff() <= 0).all() and noise[0] > 38 and noise[-1] < -2.7


def test_noise_of_tokens_that_filters_left_is_the_same():
    params = [SamplingParams(1.0, top_k=7), SamplingParams(), SamplingParams(0.8), SamplingParams(1.2, min_p=0.1)]
    sampling, noise = Sampling.of(params, 3000), Noise([4, None, 5, 6], 3000, "cpu")
    positions = torch.tensor([[3, 4], [5, 6], [0, 1], [2**40, 9]])
    logits = sampling.warp(4 * torch.randn(4, 2, 3000))
    whole = logits + noise.at(positions)
    noise.add(logits, positions, [one.filters for one in params])
    assert torch.equal(logits, whole) and not noise.at(positions)[1].any()


def test_a_sequence_without_top_k_does_not_sort_the_vocabulary_for_the_others():
    params = [SamplingParams(1.0, top_k=5), SamplingParams(1.0)]
    together = Sampling.of(params, 1000)
    assert together.largest_k == 64
    logits = torch.randn(2, 3, 1000)
    warped = together.warp(logits)
    assert warped[0].isfinite().sum(-1).tolist() == [5] * 3 and torch.equal(warped[1], logits[1])


def test_noise_depends_on_seed_position_and_token_alone():
    noise = Noise([5, 9], 100, "cpu")
    both = noise.at(torch.tensor([[3, 4, 5], [70, 71, 72]]))
    assert torch.equal(both[1, 1], Noise([9], 100, "cpu").at(torch.tensor([[71]]))[0, 0])
    assert torch.equal(both[0, 2, :50], Noise([5], 50, "cpu").at(torch.tensor([[5]]))[0, 0])


def test_argmax_of_logits_and_noise_has_the_softmax_law():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5])
    noise = Noise([11], 250, "cpu").at(torch.arange(4_000)[None])  # 50 draws of 5 tokens at each position
    draws = (logits + noise.view(-1, 5)).argmax(-1)
    shares = torch.bincount(draws, minlength=5) / 200_000
    torch.testing.assert_close(shares, logits.softmax(-1), atol=0.004, rtol=0)


def test_warpers_are_transformers_own():
    logits, ids = torch.randn(3, 50), torch.randint(0, 50, (3, 6))
    seen = torch.zeros(3, 50, dtype=torch.bool).scatter(1, ids, True)
    warper = Sampling.of([SamplingParams(0.7, top_k=12, top_p=0.8, min_p=0.3, repetition_penalty=1.4)] * 3, 50)
    ours = warper.warp(warper.process(logits[:, None], None, seen[:, None]))[:, 0]
    theirs = RepetitionPenaltyLogitsProcessor(1.4)(ids, logits) / 0.7
    for warp in (TopKLogitsWarper(12), TopPLogitsWarper(0.8), MinPLogitsWarper(0.3)):
        theirs = warp(ids, theirs)
    torch.testing.assert_close(ours.softmax(-1), theirs.softmax(-1))
