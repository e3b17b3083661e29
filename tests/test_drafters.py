"""What every drafter promises: the target's own text, whatever it drafts; and what each of them drafts."""

import itertools
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaForCausalLM

from heads import Target
from heads.base import RecurrentHead
from heads.draft_model import DraftModelHead
from heads.eagle import EagleHead
from heads.eagle3 import Eagle3Head
from heads.hydra import HydraHead
from heads.medusa import MedusaHead
from heads.target.cache import KVCache
from inference import generate, load_drafter
from inference.drafters import (
    AdaptiveLength,
    AutoTree,
    Drafter,
    DraftModel,
    DynamicTree,
    Lookahead,
    NgramDrafter,
    StaticTree,
    SuffixDrafter,
    Union,
    auto,
    costs,
    drafter_for,
)
from inference.drafters.auto import FIRST, PLAIN, TIMED
from inference.drafters.base import Accepted, chains, root_only, trees
from inference.drafters.costs import CostModel, Costs, PaddedRoot
from inference.drafters.union import merge
from inference.evaluation.lossless import PaddedDrafter
from inference.sampling import Sampling, SamplingParams
from inference.tree import TokenTree
from tests.support.tiny import tiny_config

SETTINGS = {
    "greedy": {},
    "top-p": {"temperature": 1.0, "top_p": 0.9},
    "penalty": {"temperature": 1.0, "repetition_penalty": 1.3},
}


def random_model(seed: int, layers: int = 2, **changes) -> Target:
    torch.manual_seed(seed)
    return Target(LlamaForCausalLM(tiny_config(num_hidden_layers=layers, **changes)), None, f"random {seed}")


@pytest.fixture(scope="module")
def small() -> Target:
    return random_model(1)


def eagle(target: Target) -> DynamicTree:
    torch.manual_seed(2)
    return DynamicTree(
        Eagle3Head.for_target(target, depth=4).eval(), target, nodes=10, depth=4, width=3, min_probability=0
    )


def medusa(target: Target) -> StaticTree:
    return StaticTree(MedusaHead.for_target(target, depth=3).eval(), target, nodes=9)


DRAFTERS = {
    "ngram": lambda target: NgramDrafter(),
    "ngram, frequent": lambda target: NgramDrafter(match="frequent"),
    "suffix": lambda target: SuffixDrafter(),
    "lookahead": lambda target: Lookahead(),
    "lookahead of one column": lambda target: Lookahead(window=1, ngram=2, guesses=1),
    "draft model": lambda target: DraftModel(random_model(3), target, min_probability=0),
    "draft model, auto": lambda target: AutoTree(DraftModel(random_model(3), target, min_probability=0), target),
    "draft chain, adaptive": lambda target: AdaptiveLength(DraftModel(random_model(3), target, 6, 5, 1)),
    "head, adaptive": lambda target: AdaptiveLength(eagle(target), confidence=0.5),
    "several draft models": lambda target: Union(
        [DraftModel(random_model(seed), target, min_probability=0) for seed in (3, 1)]
    ),
    "ngram and heads": lambda target: Union([NgramDrafter(), eagle(target), medusa(target)]),
    "lookahead and suffix": lambda target: Union([Lookahead(), SuffixDrafter()]),
    "auto beside ngram": lambda target: Union([AutoTree(medusa(target), target), NgramDrafter()]),
}


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random tokens, said twice, so that there is something to look up."""
    half = torch.randint(1, 300, (length // 2,), generator=torch.Generator().manual_seed(seed)).tolist()
    return (half + half + [7])[:length]


def new_tokens(target: Target, drafter: Drafter | None, rows: list[list[int]], **settings) -> list[list[int]]:
    longest = max(map(len, rows))
    ids = torch.tensor([[5] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    return generate(target, drafter, ids, mask, **settings).new_tokens


@pytest.mark.parametrize("name", SETTINGS)
def test_every_drafter_writes_the_plain_text_alone_and_in_a_ragged_batch(small, name):
    rows = [prompt(length, seed) for seed, length in enumerate((3, 17, 1, 8))]
    settings = SETTINGS[name] | {"max_new_tokens": 32, "eos_token_id": -1}
    alone = [new_tokens(small, None, [row], seed=seed, **settings)[0] for seed, row in enumerate(rows)]
    ends = settings | {"eos_token_id": alone[1][9]}  # so that rows end at different times
    ended = new_tokens(small, None, rows, **ends)
    assert len({len(text) for text in ended}) > 1
    for who, build in DRAFTERS.items():
        drafter = build(small)
        assert new_tokens(small, drafter, [rows[1]], seed=1, **settings) == [alone[1]], who
        assert new_tokens(small, drafter, rows, **ends) == ended, who


def test_text_up_to_the_last_position_of_the_context_whatever_is_drafted(small):
    ids = torch.tensor([prompt(246)])
    plain = generate(small, None, ids, max_new_tokens=100, eos_token_id=-1).sequences
    assert plain.shape[1] == 256
    for who, build in DRAFTERS.items():
        assert torch.equal(generate(small, build(small), ids, max_new_tokens=100, eos_token_id=-1).sequences, plain), (
            who
        )
    big = DynamicTree(eagle(small).head, small, nodes=300, depth=4, width=12, min_probability=0)
    assert torch.equal(generate(small, big, ids, max_new_tokens=100, eos_token_id=-1).sequences, plain)


def accepted(*texts: list[int], width: int = 0) -> Accepted:
    """What a first step sees of these texts."""
    counts = [len(text) - 1 for text in texts]
    tokens = torch.zeros(len(texts), max(counts), dtype=torch.int64)
    for row, text in enumerate(texts):
        tokens[row, : len(text) - 1] = torch.tensor(text[1:])
    return Accepted(tokens, torch.zeros(*tokens.shape, width), counts, [list(text) for text in texts])


def begun(drafter: Drafter, batch: int = 1) -> Drafter:
    drafter.begin(batch, 100, Sampling.of([SamplingParams()] * batch, 1024))
    return drafter


def branches(tree, row: int = 0) -> set[tuple[int, ...]]:
    """The paths of all nodes below the root, as tokens."""
    found = set()
    for node in range(1, tree.tokens.shape[1]):
        if tree.tokens[row, node] >= 0:
            found.add(tuple(tree.tokens[row, tree.ancestors[row, node]].tolist()[1:]))
    return found


def test_an_ngram_goes_on_as_it_did_last_or_most_often():
    text = [9, 1, 2, 3, 9, 1, 2, 3, 9, 1, 2, 4, 8, 1, 2]
    for match, first in (("latest", 4), ("frequent", 3)):
        tree = begun(NgramDrafter(longest=2, depth=3, match=match)).propose(accepted(text), None)
        assert tree.tokens[0, :2].tolist() == [2, first]
    # the longest n-gram is asked first: what followed [9, 1] counts, not what followed [1]
    text = [9, 1, 5, 8, 1, 6, 9, 1]
    assert begun(NgramDrafter(longest=2, depth=1)).propose(accepted(text), None).tokens.tolist() == [[1, 5]]
    nothing = begun(NgramDrafter()).propose(accepted([1, 2, 3]), None)
    assert nothing.tokens.tolist() == [[3]]


def test_suffixes_draft_a_tree_of_what_followed_and_more_of_a_longer_match():
    text = [1, 2, 3, 4, 5, 1, 2, 3, 6, 7, 8, 1, 2, 3]
    tree = begun(SuffixDrafter(longest=6, nodes=16, per_match=2.0)).propose(accepted(text), None)
    found = branches(tree)
    assert {(4,), (6,), (4, 5), (6, 7)} <= found and tree.tokens.shape[1] == 7  # a match of three tokens, six drafts
    few = begun(SuffixDrafter(longest=6, nodes=16, per_match=0.67)).propose(accepted(text), None)
    assert branches(few) in ({(4,), (6,)}, {(4,), (4, 5)}, {(6,), (6, 7)})
    often = [1, 2, 1, 2, 1, 3, 1]
    first = begun(SuffixDrafter(per_match=1.0)).propose(accepted(often), None)
    assert branches(first) == {(2,)}


def test_suffixes_remember_past_outputs_but_not_past_prompts(small):
    drafter = SuffixDrafter()
    settings = {"max_new_tokens": 41, "eos_token_id": -1, "temperature": 1.0}
    ids = torch.tensor([prompt(9)])
    first, again = (generate(small, drafter, ids, **settings) for _ in range(2))
    assert again.new_tokens == first.new_tokens
    assert again.acceptance_length > 2 * first.acceptance_length
    begun(drafter)
    assert prompt(9)[0] not in drafter.past.children or prompt(9)[0] in first.new_tokens[0]
    forgetful = SuffixDrafter(past=0)
    generate(small, forgetful, ids, **settings)
    assert not begun(forgetful).past.children


def test_lookahead_learns_ngrams_that_the_target_wrote_and_drafts_them(small):
    drafter = begun(Lookahead(window=3, ngram=3, guesses=2))
    tree = drafter.propose(accepted([11, 12, 13, 14, 15, 16, 17]), None)
    assert tree.tokens.tolist() == [[17, 12, 13, 14, 15, 16, 17]]
    assert tree.depths.tolist() == [[0, 1, 2, 3, 2, 3, 4]]
    assert branches(tree) == {(12,), (12, 13), (12, 13, 14), (12, 15), (12, 13, 16), (12, 13, 14, 17)}
    # behind each column the target writes 21, 22, 23: its n-grams are (12, 15, 21), (13, 16, 22), (14, 17, 23)
    drafter.observe([[0]], torch.tensor([[18, 0, 0, 0, 21, 22, 23]]))
    tree = drafter.propose(accepted([17, 13]), None)
    assert tree.tokens[0, 1:7].tolist() == [15, 16, 17, 21, 22, 23]  # the rounds moved down
    assert tree.tokens[0, 7:].tolist() == [16, 22] and (16, 22) in branches(tree)
    # two tokens accepted: the window moves one column
    drafter.observe([[0, 1]], torch.tensor([[0, 0, 0, 0, 31, 32, 33, 0, 0]]))
    assert drafter.lines[0, :, :2].tolist() == [[22, 23], [32, 33]]


def test_lookahead_gains_where_the_text_repeats_itself():
    forgetful = random_model(1)
    for layer in forgetful.model.model.layers:  # what comes next depends on the last token alone: it runs in a circle
        layer.self_attn.o_proj.weight.data.zero_(), layer.mlp.down_proj.weight.data.zero_()
    out = generate(forgetful, Lookahead(), torch.tensor([prompt(9)]), max_new_tokens=100, eos_token_id=-1)
    assert len(set(out.new_tokens[0])) < 50 and out.acceptance_length > 2


def test_a_union_names_every_path_once_and_keeps_all_of_them():
    step = accepted([1, 2, 3], [4, 5, 6])
    one = chains(step, [[10, 11, 12], [20]])
    two = trees(step, [[(10, 0), (13, 1), (14, 0)], [(21, 0), (22, 1)]], depth=2)
    tree, (ours, theirs) = merge([one, two], depth=3)
    assert branches(tree, 0) == {(10,), (10, 11), (10, 11, 12), (10, 13), (14,)}
    assert branches(tree, 1) == {(20,), (21,), (21, 22)}
    assert tree.tokens.shape == (2, 6)  # the first row's nodes, (10,) counted once
    for row in range(2):
        for source, places in ((one, ours), (two, theirs)):
            for node, place in enumerate(places[row].tolist()):
                if source.tokens[row, node] >= 0:
                    assert tree.tokens[row, place] == source.tokens[row, node]


class OneBranch(Drafter):
    """Drafts the same tokens in every step and keeps what it observes."""

    def __init__(self, draft: list[int]):
        self.drafted, self.depth, self.nodes = draft, len(draft), len(draft) + 1
        self.observed: list = []

    def begin(self, batch: int, capacity: int, sampling: Sampling) -> None:
        pass

    def propose(self, step: Accepted, gumbel: Tensor | None):
        return chains(step, [self.drafted] * len(step.text))

    def observe(self, paths: list[list[int]], choices: Tensor) -> None:
        self.observed.append((paths, choices.tolist()))


def test_drafters_in_a_union_observe_their_own_nodes():
    one, two = OneBranch([10, 11]), OneBranch([10, 12, 13])
    both = begun(Union([one, two]))
    tree = both.propose(accepted([1, 2]), None)
    assert tree.tokens.tolist() == [[2, 10, 11, 12, 13]]
    both.observe([[0, 1, 3]], torch.tensor([[10, 12, 0, 14, 15]]))
    assert one.observed == [([[0, 1]], [[10, 12, 0]])]
    assert two.observed == [([[0, 1, 2]], [[10, 12, 14, 15]])]


def test_a_union_gives_each_drafter_the_features_it_asked_for():
    class Wants(OneBranch):
        def propose(self, step, gumbel):
            self.got = step.features
            return root_only(step)

    one, two, three = Wants([1]), Wants([1]), Wants([1])
    one.layers, two.layers = [1, 6], [3]
    both = begun(Union([one, two, three]))
    assert both.layers == [1, 3, 6]
    features = torch.tensor([1.0, 1, 3, 3, 6, 6]).expand(1, 1, -1)
    both.propose(accepted([1, 2])._replace(features=features), None)
    assert one.got.flatten().tolist() == [1, 1, 6, 6] and two.got.flatten().tolist() == [3, 3]
    assert three.got.shape == (1, 1, 0)


def test_a_union_accepts_at_least_what_each_accepts_alone(small):
    ids, settings = torch.tensor([prompt(17)]), {"max_new_tokens": 60, "eos_token_id": -1}
    alone = [
        DraftModel(random_model(seed), small, 5, 4, 1, min_probability=0) for seed in (1, 3)
    ]  # seed 1 is the target itself
    steps = generate(small, Union(alone[::-1]), ids, **settings).steps
    assert [step.accepted for step in steps[:-1]] == [[4]] * (len(steps) - 1)
    assert max(step.nodes for step in steps) <= 9


def test_adaptive_length_follows_what_was_accepted(small):
    itself = DraftModel(small, small, nodes=8, depth=7, width=1)
    drafter = AdaptiveLength(itself, confidence=0.0)
    drafter.levels = 1
    ids = torch.tensor([prompt(9)])
    out = generate(small, drafter, ids, max_new_tokens=40, eos_token_id=-1)
    assert [step.nodes for step in out.steps][:4] == [2, 4, 6, 8]
    stranger = AdaptiveLength(DraftModel(random_model(8), small, nodes=8, depth=7, width=1), confidence=0.0)
    out = generate(small, stranger, ids, max_new_tokens=20, eos_token_id=-1, temperature=1.0)
    nodes = [step.nodes for step in out.steps]
    assert nodes[0] == 8 and min(nodes) == 2 and all(a - b <= 1 for a, b in itertools.pairwise(nodes))


@torch.inference_mode()
def test_adaptive_length_stops_where_the_draft_is_not_sure(small):
    sure = AdaptiveLength(eagle(small), confidence=1e-6)
    unsure = AdaptiveLength(eagle(small), confidence=0.999)
    for drafter, levels in ((sure, 4), (unsure, 1)):
        begun(drafter)
        step = accepted([1, 2, 3], width=len(drafter.layers) * small.hidden_size)
        assert drafter.propose(step, None).depths.max() == levels


@torch.inference_mode()
def test_a_tree_stops_where_little_is_left_to_gain_in_any_row(small):
    head = eagle(small).head
    texts, features = [[1, 2, 3], [4, 5]], len(head.layers) * small.hidden_size
    for min_probability, levels in ((0.0, 4), (1.1, 1)):
        drafter = DynamicTree(head, small, nodes=10, depth=4, width=3, min_probability=min_probability)
        drafter.begin(2, 64, Sampling.of([SamplingParams()] * 2, 1024))
        assert drafter.propose(accepted(*texts, width=features), None).depths.max() == levels
    scores = []
    drafter = DynamicTree(head, small, nodes=10, depth=4, width=3)
    assert drafter.should_stop is not None
    for shares in ([[0.05, 0.04, 0.03], [0.3, 0.1, 0.1]], [[0.05, 0.04, 0.03], [0.1, 0.02, 0.02]]):
        scores.append(drafter.should_stop(torch.tensor(shares).log()))
    assert scores == [False, True]


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
    sizes: list[int] = []

    def padded(self: PaddedRoot, accepted: Accepted, gumbel: Tensor | None) -> TokenTree:
        lengths[self.depth > 0].append([len(text) for text in accepted.text])
        sizes.append(self.depth)
        return pad(self, accepted, gumbel)

    monkeypatch.setattr(PaddedRoot, "propose", padded)
    model = CostModel(eagle(target), target, text=100)
    fastest = costs.fastest

    def timed_sizes(given, prepare, work, device):
        def checked(size: int) -> None:
            prepare(size)
            assert sizes[-1] == size - 1  # a step of the same size goes before the one that is timed

        return fastest(given, checked, work, device)

    monkeypatch.setattr(costs, "fastest", timed_sizes)
    model.measure_read(2)
    assert all(length < context for rows in lengths.values() for row in rows for length in row)  # texts that go on
    if context < 100:
        return
    plain, trees = (torch.tensor(lengths[drafts], dtype=torch.float64) for drafts in (False, True))
    # Rows without drafts stay of one length, and those with trees do not.
    assert torch.equal(plain[:, 0], plain[:, 1]) and not torch.equal(trees[:, 0], trees[:, 1])
    assert all(abs(found.mean() - 100) <= 1.5 for found in (plain, trees))
    assert CostModel(eagle(target), target, text=120).read_facts() != model.read_facts()


def test_a_draft_is_timed_after_a_text_and_after_what_a_step_accepts(monkeypatch):
    target, seen, propose = random_model(1, max_position_embeddings=512), [], DynamicTree.propose
    read, reads = target.read, []

    def spied(self: DynamicTree, accepted: Accepted, gumbel: Tensor | None) -> TokenTree:
        seen.append((self.levels, accepted.tokens.shape, list(self.cache.lengths)))
        assert len(reads) == len(seen)  # the target, between two drafts
        return propose(self, accepted, gumbel)

    def spied_read(*args, **kwargs):
        reads.append(args)
        return read(*args, **kwargs)

    monkeypatch.setattr(DynamicTree, "propose", spied)
    monkeypatch.setattr(target, "read", spied_read)
    model = CostModel(eagle(target), target, text=100)
    for batch in (1, 2):
        seen.clear(), reads.clear()
        model.measure_draft(batch)
        assert {(levels, tuple(shape)) for levels, shape, _ in seen} == {
            (levels, (batch, 1 + (levels if batch > 1 else levels // 2))) for levels in range(1, model.levels + 1)
        }
        assert all(lengths == [100] * batch for *_, lengths in seen)


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
    assert costs.fastest([1, 2, 4], order.append, work, torch.device("cpu")) == [2.0, 3.0, 5.0]
    assert order == [1, 2, 4] * costs.REPEATS


def test_short_words_name_drafters(target, tiny_path):
    load = partial(load_drafter, target=target)
    assert isinstance(load("suffix", nodes=4), SuffixDrafter)
    union = load(f"lookahead+draft:{tiny_path}")
    assert isinstance(union, Union) and isinstance(union.drafters[1], DraftModel)  # of a fixed tree
    assert isinstance(load(f"draft:{tiny_path}"), AutoTree) and isinstance(
        load(f"draft:{tiny_path}", tree="fixed"), DraftModel
    )
    assert isinstance(load(f"draft:{tiny_path}", tree="adaptive", confidence=0.3), AdaptiveLength)
    assert isinstance(load(f"draft:{tiny_path}", tree="auto", nodes=4), AutoTree)


def test_bad_settings_are_named(target, tiny_path):
    draft = f"draft:{tiny_path}"
    for spec, options, message in (
        ("ngrams", {}, "'ngrams' is not one of"),
        ("ngram", {"longest": 0}, "longest=0"),
        ("ngram", {"match": "first"}, "match=first"),
        ("suffix", {"nodes": 1}, "nodes=1"),
        ("suffix", {"per_match": 0}, "per_match=0"),
        ("lookahead", {"window": 0}, "window=0"),
        ("lookahead", {"ngram": 1}, "ngram=1"),
        (draft, {"width": 0}, "width=0"),
        (draft, {"tree": "wide"}, "tree=wide"),
        (draft, {"confidence": 0.3}, "tree=adaptive"),
        (draft, {"tree": "adaptive", "confidence": 1.5}, r"confidence=1\.5"),
    ):
        with pytest.raises(ValueError, match=message):
            load_drafter(spec, target, **options)
    with pytest.raises(ValueError, match="random 9 knows 300 tokens"):
        DraftModel(random_model(9, vocab_size=300), target)
    with pytest.raises(ValueError, match="two drafters"):
        Union([NgramDrafter()])
    with pytest.raises(ValueError, match="nodes=1"):
        StaticTree(MedusaHead.for_target(target), target, nodes=1)
    with pytest.raises(ValueError, match="no adaptive length"):
        drafter_for(MedusaHead.for_target(target), target, tree="adaptive")


def test_a_padded_tree_has_the_rows_of_the_largest(small):
    """For lossless.py, which compares with plain decoding of as many rows a forward."""
    padded = PaddedDrafter(Union([eagle(small), NgramDrafter()]))
    out = generate(small, padded, torch.arange(1, 12)[None], max_new_tokens=20, eos_token_id=-1)
    assert {step.nodes for step in out.steps} == {padded.nodes}
    assert (
        out.new_tokens
        == generate(small, None, torch.arange(1, 12)[None], max_new_tokens=20, eos_token_id=-1).new_tokens
    )


class Largest(TorchDispatchMode):
    """The most elements of any tensor that is made inside."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return out


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "hydra++", "draft model"])
def test_a_prompt_is_read_without_a_mask_of_its_length_squared(target, kind):
    head: RecurrentHead = {
        "eagle": lambda: EagleHead.for_target(target),
        "eagle3": lambda: Eagle3Head.for_target(target),
        "hydra++": lambda: HydraHead.for_target(target, prefix=True),
        "draft model": lambda: DraftModelHead(target, target.vocab_size),
    }[kind]()
    length = 240
    tokens = torch.arange(length)[None] % target.vocab_size
    features = target.read(tokens, layers=head.layers).features
    inputs = features, head.embed(tokens, target)
    with torch.no_grad(), Largest() as whole:
        read = head.read_accepted(*inputs, KVCache(head.cache_layers, 1, length, "cpu"))
    assert whole.elements < length**2
    halves = KVCache(head.cache_layers, 1, length, "cpu")
    with torch.no_grad(), Largest() as masked:
        first = head.read_accepted(*(x[:, : length // 2] for x in inputs), halves)
        halves.set_lengths([length // 2])
        second = head.read_accepted(*(x[:, length // 2 :] for x in inputs), halves)
    torch.testing.assert_close(torch.cat([first, second], 1), read, atol=1e-4, rtol=1e-4)
    assert masked.elements >= (length // 2) * length  # the second half did need one
