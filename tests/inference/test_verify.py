"""The verifier over every small tree and every choice of the target's."""

import itertools
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from foredraft.inference.tree import TokenTree, chain, from_parents, pad_nodes
from foredraft.inference.verify import Outcome, Validity, Verification, argmax, to_host, validity, verify


class Cases(NamedTuple):
    """List every tree of a shape with tokens -1 (padding), 0 and 1, together with every table of what a target of two tokens
    writes after each of the texts (), 0, 1, 00, 01, 10, 11: text i's successors are the texts 2 * i + 1 and 2 * i + 2."""

    tree: TokenTree
    choices: Tensor  # (cases, nodes): the table's token after each node
    plain: Tensor  # (cases, 3): the text that the table gives without drafts
    counts: Tensor  # (cases,): node 0 and how many drafts continue that text


def every_case(parents: list[int]) -> Cases:
    drafts = torch.tensor(list(itertools.product((-1, 0, 1), repeat=len(parents) - 1)))
    tables = torch.tensor(list(itertools.product((0, 1), repeat=7)))
    tables, drafts = tables.repeat(len(drafts), 1), drafts.repeat_interleave(len(tables), 0)
    tree = from_parents(torch.cat([drafts[:, :1] * 0, drafts], 1), torch.tensor([parents] * len(drafts)), 2)
    texts, plain = [torch.zeros(len(drafts), dtype=torch.int64)], [torch.zeros(len(drafts), dtype=torch.int64)]
    depths = [0]
    for node, parent in enumerate(parents[1:], start=1):
        above, token = texts[parent], tree.tokens[:, node]
        texts.append(torch.where((above < 0) | (token < 0), -1, 2 * above + 1 + token))
        depths.append(depths[parent] + 1)
    for _ in range(3):
        plain.append(2 * plain[-1] + 1 + tables.gather(1, plain[-1][:, None])[:, 0])
    at, along = torch.stack(texts, 1), torch.stack(plain, 1)
    depth = torch.tensor(depths).expand_as(at)
    counts = 1 + (depth * (at == along.gather(1, depth))).amax(1)
    return Cases(tree, tables.gather(1, at.clamp(min=0)), (along[:, 1:] - 1) % 2, counts)


def differs(found: Verification, cases: Cases) -> Tensor:
    """Return (cases,): does the new text, as far as it goes, differ from the baseline's?"""
    new = torch.arange(3) < found.counts[:, None]
    return ((found.tokens != cases.plain) & new).any(1)


@pytest.mark.parametrize("parents", [[0, 0, 1], [0, 0, 0], [0, 0, 0, 1, 1], [0, 0, 0, 2, 1], [0, 0, 1, 1, 0]])
def test_whatever_is_drafted_the_text_is_the_targets_and_all_that_fits_is_accepted(parents):
    cases = every_case(parents)
    logits = torch.nn.functional.one_hot(cases.choices, 2).float()
    found = verify(cases.tree, logits, 2)
    assert not differs(found, cases).any() and torch.equal(found.counts, cases.counts)
    accepted = torch.arange(found.path.shape[1]) < found.counts[:, None]
    assert (cases.tree.tokens.gather(1, found.path)[accepted] >= 0).all()  # padding is never accepted
    # One that accepts the first draft whatever the target chooses, or the check would see nothing.
    drafted = cases.tree.tokens[:, 1]
    logits[:, 0] = torch.nn.functional.one_hot(torch.where(drafted >= 0, drafted, cases.choices[:, 0]), 2)
    assert differs(verify(cases.tree, logits, 2), cases).any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_argmax_is_that_of_the_numbers_as_they_are(dtype: torch.dtype):
    """Expect the first of equal ones; of nearly equal ones, the larger in their own precision; a NaN before all."""
    above = torch.tensor(1.0, dtype=dtype).nextafter(torch.tensor(2.0, dtype=dtype)).item()
    rows = [[1.0, above, above, 0.0], [above, 1.0, 1.0, above], [2.0, 1.0, float("nan"), 3.0]]
    assert argmax(torch.tensor(rows, dtype=dtype)).tolist() == [1, 0, 2]


@pytest.mark.parametrize("node", range(4))
def test_one_node_without_a_choice_is_enough(node: int):
    """Expect the same of the first, the middle and the last accepted node; the fourth one is rejected."""
    tree = chain(torch.tensor([[7, 1, 2, 3]]))
    found = verify(tree, torch.nn.functional.one_hot(torch.tensor([[1, 2, 0, 0]]), 8).float(), 8)
    assert found.counts.tolist() == [3]
    here, nowhere = torch.arange(4)[None] == node, torch.zeros(1, 4, dtype=torch.bool)
    accepted = node < 3
    assert validity(found, here).tolist() == [Validity.INVALID if accepted else Validity.REJECTED_NAN]
    assert validity(found, nowhere, here).tolist() == [Validity.TOO_FEW if accepted else Validity.VALID]
    assert validity(found, here, here).tolist() == [Validity.INVALID if accepted else Validity.REJECTED_NAN]


def test_the_host_gets_all_results() -> None:
    verification = Verification(
        torch.tensor([1, 3]), torch.tensor([[0, 3, 4], [0, 1, 2]]), torch.arange(6).view(2, 3), None
    )
    expected = Outcome([0, 2], [1, 3], [[0, 3, 4], [0, 1, 2]], [[0, 1, 2], [3, 4, 5]])
    assert to_host(verification, torch.tensor([0, 2])) == expected


def test_padding_of_a_tree_hangs_below_the_bonus_token():
    tree = chain(torch.tensor([[5, 6]]))
    assert pad_nodes(tree, 2) is tree
    padded = pad_nodes(tree, 4)
    assert [part.tolist() for part in (padded.tokens, padded.parents, padded.depths)] == [
        [[5, 6, -1, -1]],
        [[0, 0, 0, 0]],
        [[0, 1, 1, 1]],
    ]
    assert padded.ancestors.int().tolist() == [[[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1]]]
