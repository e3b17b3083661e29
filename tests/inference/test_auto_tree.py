"""Which tree, if any, `tree=auto` uses: its steps take what the tests say."""

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from foredraft.heads import Target
from foredraft.heads.caches import cuda_graphs
from foredraft.inference import Engine, Request, generate
from foredraft.inference.drafters import AutoTree, DraftModel, SuffixDrafter, load_drafter
from foredraft.inference.drafters.base import Accepted
from foredraft.inference.drafters.dynamic import DynamicTree
from foredraft.inference.drafters.measurements import CHANCE, ENOUGH, PLAIN, WEIGHT, Case, Costs, Hits, Plan
from foredraft.inference.drafters.policy import BEHIND, plans_of
from foredraft.inference.sampling import Sampling, SamplingParams
from foredraft.inference.tree import TokenTree, chain
from tests.support import ROOT
from tests.support.decoding import OneBranch
from tests.support.modes import Tape
from tests.support.processes import end, start
from tests.support.tiny import prompt, random_model


@pytest.fixture(scope="module")
def small() -> Target:
    return random_model(1)


class Timed(AutoTree):
    """Take `cost(plan)` for each step of the head or without drafts; a hundredth of a second per node, and one, for a
    suffix."""

    def __init__(self, inner, target: Target, cost: Callable[[Plan], float]):
        super().__init__(inner, target)
        self.cost, self.spent = cost, 0.0

    def observe_seconds(self, seconds: float | None) -> None:
        seconds = 1 + self.size / 100 if self.by_suffix else self.cost(self.plan)
        self.spent += seconds
        super().observe_seconds(seconds)


class Useless(OneBranch):
    """Draft a tree that is never right; implement what AutoTree needs of an inner drafter."""

    ranks = torch.arange(2)[None]

    def resize(self, nodes: int, levels: int) -> None:
        assert nodes > 1, "a step without drafts asks no drafter"


def itself(target: Target, length: int = 4) -> DraftModel:
    """Return a drafter whose chains are always right: of four, five tokens a step."""
    return DraftModel(target, target, nodes=length + 1, depth=length, width=1, min_probability=0)


class Short(DraftModel):
    """Draft chains that are right only at depths 1 and 2."""

    def propose(self, accepted: Accepted, gumbel: Tensor | None) -> TokenTree:
        tree = super().propose(accepted, gumbel)
        count = tree.tokens.shape[1]
        return tree._replace(tokens=tree.tokens.index_fill(1, torch.arange(min(3, count), count), -1))


def nodes_of_steps(target: Target, drafter: AutoTree, count: int, batch: int = 1) -> list[int]:
    ids, nodes = torch.tensor([prompt(9)] * batch), []
    while len(nodes) < count:
        seed = len(nodes)
        out = generate(target, drafter, ids, max_new_tokens=101, eos_token_id=-1, temperature=1.0, seed=seed)
        nodes += [step.nodes for step in out.steps]
    return nodes[:count]


class Chains(DynamicTree):
    """Propose chains without a model."""

    def __init__(self) -> None:
        self.layers, self.branches, self.nodes, self.depth = [], False, 9, 8

    def resize(self, nodes: int, levels: int) -> None:
        self.nodes = nodes

    def begin(self, batch: int, capacity: int, sampling: Sampling) -> None:
        pass

    def propose(self, accepted: Accepted, gumbel: Tensor | None) -> TokenTree:
        self.ranks = torch.arange(self.nodes - 1)[None]
        return chain(torch.zeros(1, self.nodes, dtype=torch.long))


NEWEST = Accepted(torch.zeros(1, 1, dtype=torch.long), torch.zeros(1, 1, 0), [1], [[0]])


def begun(drafter: Timed) -> Timed:
    drafter.begin(1, 1000, Sampling.of([SamplingParams()], 1024))
    return drafter


@pytest.mark.parametrize("captured", [False, True])
def test_steps_without_the_head_take_bounded_memory_and_the_head_misses_nothing(small, monkeypatch, captured):
    if captured:
        monkeypatch.setitem(cuda_graphs.CAPTURES, "cpu", Tape)
    lengths = list[int]()

    class Seldom(AutoTree):
        def next_plan(self) -> Plan:
            self.is_trial = False
            lengths.append(len(self.pending))
            return PLAIN if len(lengths) % 21 else self.plans[-1]

    monkeypatch.setattr("foredraft.inference.drafters.policy.MOST_PENDING", 8)
    ids, target = torch.tensor([prompt(9), prompt(9, 1)]), Target(small.model, small.tokenizer, small.name)
    out = generate(target, Seldom(itself(target), target), ids, max_new_tokens=101, eos_token_id=-1)
    drafted = [step.emitted for step in out.steps[:-1] if step.nodes > 1]
    assert max(lengths) < 8 and len(drafted) > 2 and all(emitted == [5, 5] for emitted in drafted)


@pytest.mark.parametrize("right", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("node", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("level", [0.0, 0.2, 1.5])
def test_the_first_tokens_are_never_slower_than_the_baseline(small, right, node, level):
    """Check it with `right` accepted drafts of each chain. node, level: what verifying and drafting one more costs."""

    def cost(plan: Plan) -> float:
        return 1.0 + node * (plan.nodes - 1) + level * plan.levels

    drafter, written = begun(Timed(Chains(), small, cost)), 0
    while written < 200:
        tree = drafter.propose(NEWEST, None)
        path = list(range(1 + min(right, tree.tokens.shape[1] - 1)))
        drafter.observe([path], tree.tokens)
        drafter.observe_seconds(0.0)
        written += len(path)
    speed, best = written / drafter.spent, max((1 + min(plan.levels, right)) / cost(plan) for plan in drafter.plans)
    assert speed > (0.975 if best < 1.15 else 1 + 0.6 * (best - 1))  # and most of what can be gained is gained


def test_drafts_that_have_cost_too_much_pause_until_plain_steps_made_up_for_it(small):
    drafter = begun(Timed(Chains(), small, lambda plan: 1.0))
    drafter.best = drafter.plans[2]
    for lead, plan in ((0.0, drafter.best), (-BEHIND, drafter.best), (-BEHIND - 0.01, PLAIN)):
        drafter.lead = lead
        assert drafter.affordable == plan


def test_every_plan_is_a_part_of_the_next_one_and_a_gpu_captures_few_sizes(small):
    for tree in (itself(small, 8), DraftModel(small, small, nodes=32, depth=6, width=3)):
        plans = {device: plans_of(tree, torch.device(device)) for device in ("cpu", "cuda")}
        for sizes in plans.values():
            assert sizes == sorted(sizes) and sizes[-1] == Plan(tree.nodes, tree.depth)
            assert [plan.levels for plan in sizes] == sorted(plan.levels for plan in sizes)
        assert (
            {plan.nodes for plan in plans["cuda"][:-1]} <= {2, 4, 8, 16} < {plan.nodes for plan in plans["cpu"]} | {16}
        )


def test_auto_begins_plainly_then_drafts_little(small):
    nodes = nodes_of_steps(small, Timed(itself(small, 15), small, lambda plan: 1.0 + plan.nodes / 100), 30)
    assert nodes[:ENOUGH] == [1] * ENOUGH and nodes[ENOUGH] <= 3
    assert max(nodes[: 2 * ENOUGH]) < 16 and nodes[-5:].count(16) >= 4


@pytest.mark.parametrize(
    "kind, cost, nodes, share",
    [
        # Drafts cost more than they gain.
        pytest.param(
            "itself", lambda plan: 1.0 if plan == PLAIN else 6.0 * plan.nodes, 1, 0.98, marks=pytest.mark.nightly
        ),
        pytest.param("itself", lambda plan: 1.0 + 0.15 * plan.levels, 5, 0.9, marks=pytest.mark.nightly),
        ("short", lambda plan: 1.0 + 0.3 * plan.levels, 3, 0.9),  # no deeper than drafts are right
    ],
)
def test_auto_drafts_where_and_as_deep_as_it_pays(small, kind, cost, nodes, share):
    inner = itself(small) if kind == "itself" else Short(small, small, nodes=9, depth=8, width=1, min_probability=0)
    assert nodes_of_steps(small, Timed(inner, small, cost), 300)[-100:].count(nodes) >= 100 * share


def test_a_machine_that_grows_slower_is_no_reason_to_change_the_tree(small):
    slower = [1.0]
    drafter = Timed(itself(small), small, lambda plan: slower[0] * (1.0 + 0.1 * plan.levels))
    nodes_of_steps(small, drafter, 60)
    slower[0] = 6.0  # five tokens in 8.4 would be less than one in a plain step of before
    assert nodes_of_steps(small, drafter, 60).count(5) >= 45


def test_a_machine_that_grows_faster_is_noticed_while_drafts_are_in_use(small):
    """Expect plain steps soon. Few are timed while drafts are in use, and old ones would make drafts look cheap."""
    plain = 2.5

    def cost(plan: Plan) -> float:
        return plain if plan == PLAIN else 1.3 + 0.25 * (plan.nodes - 1)

    drafter, chance, nodes = begun(Timed(Chains(), small, cost)), random.Random(0), list[int]()
    for step in range(600):
        plain = 2.5 if step < 300 else 1.0  # another program has ended
        tree = drafter.propose(NEWEST, None)
        nodes.append(tree.tokens.shape[1])
        path = [0]
        while len(path) < nodes[-1] and chance.random() < (0.3 if path == [0] else 0.8):
            path.append(len(path))
        drafter.observe([path], tree.tokens)
        drafter.observe_seconds(0.0)
    drafted = [count > 1 for count in nodes]
    assert sum(drafted[200:300]) > 80 and sum(drafted[400:]) < 20


def test_what_is_seen_of_a_large_tree_is_known_of_smaller_ones():
    """Check it with ranks 0, 3 and 5: two nodes hold the first, six the first two, eight all three."""
    plans = [Plan(2, 1), Plan(6, 2), Plan(8, 3), Plan(16, 3)]
    hits = Hits(plans)
    for _ in range(100):
        hits.add(Plan(8, 3), [0, 3, 5])
    first, second, third, larger = hits.gains()
    assert (first, second, third) == pytest.approx((2, 3, 4), abs=0.2) and larger == pytest.approx(third)
    assert hits.tried[3] == [0, 0, 0] and hits.gains(1.0)[3] >= larger


def test_a_plan_that_was_never_seen_is_taken_for_the_smaller_one():
    hits = Hits([Plan(2, 1), Plan(4, 3)])
    assert hits.gains() == pytest.approx([1 + CHANCE, 1 + CHANCE + CHANCE**2 + CHANCE**3])
    hits.add(Plan(2, 1), [0])
    chance = (1 + WEIGHT * CHANCE) / (1 + WEIGHT)
    assert hits.gains() == pytest.approx([1 + chance, 1 + chance + chance**2 + chance**3])


def test_seconds_between_measured_sizes_are_interpolated():
    costs = Costs(node=0.1, levels={2: 1, 4: 3, 8: 7, 16: 15})

    def add(arm: str, nodes: int, *seconds: float) -> None:
        for second in seconds:
            costs.add(arm, nodes, second)

    add("head", 1, 2.0, 2.0, 2.0)
    assert costs.seconds("suffix", 4) == pytest.approx(2.0 * 1.3)  # what is typical: of three more nodes
    assert costs.seconds("head", 4) == pytest.approx(2.0 * 1.6)  # and of three levels
    add("head", 2, 90.0)  # the first step of a size may have made something once for it
    assert costs.seconds("head", 2) == pytest.approx(2 * 2.0 * 1.2)
    add("head", 2, 5.2, 5.2, 5.2)
    assert costs.seconds("head", 2) == 5.2  # of which 2.2 are for verifying, so that drafting a level takes 3
    assert costs.seconds("head", 4) == pytest.approx(2.6 + 3 * 3.0)
    add("head", 8, *[9.2] * ENOUGH, 100.0)  # the slow step was another program's
    assert costs.seconds("head", 4) == pytest.approx(5.2 + 2 * 4.0 / 6) and costs.seconds("head", 8) == 9.2
    assert costs.seconds("head", 15) == pytest.approx(9.2 + 7 * 7.2 / 7)  # beyond them a node costs what it cost so far
    assert costs.seconds("suffix", 4) == pytest.approx(2.0 * 1.3)
    add("suffix", 4, *[1.5] * ENOUGH)
    assert costs.seconds("suffix", 4) == 2.0  # no less than a step without drafts


def kept(small: Target) -> Timed:
    drafter = Timed(itself(small), small, lambda plan: 1.0)
    drafter.memory.keep({"drafter": "itself"})
    return drafter


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path))
    monkeypatch.setenv("FOREDRAFT_REMEMBER", "1")
    return tmp_path / "drafting"


def test_the_next_run_starts_from_what_the_last_one_learned(small, cache):
    first = kept(small)
    before = nodes_of_steps(small, first, 60)
    assert before[:ENOUGH] == [1] * ENOUGH
    first.memory.file()
    (file,) = cache.iterdir()
    assert file.stat().st_size < 4000
    then = kept(small)
    assert then.memory.hits[False].gains() == pytest.approx(first.memory.hits[False].gains(), abs=0.2)
    assert then.memory.costs[Case(1, False)].seconds("head", 5) == pytest.approx(1.0)
    assert nodes_of_steps(small, then, 5) == [5] * 5


def test_a_file_that_is_damaged_or_of_something_else_is_ignored(small, cache):
    drafter = kept(small)
    nodes_of_steps(small, drafter, 60)
    drafter.memory.file()
    (file,) = cache.iterdir()
    whole = file.read_text()
    about, costs, hits, seconds = (json.loads(whole) for _ in range(4))
    about["about"]["drafter"] = "another"
    costs["measured"]["costs"] = [[1, False, {"head": "no"}]]
    hits["measured"]["hits"]["True"] = [[1, 2], [3]]
    seconds["measured"]["costs"][0][2]["head"] = [[1, -5.0]]
    changed = [json.dumps(one) for one in (about, costs, hits, seconds)]
    for text in ("", "{", "[]", "null", '{"about": 1}', *changed):
        file.write_text(text)
        assert nodes_of_steps(small, kept(small), 5)[:ENOUGH] == [1] * ENOUGH, text
    file.write_text(whole)
    assert nodes_of_steps(small, kept(small), 5) == [5] * 5


@pytest.mark.parametrize("remember", [True, False])
def test_a_loaded_drafter_writes_what_it_learned_when_it_goes(target, tiny_path, cache, monkeypatch, remember):
    monkeypatch.setenv("FOREDRAFT_REMEMBER", str(int(remember)))
    drafter = load_drafter(f"draft:{tiny_path}", target)
    for _ in range(ENOUGH):
        drafter.memory.costs_of(Case(1, True)).add("head", 1, 1.0)
    del drafter
    assert len(list(cache.iterdir()) if cache.exists() else []) == remember


def test_processes_that_write_at_once_leave_one_whole_file(small, cache):
    drafter = kept(small)
    nodes_of_steps(small, drafter, 20)
    drafter.memory.file()
    (file,) = cache.iterdir()
    code = f"""
import json, pathlib
from foredraft.inference.drafters.measurements import Costs, write
file = pathlib.Path({str(file)!r})
about = json.loads(file.read_text())["about"]
costs = Costs(0.1, {{}})
for _ in range(3): costs.add("head", 1, 1.0)
for _ in range(100):
    write(about, {{(1, True): costs}}, {{}}, [])
    json.loads(file.read_text())
"""
    started = [start(sys.executable, "-c", code, cwd=ROOT) for _ in range(2)]
    assert [end(process).code for process in started] == [0, 0]
    assert list(cache.iterdir()) == [file]


def test_seconds_are_those_of_decoding_steps_alone(small, monkeypatch):
    """Check that no prefill chunk, no step of another engine and no step that captures is among them."""
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


def switching(inner, target: Target, suffix: SuffixDrafter) -> Timed:
    drafter = Timed(inner, target, lambda plan: 1 + plan.nodes / 100)
    drafter.add_suffix(suffix)
    return drafter


@pytest.mark.parametrize("head_is_right", [True, False])
def test_the_suffix_or_the_head_is_used_by_what_each_promises(small, head_is_right):
    """Check a prompt whose greedy continuation has been seen: suffixes are right, and as cheap as a step without drafts."""
    inner = itself(small) if head_is_right else Useless([-1, -1])
    drafter = switching(inner, small, SuffixDrafter(longest=24, nodes=12))
    ids = torch.tensor([prompt(9)])
    text = generate(small, None, ids, max_new_tokens=101, eos_token_id=-1).sequences
    chosen = []
    for _ in range(8):
        out = generate(small, drafter, ids, max_new_tokens=101, eos_token_id=-1)
        assert torch.equal(out.sequences, text)  # past outputs are remembered, so the second time all is known
        chosen.append(out.acceptance_length)
    assert chosen[-1] > 6 > 5 >= chosen[0]  # eleven drafts by the suffix, four by the head
    assert drafter.memory.suffix[1] / drafter.memory.suffix[0] > 0.9


def test_wrong_suffixes_give_way_to_the_head(small):
    class Liar(SuffixDrafter):
        """Draft a token that never comes, and be sure of it."""

        def draft(self, slot: int, text: list[int]) -> tuple[list[tuple[int, int]], float]:
            return [(-1, 0)] * 4, 3.0

    drafter, ids = switching(itself(small), small, Liar()), torch.tensor([prompt(9)])
    steps = [
        step for _ in range(4) for step in generate(small, drafter, ids, max_new_tokens=101, eos_token_id=-1).steps
    ]
    assert any(step.accepted == [0] and step.nodes == 5 for step in steps[:20])  # it was tried
    assert [step.accepted for step in steps[-10:-1]].count([4]) >= 8
