"""The classical rules emit exactly the target's distribution, and what is known to be lossy is caught by the same check.

Everything here is enumerated: the drafter and the production rule draw through one `draw`, every outcome of every draw
is followed with its probability, and the emitted text (completed by the target where it is short) is compared with the
target's distribution over texts of a fixed length.
"""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from foredraft.inference.tree import from_parents
from foredraft.inference.verify import Coupled, TypicalAcceptance
from tests.support import acceptance_rules
from tests.support.acceptance_rules import RULES, Accepted, Draw, typical

VOCAB = 3
BONUS = -1  # the bonus token is not verified, so any value must do
EXACT, LOSSY = 1e-12, 1e-2


class Draft(NamedTuple):
    tokens: Tensor
    parents: Tensor
    p: Tensor
    q: Tensor


Drafter = Callable[["World", Draw], Draft]
Pick = Callable[[Tensor, int, Draw], list[int]]  # (q, width, draw) -> the children's tokens, in draw order


class Script:
    """A `draw` that replays choices, then takes the first possible one and notes down the others."""

    def __init__(self, choices: tuple[int, ...]):
        self.choices, self.taken, self.chance = choices, (), 1.0
        self.others: list[tuple[int, ...]] = []

    def __call__(self, weights: Tensor) -> int:
        assert weights.dim() == 1 and (weights >= 0).all() and weights.sum() > 0, f"not weights: {weights}"
        distribution = weights.double() / weights.double().sum()
        if len(self.taken) < len(self.choices):
            choice = self.choices[len(self.taken)]
        else:
            choice, *others = distribution.nonzero().flatten().tolist()
            self.others += [(*self.taken, other) for other in others]
        self.taken += (choice,)
        self.chance *= distribution[choice].item()
        return choice


def outcomes(run: Callable[[Draw], Any]) -> Iterator[tuple[float, Any]]:
    """Every outcome of `run(draw)` with its probability, depth first."""
    todo: list[tuple[int, ...]] = [()]
    while todo:
        script = Script(todo.pop())
        result = run(script)
        todo += script.others
        yield script.chance, result


def top_p(distribution: Tensor, share: float = 0.8) -> Tensor:
    ranked, order = distribution.sort(descending=True)
    kept = ranked.where(ranked.cumsum(-1) - ranked < share, 0.0)
    return torch.zeros_like(distribution).scatter(0, order, kept / kept.sum())


class World:
    """Random distributions of the token after every short text: raw and warped, of the target (p) and the drafter (q)."""

    def __init__(
        self, seed: int, warp: Callable[[Tensor], Tensor] = lambda distribution: distribution, gap: float = 1.0
    ):
        generator = torch.Generator().manual_seed(seed)
        texts = [text for length in range(5) for text in itertools.product(range(VOCAB), repeat=length)]
        noise = torch.randn(2, len(texts), VOCAB, generator=generator, dtype=torch.float64)
        raw_p, raw_q = (1.5 * noise[0]).softmax(-1), (1.5 * noise[0] + gap * noise[1]).softmax(-1)
        self.raw_p, self.raw_q = dict(zip(texts, raw_p)), dict(zip(texts, raw_q))
        self.p = {text: warp(distribution) for text, distribution in self.raw_p.items()}
        self.q = {text: warp(distribution) for text, distribution in self.raw_q.items()}

    def distribution(self, text: tuple[int, ...], length: int) -> Tensor:
        """The target's distribution of the `length` tokens after `text`, shape (VOCAB,) * length."""
        if length == 0:
            return torch.ones((), dtype=torch.float64)
        after = [self.distribution((*text, token), length - 1) for token in range(VOCAB)]
        return torch.stack([share * distribution for share, distribution in zip(self.p[text], after)])


def grow(world: World, draw: Draw, widths: tuple[int, ...], pick: Pick) -> Draft:
    """A tree, level by level: every node of depth d gets up to widths[d] children."""
    texts, parents, level = [()], [-1], [0]
    for width in widths:
        born = [(node, token) for node in level for token in pick(world.q[texts[node]], width, draw)]
        level = list(range(len(texts), len(texts) + len(born)))
        texts += [(*texts[node], token) for node, token in born]
        parents += [node for node, _ in born]
    tokens = [text[-1] if text else BONUS for text in texts]
    distributions = (torch.stack([table[text] for text in texts]) for table in (world.p, world.q))
    return Draft(torch.tensor(tokens), torch.tensor(parents), *distributions)


def independent(q: Tensor, width: int, draw: Draw) -> list[int]:
    return [draw(q) for _ in range(width)]


def distinct(q: Tensor, width: int, draw: Draw) -> list[int]:
    drawn: list[int] = []
    while len(drawn) < min(width, int((q > 0).sum())):  # a warped q can run out of tokens
        drawn.append(draw(q.index_fill(0, torch.tensor(drawn, dtype=torch.int64), 0.0)))
    return drawn


def top(q: Tensor, width: int, draw: Draw) -> list[int]:
    return q.topk(width).indices.tolist()


def confident(pick: Pick, q: Tensor, width: int, draw: Draw) -> list[int]:
    """Drop children to which the drafter itself gives little probability."""
    return [token for token in pick(q, width, draw) if q[token] > 0.3]


def drafter(pick: Pick, *widths: int) -> Drafter:
    return partial(grow, widths=widths, pick=pick)


def runs(world: World, draft_with: Drafter, rule: Callable[..., Accepted]) -> Iterator[tuple[float, Draft, Accepted]]:
    for drafted, draft in outcomes(partial(draft_with, world)):
        for verified, accepted in outcomes(partial(rule, *draft)):
            yield drafted * verified, draft, accepted


def distance(world: World, draft_with: Drafter, rule: Callable[..., Accepted], length: int) -> float:
    """Total variation between the emitted text's distribution and the target's, over `length` tokens."""
    wanted, emitted = world.distribution((), length), torch.zeros((VOCAB,) * length, dtype=torch.float64)
    for chance, draft, (path, next_token) in runs(world, draft_with, rule):
        assert draft.parents[path].tolist() == [-1, *path[:-1]], f"not a path from node 0: {path}"
        text = (*draft.tokens[path[1:]].tolist(), next_token)[:length]
        emitted[text] += chance * world.distribution(text, length - len(text))
    assert abs(emitted.sum() - 1) < EXACT
    return 0.5 * (emitted - wanted).abs().sum().item()


def mean_accepted(world: World, draft_with: Drafter, rule: Callable[..., Accepted]) -> float:
    return sum(chance * (len(accepted.path) - 1) for chance, _, accepted in runs(world, draft_with, rule))


WORLDS = {
    "dense": World(0),
    "top-p": World(0, warp=top_p),
    "far": World(1, gap=2.0),
    "near": World(2, gap=0.1),
    "equal": World(3, gap=0.0),
}


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)
@pytest.mark.parametrize(
    ("rule", "pick", "widths"),
    [
        (acceptance_rules.chain_tokenwise, independent, (1, 1, 1)),
        (acceptance_rules.chain_block, independent, (1, 1, 1)),
        (acceptance_rules.tree_with_replacement, independent, (2, 1)),
        (acceptance_rules.tree_with_replacement, independent, (3,)),
        (acceptance_rules.tree_without_replacement, distinct, (2, 2)),
        (acceptance_rules.tree_without_replacement, distinct, (3, 1)),
        (acceptance_rules.tree_deterministic, top, (2, 2)),
        (acceptance_rules.tree_deterministic, top, (3, 1)),
        (acceptance_rules.tree_deterministic, top, (1, 1, 1)),
        # It conditions on the tree, so whatever chance or choice made the tree is harmless.
        (acceptance_rules.tree_deterministic, partial(confident, top), (2, 2)),
        (acceptance_rules.tree_deterministic, partial(confident, independent), (2, 1)),
    ],
)
def test_emits_the_law_of_the_target(world, rule, pick, widths):
    assert distance(world, drafter(pick, *widths), rule, len(widths) + 1) < EXACT


def test_two_children_at_every_node_with_replacement():
    assert distance(WORLDS["dense"], drafter(independent, 2, 2), acceptance_rules.tree_with_replacement, 3) < EXACT


@pytest.mark.parametrize(
    "rule", [acceptance_rules.chain_tokenwise, acceptance_rules.chain_block, acceptance_rules.tree_deterministic]
)
def test_float32_laws_cost_no_more_than_their_rounding(rule):
    def single(world: World, draw: Draw) -> Draft:
        draft = grow(world, draw, (1, 1), independent)
        return draft._replace(p=draft.p.float(), q=draft.q.float())

    assert distance(WORLDS["near"], single, rule, 3) < 1e-6


# ---- Negative controls: each mistake has shipped somewhere, and the check above must see it.


def without_warpers(which: str, world: World, draw: Draw) -> Draft:
    """A chain drawn from the warped q, with raw ones where a mistake puts them: p for the bonus, or q in the ratio."""
    draft = grow(world, draw, (1, 1), independent)
    text = tuple(draft.tokens[1:].tolist())
    if which == "bonus":
        draft.p[-1] = world.raw_p[text]
    else:
        draft.q[:] = torch.stack([world.raw_q[text[:depth]] for depth in range(3)])
    return draft


def drawn_by_the_same_noise(x: int, q: Tensor, left: Tensor) -> Tensor:
    """Law of argmax(log left + G), given that G already made the draft x = argmax(log q + G); left[x] == 0.

    With exponential races E = exp(-G): x wins at the time t = E_x / q_x ~ Exp(1), every other E_i is q_i t + Exp(1),
    and the recovery is argmin E_i / left_i. Two tokens j, k can be left of three; j wins where
    left_k e_j - left_j e_k < t (q_k left_j - q_j left_k), a difference of exponentials against an exponential.
    """
    j, k = (token for token in range(VOCAB) if token != x)
    distribution, edge, a, b = torch.zeros_like(left), q[k] * left[j] - q[j] * left[k], left[k], left[j]
    if a == 0 or b == 0:
        return left  # one token is left, whatever the noise
    wins = 1 - a / (a + b) * a / (a + edge) if edge >= 0 else b / (a + b) * b / (b - edge)
    distribution[j], distribution[k] = wins, 1 - wins
    return distribution


def recovery_reusing_noise(tokens: Tensor, parents: Tensor, p: Tensor, q: Tensor, draw: Draw) -> Accepted:
    for node, x in enumerate(tokens[1:].tolist()):
        accept = (p[node, x] / q[node, x]).clamp(max=1)
        if draw(torch.stack([accept, 1 - accept])) == 1:
            left = (p[node] - q[node]).clamp(min=0)
            return Accepted(list(range(node + 1)), draw(drawn_by_the_same_noise(x, q[node], left)))
    return Accepted(list(range(len(tokens))), draw(p[-1]))


dropped = partial(confident, independent), partial(confident, distinct)
MISTAKES = {
    "argmax draft, softmax q": ("far", drafter(top, 1, 1), acceptance_rules.chain_tokenwise),
    "argmax draft, softmax q, block": ("far", drafter(top, 1, 1), acceptance_rules.chain_block),
    "top-k draft, softmax q": ("far", drafter(top, 2, 1), acceptance_rules.tree_without_replacement),
    "top-k draft, softmax q, with replacement": ("far", drafter(top, 2, 1), acceptance_rules.tree_with_replacement),
    "unlikely child dropped": ("far", drafter(dropped[0], 1, 1), acceptance_rules.chain_tokenwise),
    "unlikely child dropped, block": ("far", drafter(dropped[0], 1, 1), acceptance_rules.chain_block),
    "unlikely child dropped, tree": ("far", drafter(dropped[1], 2, 1), acceptance_rules.tree_without_replacement),
    "distinct children, judged as independent": (
        "far",
        drafter(distinct, 2, 1),
        acceptance_rules.tree_with_replacement,
    ),
    "recovery reuses the draft's noise": ("far", drafter(independent, 1, 1), recovery_reusing_noise),
    "bonus without warpers": ("top-p", partial(without_warpers, "bonus"), acceptance_rules.chain_tokenwise),
    "bonus without warpers, block": ("top-p", partial(without_warpers, "bonus"), acceptance_rules.chain_block),
    "top-p on p, not on the q of the ratio": (
        "top-p",
        partial(without_warpers, "ratio"),
        acceptance_rules.chain_tokenwise,
    ),
    "top-p on p, not on the q of the ratio, block": (
        "top-p",
        partial(without_warpers, "ratio"),
        acceptance_rules.chain_block,
    ),
    "typical acceptance": ("far", drafter(top, 2, 1), typical),
}


@pytest.mark.parametrize(("world", "draft_with", "rule"), MISTAKES.values(), ids=MISTAKES)
def test_the_check_catches_a_lossy_mistake(world, draft_with, rule):
    assert distance(WORLDS[world], draft_with, rule, 3) > LOSSY


def test_a_draft_law_left_unwarped_on_both_sides_is_no_mistake():
    """What matters is that the q of the ratio is the distribution drawn from, not that p and q share their warpers."""
    world = World(0, warp=top_p)
    world.q = world.raw_q
    assert distance(world, drafter(independent, 1, 1), acceptance_rules.chain_tokenwise, 3) < EXACT


def test_the_law_of_reused_noise_agrees_with_a_simulation():
    q, left = torch.tensor([0.5, 0.1, 0.4]), torch.tensor([0.0, 0.7, 0.3])
    noise = torch.empty(400_000, VOCAB).exponential_(generator=torch.Generator().manual_seed(0))
    recovered = (noise / left)[(noise / q).argmin(-1) == 0].argmin(-1)
    seen = recovered.bincount(minlength=VOCAB) / len(recovered)
    assert (seen - drawn_by_the_same_noise(0, q, left)).abs().max() < 5e-3


# ---- Acceptance


@pytest.mark.parametrize("seed", range(6))
def test_block_verification_accepts_no_fewer_tokens_than_tokenwise(seed):
    world, draft_with = World(seed), drafter(independent, 1, 1, 1)
    tokenwise = mean_accepted(world, draft_with, acceptance_rules.chain_tokenwise)
    assert mean_accepted(world, draft_with, acceptance_rules.chain_block) > tokenwise + 1e-3


def test_the_papers_example_of_block_verification():
    """Sun et al. 2403.10444, section 2: p = (1/3, 2/3), q = (2/3, 1/3), two tokens: 10/9 accepted, 11/9 as a block."""
    world = World(0)
    world.p = dict.fromkeys(world.p, torch.tensor([1.0, 2.0, 0.0], dtype=torch.float64) / 3)
    world.q = dict.fromkeys(world.q, torch.tensor([2.0, 1.0, 0.0], dtype=torch.float64) / 3)
    draft_with = drafter(independent, 1, 1)
    assert mean_accepted(world, draft_with, acceptance_rules.chain_tokenwise) == pytest.approx(10 / 9, abs=EXACT)
    assert mean_accepted(world, draft_with, acceptance_rules.chain_block) == pytest.approx(11 / 9, abs=EXACT)


def test_typical_takes_the_deepest_path_and_then_the_likelier():
    # node 0 -> 1 (token 0) -> 3 (token 2)
    #        -> 2 (token 1) -> 4 (token 2)    equally deep, and the first branch is likelier: 0.5 * 0.6
    p = torch.tensor([[0.5, 0.4, 0.1], [0.2, 0.2, 0.6], [0.2, 0.2, 0.6], [0.0, 1.0, 0.0], [0.0, 1.0, 0.0]])
    tokens, parents = torch.tensor([BONUS, 0, 1, 2, 2]), torch.tensor([-1, 0, 0, 1, 2])
    assert typical(tokens, parents, p, None, None) == ([0, 1, 3], 1)
    assert typical(tokens[:4], torch.tensor([-1, 0, 0, 2]), p[:4], None, None) == ([0, 2, 3], 1)
    # Thresholds: exp(-entropy) of the first distribution is about 0.39, so delta = 0.3 gives 0.117, above eps = 0.09.
    unlikely = torch.tensor([BONUS, 2]), torch.tensor([-1, 0]), p[:2], None, None  # p(2) = 0.1
    assert typical(*unlikely).path == [0, 1]
    assert typical(*unlikely, eps=0.11).path == [0]
    assert typical(*unlikely, eps=0.11, delta=0.2).path == [0, 1]


@pytest.mark.parametrize("seed", range(8))
def test_the_typical_verifier_accepts_what_the_reference_does(seed):
    """Over random trees with padding; greedy sequences beside sampled ones are the coupled verifier's."""
    draw = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(4, 9, 5, generator=draw)
    parents = torch.tensor([[0, *(int(torch.randint(0, n, (), generator=draw)) for n in range(1, 9))]] * 4)
    tokens = torch.randint(0, 5, (4, 9), generator=draw)
    tokens[:, 7:] = -1
    tree = from_parents(tokens, parents, 8)
    sampled = torch.tensor([[True], [True], [True], [False]])
    found = TypicalAcceptance(eps=0.2, delta=0.5)(tree, logits, sampled, 8)
    coupled = Coupled()(tree, logits, None, 8)
    for row in range(3):
        given = tokens[row, :7], torch.tensor([-1, *parents[row, 1:7].tolist()])  # without the padding
        path, last = typical(*given, logits[row, :7].softmax(-1), None, None, eps=0.2, delta=0.5)
        count = int(found.counts[row])
        assert found.path[row, :count].tolist() == path and found.tokens[row, count - 1] == last
    assert all(torch.equal(one[3], other[3]) for one, other in zip(found, coupled, strict=True))


# ---- Numerics and wrong arguments


def test_a_tree_of_the_bonus_token_alone_is_plain_sampling():
    world = WORLDS["dense"]
    for name in RULES.keys() - {"typical"}:
        assert distance(world, drafter(top), RULES[name], 1) < EXACT


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", sorted(RULES.keys() - {"typical"}))
@pytest.mark.parametrize("slack", [-4, 0, 4])
def test_laws_equal_up_to_rounding_give_weights_to_every_draw(name, dtype, slack):
    """A draw that rejects whenever it can leads into the all-zero residual; Script asserts on its weights."""

    def stubborn(weights: Tensor) -> int:
        Script(())(weights)
        return int(weights.nonzero()[-1])

    q = torch.tensor([0.5, 0.3, 0.2], dtype=dtype).expand(3, VOCAB)
    p = q * (1 + slack * torch.finfo(dtype).eps)
    accepted = RULES[name](torch.tensor([BONUS, 0, 1]), torch.tensor([-1, 0, 1]), p, q, stubborn)
    assert 0 <= accepted.next_token < VOCAB
    if name != "tree_deterministic" and slack >= 0:
        assert accepted.path == [0, 1, 2]


def test_wrong_arguments_are_named():
    tokens, parents, p, q = drafter(top, 2)(WORLDS["dense"], None)
    for rule in (acceptance_rules.chain_tokenwise, acceptance_rules.chain_block):
        with pytest.raises(ValueError, match=r"\[-1, 0, 0\]"):
            rule(tokens, parents, p, q, None)
    for wrong, message in [
        ((tokens, torch.tensor([-1, 2, 0]), p, q), r"\[-1, 2, 0\]"),
        ((tokens, torch.tensor([-1, 0, -1]), p, q), r"\[-1, 0, -1\]"),
        ((tokens, parents[:2], p, q), "parents"),
        ((tokens, parents, p[:2], q), "p must be"),
        ((tokens, parents, p, q[:, :2]), "q must be"),
        ((tokens, parents, p.half(), q), "float16"),
        ((torch.tensor([BONUS, 0, -1]), parents, p, q), r"\[0, -1\]"),
    ]:
        with pytest.raises(ValueError, match=message):
            acceptance_rules.tree_with_replacement(*wrong, None)


def test_a_token_that_cannot_have_been_drawn_is_an_error():
    tokens, parents = torch.tensor([BONUS, 0, 0]), torch.tensor([-1, 0, 0])
    p, q = torch.tensor([[0.0, 0.5, 0.5]] * 3), torch.tensor([[1.0, 0.0, 0.0]] * 3)  # p rejects token 0 for certain
    unlikely_q = torch.tensor([[0.0, 0.5, 0.5]] * 3)
    for rule in (
        acceptance_rules.chain_tokenwise,
        acceptance_rules.chain_block,
        acceptance_rules.tree_with_replacement,
        acceptance_rules.tree_without_replacement,
    ):
        with pytest.raises(ValueError, match=r"token 0 below node 0 has q = 0\.0.*tree_deterministic"):
            rule(tokens[:2], parents[:2], p[:2], unlikely_q[:2], Script(()))
    with pytest.raises(ValueError, match=r"token 0 below node 0 has q = 0\.0"):  # the same token twice, and q used up
        acceptance_rules.tree_without_replacement(tokens, parents, p, q, Script(()))
