"""The classical verification rules of the papers, as a reference beside the coupled verifier (inference/verify.py).

p is the target's distribution after the warpers, q the distribution that a draft token was really drawn from. A rule
walks down from node 0, keeps the children that it accepts, and draws one more token from what p has left:

    for each child x of the node:  accept? -> go down to it
                                   reject  -> p <- what p has left once x has had its chance
    no child accepted:             next_token ~ p        (a recovery, or the bonus token where there was no child)

Every rule has one signature; `PublishedRule` makes a verifier of it, which an engine takes:

    rule(tokens, parents, p, q, draw, **options) -> Accepted
    tokens   (nodes,) int64         node 0 is the bonus token, which is not verified; siblings stand in draw order
    parents  (nodes,) int64         parents[0] == -1 and a parent comes before its children
    p        (nodes, vocab) float   the target's distribution of the token after each node, float32 or float64
    q        (nodes, vocab) float   the distribution that the node's children were drawn from; rows of leaves are not read
    draw     weights -> index       the only randomness: weights is (k,) and non-negative, not always normalised

`draw` also tosses the accept coin (index 0 = accept), so tests enumerate this very code exactly. A sampler for use:
`lambda weights: int(torch.multinomial(weights, 1, generator=generator))`. These are reference rules: plain Python, one
host synchronisation per node.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from foredraft.inference.tree import TokenTree
from foredraft.inference.verify import Verification

Draw = Callable[[Tensor], int]


class Accepted(NamedTuple):
    path: list[int]  # accepted nodes from node 0 down, each the parent of the following one
    next_token: int  # what follows the last node of the path


def chain_tokenwise(tokens: Tensor, parents: Tensor, p: Tensor, q: Tensor, draw: Draw) -> Accepted:
    """Accept each token x of a sampled chain with probability min(1, p(x) / q(x)); recover from norm([p - q]+).

    Source: Leviathan et al. 2211.17192, algorithm 1; Chen et al. 2302.01318, algorithm 2. Lossless.
    Raises ValueError where the tree branches, or a token has q(x) = 0 (it was not drawn from q).
    """
    _check(tokens, parents, p, q)
    _check_chain(parents)
    return _ratio_walk(tokens, parents, p, q, draw, replacement=True)


def chain_block(tokens: Tensor, parents: Tensor, p: Tensor, q: Tensor, draw: Draw) -> Accepted:
    """Verify a sampled chain as one block: a lucky token pays for a later unlucky one.

    Source: Sun et al. 2403.10444 (ICLR 2025), algorithm 2. Lossless; never accepts fewer tokens in expectation than
    `chain_tokenwise`. Raises ValueError like it.
    """
    _check(tokens, parents, p, q)
    _check_chain(parents)
    depth, ids = len(tokens) - 1, tokens.tolist()
    keep = [p.new_ones(())]  # keep[d]: probability that at least the first d tokens survive, given the draft up to d
    for node, token in enumerate(ids[1:]):
        keep.append((keep[node] * _ratio(p[node], q[node], token, node)).clamp(max=1))
    # The paper tosses a coin per depth and keeps the deepest success. The coins are independent, so starting at the
    # deepest and stopping at the first success is the same distribution.
    for node in range(depth, -1, -1):
        if node == depth:
            accept, left = keep[node], p[node]
        else:
            left = (keep[node] * p[node] - q[node]).clamp(min=0)
            here, above = left.sum(), 1 - keep[node]  # probabilities of stopping at this depth and above it
            # here + above = 0 means that a deeper coin could not have failed: only rounding led here, so stop. The
            # bonus token has above = 0 exactly, hence it always accepts.
            accept = here / (here + above) if here + above > 0 else torch.ones_like(here)
            left = left if here > 0 else p[node]
        if _accepts(accept, draw):
            return Accepted(list(range(node + 1)), int(draw(left)))
    raise AssertionError("node 0 of a block accepts with probability 1")


def tree_with_replacement(tokens: Tensor, parents: Tensor, p: Tensor, q: Tensor, draw: Draw) -> Accepted:
    """Siblings drawn independently from q: the ratio test on each in turn, p <- norm([p - q]+) after a rejection.

    Source: SpecInfer, Miao et al. 2305.09781, algorithm 2 (multi-step speculative sampling; its random order of the
    siblings changes nothing where all are drawn from one q). Lossless. Raises ValueError on a token with q(x) = 0.
    """
    _check(tokens, parents, p, q)
    return _ratio_walk(tokens, parents, p, q, draw, replacement=True)


def tree_without_replacement(tokens: Tensor, parents: Tensor, p: Tensor, q: Tensor, draw: Draw) -> Accepted:
    """Siblings drawn from q without replacement: as with replacement, and each drawn token is struck out of q.

    Source: EAGLE-1, Li et al. 2401.15077 (multi-round speculative sampling); Sequoia, Chen et al. 2402.12374, section
    3.2. Lossless only where the siblings really were drawn one after the other, as in `torch.multinomial` or in
    Gumbel top-k kept in the order of the noisy scores; a plain top-k belongs to `tree_deterministic`.
    Raises ValueError on a token that q, without its elder siblings, gives probability 0.
    """
    _check(tokens, parents, p, q)
    return _ratio_walk(tokens, parents, p, q, draw, replacement=False)


def tree_deterministic(tokens: Tensor, parents: Tensor, p: Tensor, q: Tensor | None, draw: Draw) -> Accepted:
    """Children chosen without chance (top-k, argmax, n-gram): accept x with probability p(x), else strike it out of p.

    The same distribution as drawing from p and following the child that matches, hence lossless for any tree. q is not
    read. Source: the released code of EAGLE-2 and EAGLE-3 (2406.16858, 2503.01840), where q is one-hot.
    """
    _check(tokens, parents, p, None)
    path, ids, children = [0], tokens.tolist(), _children(parents)
    while True:
        left = p[path[-1]]
        for child in children[path[-1]]:
            others = _strike(left, ids[child])
            # Weights instead of [p(x), 1 - p(x)]: a rejection then needs others.sum() > 0, so there is always
            # something left to draw from, whatever the rounding.
            if draw(torch.stack([left[ids[child]], others.sum()])) == 0:
                path.append(child)
                break
            left = others
        else:
            return Accepted(path, int(draw(left)))


def typical(
    tokens: Tensor,
    parents: Tensor,
    p: Tensor,
    q: Tensor | None,
    draw: Draw,
    *,
    eps: float = 0.09,
    delta: float = 0.3,
) -> Accepted:
    """LOSSY. Accept every child with p(x) > min(eps, delta * exp(-entropy(p))); the deepest accepted node wins.

    The output does not have the target's distribution. Among nodes of one depth the path likelier under the target wins. The
    next token is the target's argmax; q and draw are not read.
    Source: Medusa, Cai et al. 2401.10774, section 2.3.1, which decodes the first token of a step greedily, and its code
    (`evaluate_posterior`; there the entropy has 1e-5 inside the logarithm).
    """
    _check(tokens, parents, p, None)
    threshold = (delta * torch.exp(-torch.special.entr(p).sum(-1))).clamp(max=eps)
    ancestors = parents.tolist()
    rank = {0: (0, 0.0)}  # accepted node: (its depth, log-likelihood of its path)
    for node, token in enumerate(tokens.tolist()):
        parent = ancestors[node]
        if parent in rank and p[parent, token] > threshold[parent]:
            rank[node] = (rank[parent][0] + 1, rank[parent][1] + p[parent, token].log().item())
    path = [max(rank, key=rank.__getitem__)]
    while path[0] != 0:
        path.insert(0, ancestors[path[0]])
    return Accepted(path, int(p[path[-1]].argmax()))


RULES: dict[str, Callable[..., Accepted]] = {
    "chain_tokenwise": chain_tokenwise,
    "chain_block": chain_block,
    "tree_with_replacement": tree_with_replacement,
    "tree_without_replacement": tree_without_replacement,
    "tree_deterministic": tree_deterministic,
    "typical": typical,
}


class PublishedRule:
    """A rule that does not read q as a verifier: its draws are its own, not keyed by position, so a text depends on the
    drafter and equals the target's in distribution only."""

    noisy = False

    def __init__(self, name: str, seed: int = 0):
        self.rule, self.generator = RULES[name], torch.Generator().manual_seed(seed)

    def __call__(self, tree: TokenTree, logits: Tensor, sampled: Tensor | None, depth: int) -> Verification:
        choices = logits.argmax(-1)
        p = logits.double().softmax(-1)
        if sampled is None:
            p = torch.nn.functional.one_hot(choices, logits.shape[-1]).double()
        counts, paths, tokens = [], [], []
        for row in range(len(p)):
            path, last = self.judge(tree, row, p[row])
            rest = [0] * (depth + 1 - len(path))
            counts.append(len(path))
            paths.append(path + rest)
            tokens.append([*tree.tokens[row, path[1:]].tolist(), last, *rest])
        return Verification(torch.tensor(counts), torch.tensor(paths), torch.tensor(tokens), choices)

    def judge(self, tree: TokenTree, row: int, p: Tensor) -> Accepted:
        """Of one sequence. Padding (token -1) is not shown to the rule."""
        real = [node for node, token in enumerate(tree.tokens[row].tolist()) if node == 0 or token >= 0]
        position = {node: number for number, node in enumerate(real)}
        parents = [-1] + [position[parent] for parent in tree.parents[row, real[1:]].tolist()]
        tokens = tree.tokens[row, real]
        draw = lambda weights: int(torch.multinomial(weights, 1, generator=self.generator))  # noqa: E731
        path, last = self.rule(tokens, tokens.new_tensor(parents), p[real], None, draw)
        return Accepted([real[node] for node in path], last)


def _ratio_walk(tokens: Tensor, parents: Tensor, p: Tensor, q: Tensor, draw: Draw, replacement: bool) -> Accepted:
    """The rule of Leviathan at every node, siblings in turn."""
    path, ids, children = [0], tokens.tolist(), _children(parents)
    while True:
        node = path[-1]
        p_left, q_left = p[node], q[node]
        for child in children[node]:
            token = ids[child]
            if _accepts(_ratio(p_left, q_left, token, node).clamp(max=1), draw):
                path.append(child)
                break
            p_left = _residual(p_left, q_left)
            if not replacement:
                q_left = _strike(q_left, token)
                # Once q is used up it stays 0, not NaN, and a further sibling is refused by _ratio.
                q_left = q_left / q_left.sum().clamp(min=torch.finfo(q.dtype).tiny)
        else:
            return Accepted(path, int(draw(p_left)))


def _accepts(probability: Tensor, draw: Draw) -> bool:
    return draw(torch.stack([probability, 1 - probability])) == 0


def _ratio(p: Tensor, q: Tensor, token: int, node: int) -> Tensor:
    """p(token) / q(token), shape (), for a child of node; p and q (vocab,). Raises ValueError where q(token) = 0."""
    if not q[token] > 0:  # also true of NaN
        raise ValueError(
            f"token {token} below node {node} has q = {q[token].item()}: q must be the distribution it was drawn from; "
            "for tokens chosen without chance use tree_deterministic"
        )
    return p[token] / q[token]


def _residual(p: Tensor, q: Tensor) -> Tensor:
    """norm([p - q]+), p and q (vocab,)."""
    left = (p - q).clamp(min=0)
    total = left.sum()
    # Both sum to 1, so nothing is left only where p == q up to rounding. A rejection then had a probability of that
    # order, and p itself is as right an answer as any; dividing by the zero would make NaN.
    return left / total if total > 0 else p


def _strike(distribution: Tensor, token: int) -> Tensor:
    """distribution (vocab,) without token, not normalised."""
    left = distribution.clone()
    left[token] = 0
    return left


def _children(parents: Tensor) -> list[list[int]]:
    """Node -> its children in draw order."""
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents.tolist()[1:], start=1):
        children[parent].append(node)
    return children


def _check(tokens: Tensor, parents: Tensor, p: Tensor, q: Tensor | None) -> None:
    """Raise ValueError where the arguments are no tree or do not fit together."""
    nodes = len(tokens)
    if nodes == 0 or tokens.shape != (nodes,) or parents.shape != (nodes,):
        raise ValueError(f"tokens and parents must be (nodes,), got {tuple(tokens.shape)}, {tuple(parents.shape)}")
    order = torch.arange(nodes, device=parents.device)
    if parents[0] != -1 or (parents[1:] < 0).any() or (parents >= order).any():
        raise ValueError(f"parents must start with -1 and precede their children, got {parents.tolist()}")
    for name, distribution in (("p", p), ("q", q)):
        if distribution is None:
            continue
        if distribution.shape != (nodes, p.shape[-1]):
            raise ValueError(f"{name} must be ({nodes}, vocab) like p and tokens, got {tuple(distribution.shape)}")
        if distribution.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"{name} must be float32 or float64, got {distribution.dtype}: half precision loses the residual"
            )
    drafted, vocab = tokens[1:], p.shape[-1]
    if ((drafted < 0) | (drafted >= vocab)).any():  # a padding of -1 would silently read the last token's probability
        raise ValueError(f"drafted tokens must lie in [0, {vocab}), got {drafted.tolist()}")


def _check_chain(parents: Tensor) -> None:
    if parents.tolist() != list(range(-1, len(parents) - 1)):
        raise ValueError(f"this rule verifies a chain, parents -1, 0, 1, ..., got a tree: parents {parents.tolist()}")
