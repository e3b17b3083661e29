"""The noise and the warpers, each against its definition."""

import pytest
import torch
from transformers import MinPLogitsWarper, RepetitionPenaltyLogitsProcessor, TopKLogitsWarper, TopPLogitsWarper

from foredraft.inference.sampling import SCALE, Noise, Sampling, SamplingParams, gumbel, gumbel_of, top_p, top_p_on_cpu


def test_noise_is_standard_gumbel_and_independent():
    noise = Noise([1, 2], 2000, "cpu").at(torch.arange(40).expand(2, -1)).double()
    uniform = torch.exp(-torch.exp(-noise))  # the Gumbel distribution's distribution function: uniform in 0..1
    assert abs(uniform.mean() - 0.5) < 0.003 and abs(uniform.var() - 1 / 12) < 0.001
    counts = torch.histc(uniform, bins=50, min=0, max=1)
    chi2 = ((counts - counts.mean()) ** 2 / counts.mean()).sum()
    assert chi2 < 95  # 49 degrees of freedom: 95 has a chance of 1e-4
    for other in (noise.roll(1, 1), noise.roll(1, 2), noise.flip(0)):  # next position, next token, other seed
        assert abs(torch.corrcoef(torch.stack([noise.flatten(), other.flatten()]))[0, 1]) < 0.01


def test_a_seed_has_the_same_noise_in_every_release():
    """A change of these numbers changes the text of every seed. The branch of a GPU computes the same ones."""
    noise, positions = Noise([3, None, -(2**62)], 5, "cpu"), torch.tensor([[2], [3], [2**40]])
    first, last = (
        [-0.517703, -0.443685, 0.361767, 0.451408, -0.024577],
        [0.801198, 0.301715, 1.264116, 0.471898, 0.950941],
    )
    found = noise.at(positions)
    torch.testing.assert_close(found[:, 0], torch.tensor([first, [0.0] * 5, last]), atol=2e-6, rtol=0)
    noise.by_position = False
    assert torch.equal(noise.at(positions), found)


def test_noise_is_finite_and_falls_with_the_bits():
    """Check also bits or fractions that round to 0 or 1, and signs without a counterpart."""
    bits = torch.tensor([0, 0, 1, -3, 2**30, 2**31 - 1, -(2**31)], dtype=torch.int32)
    noise = gumbel_of(bits, torch.tensor([2.0**-25, 1 - 2.0**-24, *[0.5] * 5]))
    assert noise.isfinite().all() and (noise.diff() <= 0).all() and noise[0] > 38 and noise[-1] < -2.7


def test_the_fraction_below_the_bits_of_noise_is_uniform(monkeypatch: pytest.MonkeyPatch):
    fractions: list[torch.Tensor] = []
    monkeypatch.setattr("foredraft.inference.sampling.gumbel_of", lambda bits, fraction: fractions.append(fraction))
    gumbel(torch.arange(10_000)[:, None], torch.zeros(1, dtype=torch.int32))
    found = fractions[0].double().flatten().sort().values
    assert (found - (torch.arange(10_000) + 0.5) / 10_000).abs().max() < 0.02  # Kolmogorov-Smirnov
    assert found[0] > 0 and found[-1] < 1


def test_a_sequence_without_top_k_does_not_sort_the_vocabulary_for_the_others():
    params = [SamplingParams(1.0, top_k=5), SamplingParams(1.0)]
    together = Sampling.of(params, 1000)
    assert together.largest_k == 64
    logits = torch.randn(2, 3, 1000)
    warped, _ = together.warp(logits)
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
    processed = warper.process(logits[:, None], None, seen[:, None])
    theirs = RepetitionPenaltyLogitsProcessor(1.4)(ids, logits)
    assert torch.equal(processed[:, 0], theirs)
    theirs = theirs / 0.7
    for warp in (TopKLogitsWarper(12), TopPLogitsWarper(0.8), MinPLogitsWarper(0.3)):
        theirs = warp(ids, theirs)
    for likeliest in (None, 49, 50):
        ours, too_few = warper.warp(processed, likeliest)
        torch.testing.assert_close(ours[:, 0].softmax(-1), theirs.softmax(-1))
        assert (too_few is None) == (likeliest != 49) and (too_few is None or not too_few.any())


def test_filters_keep_no_more_than_they_say():
    """Take a top-k that its buffer just holds, a top-p that some tokens have exactly, and other settings at their limits."""
    for k, largest in ((64, 64), (100, 128)):
        sampling = Sampling.of([SamplingParams(1.0, top_k=k), SamplingParams(1.0, top_k=2)], 1000)
        kept = sampling.warp(torch.randn(2, 1, 1000))[0].isfinite().sum(-1).flatten()
        assert sampling.largest_k == largest and kept.tolist() == [k, 2]
    likeliest, _ = Sampling.of([SamplingParams(1.0, min_p=1)], 3).warp(torch.tensor([[[1.0, 3.0, 2.0]]]))
    assert likeliest.isfinite().tolist() == [[[False, True, False]]]
    equal = torch.zeros(1, 1, 4)
    for share, count in ((0.5, 2), (0.25, 1), (0.01, 1)):
        p = torch.full((1, 1, 1), share)
        for kept in (top_p(equal, p, 4)[0], top_p_on_cpu(equal, p)):
            assert kept.isfinite().tolist() == [[[place < count for place in range(4)]]]
    coldest, _ = Sampling.of([SamplingParams(temperature=1e-40)], 3).warp(torch.tensor([[[1.0, 2.0, 3.0]]]))
    assert coldest.isfinite().all() and coldest.argmax() == 2


def kept_by_definition(logits: torch.Tensor, p: float) -> torch.Tensor:
    """Return (n, vocab) bool: which tokens top-p keeps, from the whole vocabulary sorted."""
    order = logits.sort(dim=-1, descending=True, stable=True).indices
    mass = (logits.softmax(-1).gather(-1, order) * SCALE).long()
    before = mass.cumsum(-1) - mass
    return torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, before < max(1, int(p * SCALE)))


@pytest.mark.parametrize("p", [1e-30, 0.05, 0.5, 0.9, 0.99, 0.999999])
@pytest.mark.parametrize("kind", ["peaked", "flat", "ties of bfloat16", "all equal", "one is certain", "filtered"])
def test_top_p_keeps_what_sorting_the_whole_vocabulary_keeps(kind, p):
    torch.manual_seed(1)
    logits = {"peaked": 6.0, "flat": 0.1, "one is certain": 1.0}.get(kind, 3.0) * torch.randn(4, 3000)
    if kind == "ties of bfloat16":
        logits = logits.bfloat16().float()
    if kind == "all equal":
        logits.fill_(1.5)
    if kind == "one is certain":
        logits[:, 17] = 200.0
    if kind == "filtered":
        logits[:, 7:] = float("-inf")
    shares = torch.full((4, 1, 1), p)
    wanted = kept_by_definition(logits, shares[0].item())
    assert wanted.any(-1).all()
    for likeliest in (3000, 40):
        kept, too_few = top_p(logits[:, None], shares, likeliest)
        enough = wanted.sum(-1) <= likeliest
        assert torch.equal(too_few[:, 0], ~enough)
        assert torch.equal(kept[enough, 0] > float("-inf"), wanted[enough] & (logits[enough] > float("-inf")))
    on_cpu = top_p_on_cpu(logits[:, None], shares)[:, 0]
    assert torch.equal(on_cpu, logits.masked_fill(~wanted, float("-inf")))


def test_top_p_leaves_alone_who_does_not_use_it_and_what_is_not_a_number():
    logits = torch.randn(3, 1, 500)
    logits[0, 0, 5], logits[1, 0, 3] = 200.0, float("nan")  # all others of the first row underflow
    shares = torch.tensor([1.0, 0.5, 0.5])[:, None, None]
    for kept in (top_p_on_cpu(logits, shares), top_p(logits, shares, 20)[0]):
        assert torch.equal(kept[0], logits[0]) and kept[1].isnan().any() and kept[2].isinf().any()
    assert not top_p(logits, shares, 20)[1][0] and not top_p(torch.zeros(1, 1, 500), shares[:1], 20)[1]


def test_settings_at_their_limits_are_taken_and_beyond_them_refused():
    SamplingParams(temperature=0, top_k=1, top_p=1, min_p=0, repetition_penalty=1e-3)
    SamplingParams(min_p=1)
    wrong = {"temperature": -1e-3, "top_k": 0, "top_p": 0, "min_p": -1e-3, "repetition_penalty": 0}
    for name, value in (*wrong.items(), ("top_p", 1.001), ("min_p", 1.001)):
        with pytest.raises(ValueError, match=f"{name}={value} must"):
            SamplingParams(**{name: value})
    for name in ("temperature", "presence_penalty", "frequency_penalty", "repetition_penalty"):
        for value in (float("inf"), float("nan")):
            with pytest.raises(ValueError, match=f"{name}={value} is not a finite number"):
                SamplingParams(**{name: value})
