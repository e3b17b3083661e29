"""Which tree, if any, `tree=auto` uses: its steps take what the tests say."""

import itertools
from collections import deque
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from foredraft.heads import Target
from foredraft.heads.target import cuda_graphs
from foredraft.inference import Engine, Request, generate
from foredraft.inference.drafters import AutoTree, DraftModel, SuffixDrafter, Switch
from foredraft.inference.drafters.auto import FIRST, PLAIN, TIMED, Case, Plan, Times
from foredraft.inference.drafters.base import Accepted
from foredraft.inference.sampling import Sampling, SamplingParams
from foredraft.inference.tree import TokenTree
from tests.support.drafters import OneBranch
from tests.support.small_targets import prompt, random_model
from tests.support.tape import Tape

FEW = TIMED + 1


@pytest.fixture(scope="module")
def small() -> Target:
    return random_model(1)


class Timed(AutoTree):
    """Imitate steps that take `cost(plan)`, of which a full tree's drafting takes `drafting`."""

    def __init__(self, inner, target: Target, cost: Callable[[Plan], float], drafting: float = 0.0):
        super().__init__(inner, target)
        self.cost, self.ticks = cost, itertools.count(0.0, drafting)

    def now(self) -> float:
        return next(self.ticks)

    def observe_seconds(self, seconds: float | None) -> None:
        super().observe_seconds(self.cost(self.plan))


class Useless(OneBranch):
    """Draft a tree that is never right; it has what AutoTree needs of an inner drafter."""

    ranks = torch.arange(2)[None]

    def resize(self, nodes: int, levels: int) -> None:
        assert nodes > 1, "steps without drafts ask no drafter"


def itself(target: Target) -> DraftModel:
    """Make a drafter whose chains of four are always right: five tokens a step."""
    return DraftModel(target, target, nodes=5, depth=4, width=1, min_probability=0)


class Short(DraftModel):
    """Draft correctly only at depths 1 and 2."""

    def propose(self, accepted: Accepted, gumbel: Tensor | None) -> TokenTree:
        tree = super().propose(accepted, gumbel)
        count = tree.tokens.shape[1]
        return tree._replace(tokens=tree.tokens.index_fill(1, torch.arange(min(3, count), count), -1))


class TimedSwitch(Switch):
    """Imitate steps that take a second, plus a hundredth for each node."""

    auto: Timed

    def observe_seconds(self, seconds: float | None) -> None:
        self.auto.cost = lambda plan: 1 + plan.nodes / 100
        super().observe_seconds(1 + self.seen_nodes / 100)

    def propose(self, accepted: Accepted, gumbel: Tensor | None) -> TokenTree:
        tree = super().propose(accepted, gumbel)
        self.seen_nodes = tree.tokens.shape[1]
        return tree


def nodes_of_steps(target: Target, drafter: AutoTree, count: int, batch: int = 1) -> list[int]:
    ids, nodes = torch.tensor([prompt(9)] * batch), []
    while len(nodes) < count:
        seed = len(nodes)
        out = generate(target, drafter, ids, max_new_tokens=101, eos_token_id=-1, temperature=1.0, seed=seed)
        nodes += [step.nodes for step in out.steps]
    return nodes[:count]


def know(drafter: AutoTree, drafting: float, *steps: tuple[Plan, float]) -> None:
    """Record what a full tree's drafting took, and steps of each plan, often enough."""
    for plan, seconds in steps:
        drafter.times.steps[plan] = deque([seconds] * TIMED)
    drafter.times.drafting.extend([drafting] * TIMED)


@pytest.mark.parametrize(("per_node", "tried"), [(0.0, FIRST), (0.1, 15)])
def test_auto_ends_up_decoding_plainly_where_nothing_is_gained(small, per_node, tried):
    drafter = Timed(Useless([-1, -1]), small, lambda plan: 1.1 if plan == PLAIN else 1.1 + per_node * plan.nodes)
    nodes = nodes_of_steps(small, drafter, 300)
    full = [number for number, count in enumerate(nodes) if count > 1]
    assert full[:tried] == list(range(FEW, FEW + tried)) and full[tried] > FEW + tried
    pauses = [b - a for a, b in itertools.pairwise(full[tried - 1 :])]
    assert pauses[1:] == sorted(pauses[1:]) and pauses[1] > 30  # it explores ever more rarely
    assert len(full) - tried <= 6


def test_auto_begins_plainly_then_with_a_small_tree(small):
    large = DraftModel(small, small, nodes=16, depth=15, width=1, min_probability=0)
    assert nodes_of_steps(small, Timed(large, small, lambda plan: 1.0), 3 * FEW) == [1] * FEW + [8] * FEW + [16] * FEW


def test_a_tree_that_is_too_large_for_a_batch_is_looked_at_rarely(small):
    large = Short(small, small, nodes=16, depth=15, width=1, min_probability=0)
    drafter = Timed(large, small, lambda plan: 40.0 if plan.nodes == 16 else 1 + plan.nodes / 100)
    nodes = nodes_of_steps(small, drafter, 500, batch=4)
    assert nodes[30:].count(16) == 0 and nodes[-1] in range(2, 16)


def test_trees_that_disappoint_are_no_reason_to_look_at_the_largest(small):
    """Let every tree but the small one seem cheap until it is timed."""
    inner = Short(small, small, nodes=16, depth=15, width=1, min_probability=0)
    drafter = Timed(inner, small, lambda plan: {1: 1.0, 8: 1.9, 16: 20.0}.get(plan.nodes, 3.5))
    nodes = nodes_of_steps(small, drafter, 300, batch=8)
    assert len(set(nodes)) > 4 and nodes[3 * FEW :].count(16) <= 1


def test_auto_decodes_plainly_where_drafts_are_right_but_cost_more_than_they_gain(small):
    drafter = Timed(itself(small), small, lambda plan: 1.0 if plan == PLAIN else 6.0 * plan.nodes)
    nodes = nodes_of_steps(small, drafter, 200)
    assert nodes[-100:].count(1) >= 98


def test_auto_drafts_where_it_pays(small):
    drafter = Timed(itself(small), small, lambda plan: 1.0 + 0.1 * plan.levels, drafting=0.4)
    nodes = nodes_of_steps(small, drafter, 60)
    assert nodes[-20:].count(5) >= 18  # all but an exploration of steps without drafts


def test_a_machine_that_grows_slower_is_no_reason_to_change_the_tree(small):
    slower = [1.0]
    drafter = Timed(itself(small), small, lambda plan: slower[0] * (1.0 + 0.1 * plan.levels), drafting=0.4)
    nodes_of_steps(small, drafter, 60)
    slower[0] = 6.0  # five tokens in 8.4 would be less than one in a plain step of before
    assert nodes_of_steps(small, drafter, 60).count(5) >= 57


def test_the_levels_share_the_drafting_and_the_nodes_the_rest(small):
    """Let a level cost one baseline step and a node almost nothing: two drafts, of which one is right, are drafted after
    all."""
    drafter = Timed(itself(small), small, lambda plan: 1.0)
    drafter.begin(1, 100, Sampling.of([SamplingParams()], 1024))
    know(drafter, 4.0, (PLAIN, 1.0), (drafter.full, 5.4))
    assert drafter.seconds(Plan(2, 1)) == pytest.approx(1 + 1 + 0.4 / 4)
    assert drafter.seconds(Plan(5, 2)) == pytest.approx(1 + 2 + 0.4)


def test_a_small_tree_that_was_timed_bends_what_nodes_cost(small):
    large = DraftModel(small, small, nodes=24, depth=8, width=3, min_probability=0)
    drafter = AutoTree(large, small)
    drafter.begin(1, 100, Sampling.of([SamplingParams()], 1024))
    know(drafter, 0.0, (PLAIN, 1.0), (Plan(8, 7), 1.2), (drafter.full, 5.0))
    assert drafter.seconds(Plan(4, 3)) == pytest.approx(1 + 0.2 * 3 / 7)
    assert drafter.seconds(Plan(16, 7)) == pytest.approx(1.2 + 3.8 * 8 / 16)


def test_a_new_tree_takes_turns_with_the_last_one(small):
    inner = Short(small, small, nodes=5, depth=4, width=1, min_probability=0)
    drafter = Timed(inner, small, lambda plan: 1.0 + 0.5 * plan.levels, drafting=2.0)
    nodes = nodes_of_steps(small, drafter, 200)
    first = FEW + next(n for n, count in enumerate(nodes[FEW:]) if count < 5)
    turns = nodes[first : first + 2 * FEW - 1]
    assert set(turns[::2]) == {nodes[first]} and set(turns[1::2]) == {5}
    assert nodes[-50:].count(3) >= 45 - TIMED  # two drafts, but for explorations


@pytest.mark.parametrize(
    ("over_plain", "drafted", "drafts"),
    [(1.02, True, True), (1.02, False, False), (1.05, False, True), (0.98, True, False)],
)
def test_drafting_starts_where_it_gains_enough_and_ends_where_it_loses(small, over_plain, drafted, drafts):
    drafter = AutoTree(Useless([-1]), small)
    drafter.begin(1, 100, Sampling.of([SamplingParams()], 1024))
    drafter.best = drafter.full if drafted else PLAIN
    drafter.paths.append([0])  # one draft accepted: two tokens in a step
    know(drafter, 0.0, (PLAIN, 1.0), (drafter.full, 2 / over_plain))
    assert drafter.choose() == (drafter.full if drafts else PLAIN)


@pytest.mark.parametrize(("promise", "then"), [(1.04, Plan(5, 4)), (1.08, Plan(4, 3))])
def test_another_tree_than_the_largest_must_promise_more(small, promise, then):
    """Try three drafts instead of four, for different speeds."""
    drafter = AutoTree(itself(small), small)
    drafter.begin(1, 100, Sampling.of([SamplingParams()], 1024))
    drafter.paths.append([0, 1, 2, 3])
    know(drafter, 1.0, (PLAIN, 1.0), (drafter.full, 2.0), (Plan(4, 3), 4 / (5 / 2 * promise)))
    assert drafter.choose() == then


@pytest.mark.parametrize(("cost", "then"), [(0.1, 5), (6.0, 1)])
def test_auto_tries_no_full_tree_at_first_in_a_batch_of_another_size(small, cost, then):
    """Expect that its gain is known by then, and its cost in the nearest batch size."""
    drafter = Timed(itself(small), small, lambda plan: 1.0 + (cost if plan != PLAIN else 0.0))
    times = drafter.all_times[Case(4, False)] = Times()
    for plan in (PLAIN, drafter.full):
        times.steps[plan] = deque([10 * drafter.cost(plan)] * TIMED)
    times.drafting.extend([0.0] * TIMED)
    drafter.all_paths[False] = deque([[0, 1, 2, 3]] * FIRST)
    assert nodes_of_steps(small, drafter, 20, batch=2) == [1] * FEW + [then] * (20 - FEW)


def test_a_node_costs_as_much_for_each_sequence_of_a_larger_batch(small):
    """Expect that five tokens for 2.2 seconds pay for one sequence; for eight they take 10.6, and none needs to be tried
    for that."""
    drafter = Timed(itself(small), small, lambda plan: 1.0 + 0.3 * 8 * (plan.nodes - 1))
    times = drafter.all_times[Case(1, False)] = Times()
    for plan, seconds in ((PLAIN, 1.0), (drafter.full, 2.2)):
        times.steps[plan] = deque([seconds] * TIMED)
    times.drafting.extend([0.0] * TIMED)
    drafter.all_paths[False] = deque([[0, 1, 2, 3]] * FIRST)
    assert nodes_of_steps(small, drafter, 20, batch=8) == [1] * 20
    drafter.begin(2, 100, Sampling.of([SamplingParams(temperature=1.0)], 1024))
    know(drafter, 0.0, (PLAIN, 1.5))
    assert drafter.seconds(drafter.full) == pytest.approx(1.5 + 2 * 1.2)


def test_seconds_are_those_of_decoding_steps_alone(small, monkeypatch):
    """Check that prefill chunks, steps of another engine and steps that capture are not counted."""
    monkeypatch.setitem(cuda_graphs.CAPTURES, "cpu", Tape)
    target, now, seen = Target(small.model, small.tokenizer, small.name), [0.0], list[float | None]()
    monkeypatch.setattr("foredraft.inference.engine.time.perf_counter", lambda: now[0])
    forward = type(target).forward

    def slow(self, tokens, *args, **kwargs):
        now[0] += 1.0 if tokens.shape[1] == 1 else 100.0
        return forward(self, tokens, *args, **kwargs)

    monkeypatch.setattr(type(target), "forward", slow)
    drafter = AutoTree(Useless([-1, -1]), target)
    monkeypatch.setattr(drafter, "observe_seconds", seen.append)
    engines = Engine(target, drafter, prefill_chunk=4), Engine(target)
    for engine in engines:
        engine.add(Request(prompt(9), max_new_tokens=12))
    while any(engine.has_work for engine in engines):
        for engine in engines:
            if engine.has_work:
                engine.step()
    assert seen[0] is None and seen[1:] == [0.0] * (len(seen) - 1)  # replays call no forward


@pytest.mark.parametrize("head_is_right", [True, False])
def test_a_switch_takes_the_suffix_or_the_head_by_what_each_promises(small, head_is_right):
    """Use a prompt whose greedy continuation has been seen: suffixes are right, and as cheap as a baseline step."""
    inner = itself(small) if head_is_right else Useless([-1, -1])
    switch = TimedSwitch(SuffixDrafter(longest=24, nodes=12), Timed(inner, small, lambda plan: 1.0))
    ids = torch.tensor([prompt(9)])
    text = generate(small, None, ids, max_new_tokens=101, eos_token_id=-1).sequences
    chosen = []
    for _ in range(8):
        out = generate(small, switch, ids, max_new_tokens=101, eos_token_id=-1)
        assert torch.equal(out.sequences, text)  # past outputs are remembered, so the second time all is known
        chosen.append(out.acceptance_length)
    assert chosen[-1] > 6 > 5 >= chosen[0]  # eleven drafts by the suffix, four by the head
    assert switch.accepted / switch.expected > 0.9


def test_a_switch_learns_that_suffixes_are_wrong(small):
    class Liar(SuffixDrafter):
        """Expect a token that never comes."""

        def draft(self, slot: int, text: list[int]) -> tuple[list[tuple[int, int]], float]:
            return [(-1, 0)] * 4, 3.0

    switch = TimedSwitch(Liar(), Timed(itself(small), small, lambda plan: 1.0))
    ids = torch.tensor([prompt(9)])
    steps = [step for _ in range(4) for step in generate(small, switch, ids, max_new_tokens=101, eos_token_id=-1).steps]
    assert any(step.accepted == [0] and step.nodes == 5 for step in steps[:20])  # it was tried
    assert all(step.accepted == [4] for step in steps[-10:-1])
