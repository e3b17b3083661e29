"""Which tree, if any, `tree=auto` uses: by a clock that the tests set."""

import itertools
from collections import deque

import pytest
import torch

from foredraft.heads import Target
from foredraft.inference import generate
from foredraft.inference.drafters import AutoTree, DraftModel, auto
from foredraft.inference.drafters.auto import FIRST, PLAIN, TIMED
from foredraft.inference.drafters.costs import Costs
from foredraft.inference.sampling import Sampling, SamplingParams
from tests.support.drafters import OneBranch
from tests.support.small_targets import prompt, random_model


@pytest.fixture(scope="module")
def small() -> Target:
    return random_model(1)


class Clock:
    """Stands for the time module: every step of an AutoTree takes what its tree should."""

    def __init__(self, drafter: AutoTree, seconds):
        self.drafter, self.seconds, self.now = drafter, seconds, 0.0

    def perf_counter(self) -> float:
        if self.drafter.started is not None:
            self.now += self.seconds(self.drafter.last)
        return self.now


def flat(batch: int) -> Costs:
    """No difference between trees."""
    return Costs(read=dict.fromkeys(range(1, 9), 1.0), draft=[0.0] * 9)


def timed(monkeypatch, drafter: AutoTree, seconds) -> AutoTree:
    """Its steps take `seconds(plan)`."""
    monkeypatch.setattr(auto, "time", Clock(drafter, seconds))
    return drafter


class Useless(OneBranch):
    """A tree that is never right; what AutoTree needs of an inner drafter."""

    ranks = torch.arange(2)[None]

    def resize(self, nodes: int, levels: int) -> None:
        assert nodes > 1, "plain decoding asks no drafter"


def nodes_of_steps(target: Target, drafter: AutoTree, count: int, batch: int = 1) -> list[int]:
    ids, nodes = torch.tensor([prompt(9)] * batch), []
    while len(nodes) < count:
        seed = len(nodes)
        out = generate(target, drafter, ids, max_new_tokens=101, eos_token_id=-1, temperature=1.0, seed=seed)
        nodes += [step.nodes for step in out.steps]
    return nodes[:count]


def steep(batch: int) -> Costs:
    """A node costs a tenth of plain decoding."""
    return Costs(read={nodes: 1.0 + 0.1 * nodes for nodes in range(1, 9)}, draft=[0.0] * 9)


@pytest.mark.parametrize(("costs", "tried"), [(flat, FIRST), (steep, 22)])
def test_auto_ends_up_decoding_plainly_where_nothing_is_gained(small, monkeypatch, costs, tried):
    drafter = timed(monkeypatch, AutoTree(Useless([-1, -1]), small, costs), lambda plan: 1.0 + 0.1 * plan.nodes)
    nodes = nodes_of_steps(small, drafter, 300)
    full = [number for number, count in enumerate(nodes) if count > 1]
    assert full[:tried] == list(range(tried)) and full[tried] > tried
    pauses = [b - a for a, b in itertools.pairwise(full[tried - 1 :])]
    assert pauses == [TIMED + 1 + 33, 65, 129]  # it looks again ever more rarely


def test_auto_decodes_plainly_where_drafts_are_right_but_cost_more_than_they_gain(small, monkeypatch):
    itself = DraftModel(small, small, nodes=5, depth=4, width=1, min_probability=0)  # five tokens a step
    drafter = timed(monkeypatch, AutoTree(itself, small, flat), lambda plan: 1.0 if plan == PLAIN else 6.0 * plan.nodes)
    nodes = nodes_of_steps(small, drafter, 200)
    assert nodes[-100:].count(1) >= 98


def test_auto_drafts_where_it_pays(small, monkeypatch):
    itself = DraftModel(small, small, nodes=5, depth=4, width=1, min_probability=0)
    drafter = timed(monkeypatch, AutoTree(itself, small, flat), lambda plan: 1.0 + 0.1 * plan.levels)
    nodes = nodes_of_steps(small, drafter, 60)
    assert nodes[-20:].count(5) >= 18  # all but a look at plain decoding


def test_a_machine_that_grows_slower_is_no_reason_to_change_the_tree(small, monkeypatch):
    itself, slower = DraftModel(small, small, nodes=5, depth=4, width=1, min_probability=0), [1.0]
    drafter = AutoTree(itself, small, flat)
    timed(monkeypatch, drafter, lambda plan: slower[0] * (1.0 + 0.1 * plan.levels))
    nodes_of_steps(small, drafter, 60)
    slower[0] = 6.0  # five tokens in 8.4 would be less than one in a plain step of before
    assert nodes_of_steps(small, drafter, 60).count(5) >= 57


def test_a_new_tree_takes_turns_with_the_last_one(small, monkeypatch):
    itself = DraftModel(small, small, nodes=5, depth=4, width=1, min_probability=0)
    drafter = AutoTree(itself, small, lambda batch: Costs(dict.fromkeys(range(1, 9), 1.0), [0.0, 0.1, 0.2, 5.0, 8.0]))
    timed(monkeypatch, drafter, lambda plan: drafter.predicted(plan))
    nodes = nodes_of_steps(small, drafter, 120)
    first = next(number for number, count in enumerate(nodes) if 1 < count < 5)
    turns = nodes[first : first + 2 * (TIMED + 1) - 1]
    assert set(turns[::2]) == {nodes[first]} and set(turns[1::2]) == {5}
    assert nodes[-20:].count(3) >= 18  # two drafts


def test_what_looking_costs_says_how_often_it_looks(small, monkeypatch):
    """Two drafts give three tokens a second, the largest tree five in two: three steps of it lose what one step in a hundred
    may."""
    itself = DraftModel(small, small, nodes=5, depth=4, width=1, min_probability=0)
    drafter = AutoTree(itself, small, lambda batch: Costs(dict.fromkeys(range(1, 9), 1.0), [0.0, 0.0, 0.0, 0.8, 1.0]))
    timed(monkeypatch, drafter, lambda plan: drafter.predicted(plan))
    runs = [(size, len(list(steps))) for size, steps in itertools.groupby(nodes_of_steps(small, drafter, 400))]
    assert runs[-4:-1] == [(5, TIMED), (3, 3 * 33), (5, TIMED)]


@pytest.mark.parametrize(
    ("over_plain", "drafted", "drafts"),
    [(1.02, True, True), (1.02, False, False), (1.05, False, True), (0.98, True, False)],
)
def test_drafting_starts_where_it_gains_enough_and_ends_where_it_loses(small, over_plain, drafted, drafts):
    drafter = AutoTree(Useless([-1]), small, flat)
    drafter.begin(1, 100, Sampling.of([SamplingParams()], 1024))
    drafter.best = drafter.full if drafted else PLAIN
    drafter.seen.append([0])  # one draft accepted: two tokens in a step
    for plan, seconds in ((PLAIN, 1.0), (drafter.full, 2 / over_plain)):
        drafter.taken[drafter.of_case(plan)] = deque([seconds] * TIMED)
    assert drafter.choose() == (drafter.full if drafts else PLAIN)


@pytest.mark.parametrize(("promise", "then"), [(1.04, 5), (1.08, 4)])
def test_another_tree_than_the_largest_must_promise_more(small, monkeypatch, promise, then):
    """Three drafts in place of four, by so much faster."""
    draft = [0.0, 0.6, 0.8, 4 / (5 / 2 * promise) - 1, 1.0]
    itself = DraftModel(small, small, nodes=5, depth=4, width=1, min_probability=0)
    drafter = AutoTree(itself, small, lambda batch: Costs(dict.fromkeys(range(1, 9), 1.0), draft))
    timed(monkeypatch, drafter, lambda plan: drafter.predicted(plan))
    nodes = nodes_of_steps(small, drafter, 300)
    assert nodes[-100:].count(then) >= 85  # all but looks
    assert len({*nodes[-100:]} - {then, 5, 1}) == 0


@pytest.mark.parametrize(("cost", "then"), [(0.1, 5), (6.0, 1)])
def test_auto_tries_no_full_tree_in_a_batch_of_another_size(small, monkeypatch, cost, then):
    """What it gains is known by then; what it costs says the model, beside plain decoding."""

    def costs(batch: int) -> Costs:
        return Costs(read=dict.fromkeys(range(1, 9), 1.0), draft=[0.0, *[cost if batch > 1 else 0.1] * 4])

    itself = DraftModel(small, small, nodes=5, depth=4, width=1, min_probability=0)
    drafter = AutoTree(itself, small, costs)
    timed(monkeypatch, drafter, lambda plan: drafter.predicted(plan))
    assert nodes_of_steps(small, drafter, 60)[-1] == 5
    assert nodes_of_steps(small, drafter, 20, batch=2) == [1] * (TIMED + 1) + [then] * (20 - TIMED - 1)
