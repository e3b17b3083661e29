"""What a step of a tree costs: how it is measured, and kept."""

import pytest
import torch
from torch import Tensor

from foredraft.heads import Target
from foredraft.inference.drafters import DynamicTree, costs
from foredraft.inference.drafters.base import Accepted
from foredraft.inference.drafters.costs import CostModel, Costs, PaddedRoot
from foredraft.inference.tree import TokenTree
from tests.support.small_targets import eagle, random_model


@pytest.fixture(scope="module")
def small() -> Target:
    return random_model(1)


def test_costs_are_measured_once_and_kept(small, monkeypatch, tmp_path):
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path))
    first = CostModel(eagle(small), small)(2)
    assert list(first.read) == [1, 2, 4, 6, 8, 10] and len(first.draft) == 5 and first.draft[0] == 0
    assert first.seconds(5, 2) == first.read[6] + first.draft[2]
    assert CostModel(eagle(small), small)(2) == first  # no two measurements are alike
    assert CostModel(eagle(small), small)(1) != first
    assert CostModel(eagle(small), small)(3) == CostModel(eagle(small), small)(4) != first
    for file in tmp_path.rglob("*.json"):
        file.write_text("{")  # of a program that was killed, say
    assert CostModel(eagle(small), small)(2) != first


@pytest.mark.parametrize("context", [512, 40, 41])
def test_reads_are_timed_after_texts_of_the_length_that_is_asked_for(monkeypatch, context):
    target, lengths, pad = random_model(1, max_position_embeddings=context), {False: [], True: []}, PaddedRoot.propose
    sizes: list[int | str] = []
    propose = DynamicTree.propose

    def drafted(self: DynamicTree, accepted: Accepted, gumbel: Tensor | None) -> TokenTree:
        sizes.append("draft")
        return propose(self, accepted, gumbel)

    def padded(self: PaddedRoot, accepted: Accepted, gumbel: Tensor | None) -> TokenTree:
        lengths[self.depth > 0].append([len(text) for text in accepted.text])
        sizes.append(self.depth)
        return pad(self, accepted, gumbel)

    monkeypatch.setattr(PaddedRoot, "propose", padded)
    monkeypatch.setattr(DynamicTree, "propose", drafted)
    model = CostModel(eagle(target), target, text=100)
    median_seconds = costs.median_seconds

    def timed_sizes(given, prepare, work, device):
        def checked(size: int) -> None:
            prepare(size)
            # A step of the same size goes before the one that is timed, and a draft where there is a tree.
            assert sizes[-2:] == [size - 1, "draft"] if size > 1 else sizes[-1] == 0

        return median_seconds(given, checked, work, device)

    monkeypatch.setattr(costs, "median_seconds", timed_sizes)
    model.measure_read(2)
    assert all(length < context for rows in lengths.values() for row in rows for length in row)  # texts that go on
    if context < 100:
        return
    plain, trees = (torch.tensor(lengths[drafts], dtype=torch.float64) for drafts in (False, True))
    # Rows without drafts stay of one length, and those with trees do not.
    assert torch.equal(plain[:, 0], plain[:, 1]) and set((trees[:, 1] - trees[:, 0]).tolist()) == {12.0}
    assert all(abs(found.mean() - 100) <= 1.5 for found in (plain, trees))
    assert CostModel(eagle(target), target, text=120).read_facts() != model.read_facts()


def test_a_draft_is_timed_after_a_text_and_after_what_a_step_accepts(monkeypatch):
    target, seen, propose = random_model(1, max_position_embeddings=512), [], DynamicTree.propose
    read, reads = target.forward, []

    def spied(self: DynamicTree, accepted: Accepted, gumbel: Tensor | None) -> TokenTree:
        seen.append((self.levels, accepted.tokens.shape, list(self.cache.lengths)))
        assert len(reads) == len(seen)  # the target, between two drafts
        return propose(self, accepted, gumbel)

    def spied_read(*args, **kwargs):
        reads.append(args)
        return read(*args, **kwargs)

    monkeypatch.setattr(DynamicTree, "propose", spied)
    monkeypatch.setattr(target, "forward", spied_read)
    model = CostModel(eagle(target), target, text=100)
    for batch in (1, 2):
        seen.clear(), reads.clear()
        model.measure_draft(batch)
        assert {(levels, tuple(shape)) for levels, shape, _ in seen} == {
            (levels, (batch, 1 + (levels if batch > 1 else levels // 2))) for levels in range(1, model.levels + 1)
        }
        assert all(lengths == ([100] if batch == 1 else [94, 106]) for *_, lengths in seen)


def test_a_disturbed_measurement_makes_no_tree_dearer_than_a_larger_one(small, monkeypatch):
    given = {"read": {"1": 20.0, "2": 9.0, "4": 21.0, "8": 10.0}, "draft": [0.0, 3.0, 2.0, 2.5]}
    monkeypatch.setattr(CostModel, "kept", lambda self, what, *rest: given[what])
    found = CostModel(eagle(small), small)(1)
    assert found == Costs(read={1: 9.0, 2: 9.0, 4: 10.0, 8: 10.0}, draft=[0.0, 2.0, 2.0, 2.5])


def test_sizes_are_timed_in_turn(monkeypatch):
    """A disturbance of one round is no size's alone."""
    now, order = [0.0], []

    def work(size: int) -> None:
        now[0] += 1.0 + size + (50.0 if len(order) in (4, 5, 6) else 0.0)

    monkeypatch.setattr(costs.time, "perf_counter", lambda: now[0])
    assert costs.median_seconds([1, 2, 4], order.append, work, torch.device("cpu")) == [2.0, 3.0, 5.0]
    assert order == [1, 2, 4] * costs.REPEATS
