"""Drafters without a head (n-grams, suffixes) draft only when it pays."""

import pytest
import torch

from foredraft.inference import generate
from foredraft.inference.drafters import AutoTree, NgramDrafter, NoDrafter, SuffixDrafter, load_drafter
from foredraft.inference.drafters.base import Accepted
from foredraft.inference.sampling import Sampling, SamplingParams
from foredraft.inference.target_sampler import TargetSampler
from tests.support.tiny import prompt, random_model

DRAFTS = 6
NEWEST = Accepted(torch.zeros(1, 1, dtype=torch.long), torch.zeros(1, 1, 0), [1], [[0]])


@pytest.fixture(scope="module")
def small():
    return random_model(1)


class Sure(NgramDrafter):
    """Draft a chain in every step."""

    def look_up(self, slot: int, text: list[int]) -> list[int]:
        return [1] * DRAFTS


def decoded(drafter: AutoTree, right: int, node: float, steps: int) -> tuple[float, float]:
    """Return the tokens and the time of steps in which `right` drafts are accepted. node: time that verifying a node takes,
    next to a step without drafts."""
    tokens = seconds = 0.0
    for _ in range(steps):
        drafter.prepare(NEWEST)
        tree = drafter.propose(NEWEST, None)
        nodes = tree.tokens.shape[1]
        path = list(range(1 + min(right, nodes - 1)))
        drafter.observe([path], tree.tokens)
        drafter.observe_seconds(1 + node * (nodes - 1))
        tokens, seconds = tokens + len(path), seconds + 1 + node * (nodes - 1)
    return tokens, seconds


@pytest.mark.parametrize("right", [0, 1, 3, DRAFTS])
@pytest.mark.parametrize("node", [0.005, 0.1, 0.3])
def test_drafts_cost_little_and_pay_off_where_they_can(small, right, node):
    """Check the first hundred steps next to those without drafts, and later ones next to the better of the two ways."""
    drafter = AutoTree(NoDrafter(), small)
    drafter.add_suffix(Sure())
    drafter.begin(1, 1000, Sampling.of([SamplingParams()], 1024))
    tokens, seconds = decoded(drafter, right, node, 100)
    assert tokens / seconds > 0.93
    decoded(drafter, right, node, 700)
    tokens, seconds = decoded(drafter, right, node, 200)
    assert tokens / seconds > 0.97 * max(1.0, (1 + right) / (1 + node * DRAFTS))
    assert not drafter.pending.groups and not drafter.pending.newest  # nothing is kept for a head


def test_a_step_without_drafts_makes_no_noise_for_them(small, monkeypatch):
    """Check that noise is made for as many positions as the tree may have levels, whatever the suffix might have drafted."""
    drafter, positions, gumbel = load_drafter("suffix", small), list[int](), TargetSampler.gumbel

    def counted(self, starts, count):
        positions.append(count)
        return gumbel(self, starts, count)

    monkeypatch.setattr(TargetSampler, "gumbel", counted)
    ids = torch.tensor([prompt(9) * 3])
    out = generate(small, drafter, ids, max_new_tokens=60, temperature=1.0, seed=1, eos_token_id=-1)
    drafted = sum(step.nodes > 1 for step in out.steps)
    assert sum(count > 1 for count in positions) == drafted < len(out.steps) - 2


def test_what_a_batch_is_expected_to_make_dear_is_tried(small):
    """Check eight sequences, whose drafts cost less here than is typical for a CPU, but pay off."""
    batch, drafter = 8, AutoTree(NoDrafter(), small)
    drafter.add_suffix(Sure())
    drafter.begin(batch, 1000, Sampling.of([SamplingParams()] * batch, 1024))
    newest = Accepted(torch.zeros(batch, 1, dtype=torch.long), torch.zeros(batch, 1, 0), [1] * batch, [[0]] * batch)
    drafter.memory.suffix[:] = [100.0, 50.0]
    sizes = []
    for _ in range(1200):
        drafter.prepare(newest)
        tree = drafter.propose(newest, None)
        sizes.append(tree.tokens.shape[1])
        path = list(range(1 + min(3, sizes[-1] - 1)))
        drafter.observe([path] * batch, tree.tokens)
        drafter.observe_seconds(1 + 0.1 * (sizes[-1] - 1))
    assert sizes[:9] == [1] * 9 and sizes[-100:].count(1 + DRAFTS) > 90


@pytest.mark.parametrize("name", ["ngram", "suffix"])
def test_a_lookup_by_name_changes_no_text(small, name):
    drafter, ids = load_drafter(name, small), torch.tensor([prompt(9) * 3, prompt(9, 1) * 3])
    assert isinstance(drafter, AutoTree) and isinstance(drafter.inner, NoDrafter)
    for _ in range(2):
        for settings in ({}, {"temperature": 1.0, "seed": 3}):
            plain = generate(small, None, ids, max_new_tokens=60, eos_token_id=-1, **settings)
            drafted = generate(small, drafter, ids, max_new_tokens=60, eos_token_id=-1, **settings)
            assert torch.equal(plain.sequences, drafted.sequences)


def test_a_lookup_can_draft_in_every_step(small):
    assert isinstance(load_drafter("ngram", small, tree="fixed", depth=3), NgramDrafter)
    assert isinstance(load_drafter("suffix", small, tree="fixed", nodes=4), SuffixDrafter)
    with pytest.raises(ValueError, match="tree=wide is not one of auto, fixed"):
        load_drafter("ngram", small, tree="wide")
