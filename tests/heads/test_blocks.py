"""What heads that draft in blocks learn, from which blocks; and their trees. test_block_equations.py has the papers'
equations."""

import heapq
import itertools

import pytest
import torch
from torch import Tensor

from foredraft.heads.attention import block_attention
from foredraft.heads.base import PackedBatch, draft_loss_mask
from foredraft.heads.dflash import DFlashHead, mask_token, spread_layers
from foredraft.heads.dspark import DSparkHead
from foredraft.inference.drafters import BlockTree
from foredraft.inference.sampling import Sampling, SamplingParams
from foredraft.train import blocks, parity_gate
from foredraft.train.blocks import BlockDistillation
from foredraft.train.losses import kl_div, label
from foredraft.train.module import DistillationModel
from tests.support.batches import PROMPT, batch
from tests.support.head_factory import BLOCK_KINDS, criterion, make_head

# -- settings ---------------------------------------------------------------------------------------------------------


def test_layers_are_the_published_ones():
    for n, ids in ((36, [1, 9, 17, 25, 33]), (32, [1, 8, 15, 22, 29]), (64, [1, 16, 31, 46, 61])):
        assert [layer - 1 for layer in spread_layers(n, 5)] == ids
    assert spread_layers(2, 1) == spread_layers(2, 5) == [1] and spread_layers(3, 1) == [2]


def test_settings_that_make_no_block_are_named(target):
    for changes, message in (
        ({"block_size": 1}, "head.block_size=1"),
        ({"target_layer_ids": [2, 1]}, r"head.target_layer_ids=\[2, 1\] must ascend"),
        ({"target_layer_ids": [6]}, r"head.target_layer_ids=\[6\] must ascend within 0..5"),
        ({"mask_token_id": 320}, "head.mask_token_id=320 must lie between 0 and 319"),
    ):
        with pytest.raises(ValueError, match=message):
            DFlashHead.for_target(target, **changes)
    with pytest.raises(ValueError, match=r"head\.markov_head_type=deep"):
        DSparkHead.for_target(target, markov_head_type="deep")
    assert 0 <= mask_token(target) < target.vocab_size


# -- what is learned --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", [kind for kind in BLOCK_KINDS if kind != "dflash2"]
)  # which learns its candidates apart
def test_all_blocks_at_once_are_the_loss_on_the_grid(target, kind):
    head, text = make_head(kind, target), batch(20, 12)
    whole = DistillationModel(head, target, kl_div)(*text)
    made = BlockDistillation(head, target, kl_div, confidence_weight=0.0, anchors=1.0)
    for chunk in (1000, 5):
        made.chunk = chunk
        got = made(*text._replace(anchors=made.choose_anchors(text, 0)))
        torch.testing.assert_close(got.loss, whole.loss)
        assert torch.equal(got.counts, whole.counts) and torch.equal(got.hits, whole.hits)


@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (True, 4)])
def test_attention_of_blocks_and_its_gradients_are_those_of_one_query_at_a_time(causal, window, monkeypatch):
    monkeypatch.setattr(block_attention, "QUERIES", 7)  # two blocks a part
    slots, starts = 3, torch.tensor([[-1, 0, 3, 4, 9], [1, 2, 6, 7, 10]])
    text = PackedBatch(*(part.expand(2, -1) for part in batch(5, 7)[:4]), anchors=starts)
    blocks = block_attention.Blocks.of(text, slots)
    shapes = ((4, 15), (2, 12), (2, 12), (2, 15), (2, 15))
    given = [torch.randn(2, heads, n, 8).double().requires_grad_() for heads, n in shapes]
    q, keys, values, own_keys, own_values = given
    found = block_attention.attend_blocks(q, (keys, values), (own_keys, own_values), blocks, causal, window)
    rows = []
    for row, head, query in itertools.product(range(2), range(4), range(15)):
        block, slot = divmod(query, slots)
        begin, group = starts[row, block].item(), head // 2
        place = begin + 1 + slot  # of the query; the text's first document ends at 5
        inside = [j for j in range(slots) if (j <= slot or not causal) and (window is None or slot - j < window)]
        seen = [p for p in range(0 if begin < 5 else 5, begin + 1) if window is None or place - p < window]
        some = [block * slots + j for j in inside]
        pairs = ((keys, own_keys), (values, own_values))
        k, v = (torch.cat([a[row, group, seen], b[row, group, some]]) for a, b in pairs)
        rows.append((q[row, head, query] @ k.T / 8**0.5).softmax(-1) @ v)
    expected = torch.stack(rows).view(2, 4, 15, 8)
    torch.testing.assert_close(found, expected)
    probe = torch.randn_like(found)
    for ours, theirs in zip(*(torch.autograd.grad(out, given, probe) for out in (found, expected)), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("kind", ["dspark", "xpress"])
def test_gradients_do_not_depend_on_the_size_of_parts(target, kind):
    head, text = make_head(kind, target), batch(20, 12)
    made, found = criterion(kind, head, target), []
    for made.chunk in (1000, 5):
        made.zero_grad()
        made(*text).loss.backward()
        found.append([parameter.grad for parameter in head.parameters()])
    torch.testing.assert_close(*found)


def test_some_positions_begin_drafts_and_others_in_the_next_step(target):
    made = BlockDistillation(make_head("dflash", target), target, kl_div, anchors=0.2)
    text = batch(25, 15)
    text = text._replace(loss_mask=text.positions >= 10)
    first, second = (made.choose_anchors(text, step) for step in (0, 1))
    assert first.shape == (1, 8) and not torch.equal(first, second)
    assert torch.equal(made.prepare(text, 1)["anchors"], second)
    assert (first.diff() > 0).all() and (first >= 0).all()
    useful = [any(draft_loss_mask(text, d)[0, t + d - 1] for d in (1, 2, 3) if t + d - 1 < 40) for t in range(40)]
    assert all(useful[t] for t in first[0].tolist())
    both = PackedBatch(*(torch.cat([x.flip(1), x]) for x in text[:4]))
    assert torch.equal(made.choose_anchors(both, 0)[1:], first)  # whatever stands in other rows
    counts = made(*text._replace(anchors=first)).counts
    for depth, count in enumerate(counts.tolist(), start=1):
        assert count == sum(bool(draft_loss_mask(text, depth)[0, t + depth - 1]) for t in first[0].tolist())


def test_rows_with_little_to_learn_begin_fewer_drafts(target):
    made = BlockDistillation(make_head("dflash", target), target, kl_div, anchors=0.5)
    text = batch(20)
    starts = made.choose_anchors(text._replace(loss_mask=text.positions == 18), 0)
    assert starts[0].tolist() == [-1] * 7 + [14, 15, 16]
    assert made.choose_anchors(text._replace(loss_mask=text.positions > 99), 0).max() == -1


def test_d_pace_is_its_formula():
    draft, tokens = torch.randn(2, 3, 5), torch.randint(0, 5, (2, 3))
    counted = torch.tensor([[True, True, True], [True, False, True]])
    found = blocks.d_pace_weights(draft, tokens, counted)
    for b in range(2):
        chances = [draft[b, d].softmax(0)[tokens[b, d]].item() for d in range(3)]
        smooth = [0.5 * q + 0.5 if counted[b, d] else 1.0 for d, q in enumerate(chances)]
        for j in range(3):
            reached = [torch.tensor(smooth[: m + 1]).prod().item() for m in range(j, 3) if counted[b, m]]
            assert found[b, j].item() == pytest.approx(sum(reached))


def test_a_rating_learns_the_chance_of_acceptance():
    draft, answer, rating = torch.randn(2, 3, 7), torch.randn(2, 3, 7), torch.randn(2, 3)
    found = blocks.rating_loss(rating, draft, answer)
    for b, d in itertools.product(range(2), range(3)):
        overlap = 1 - 0.5 * (draft[b, d].softmax(0) - answer[b, d].softmax(0)).abs().sum()
        said = rating[b, d].sigmoid()
        expected = -(overlap * said.log() + (1 - overlap) * (1 - said).log())
        assert found[b, d].item() == pytest.approx(expected.item(), rel=1e-4)


def test_a_share_of_the_loss_is_of_the_logits_before_correction(target):
    head, text = make_head("domino", target), batch(16)
    found = []
    for base_weight, progress in ((0.0, 0.0), (1.0, 0.0), (1.0, 0.25), (1.0, 1.0)):
        made = BlockDistillation(head, target, kl_div, base_weight=base_weight)
        made.progress = progress
        found.append(made(*text).loss.item())
    corrected, base, mixed, end = found
    assert end == corrected != base
    assert mixed == pytest.approx(0.25 * corrected + 0.75 * base, rel=1e-5)


def test_a_choice_among_candidates_is_learned_where_the_right_one_is_there(target):
    head = make_head("dflash2", target)
    base, correction, answer = torch.randn(2, 3, 200), torch.randn(2, 3, 6), torch.randn(2, 3, 200)
    tokens = base.argmax(-1)  # always a candidate; the target's token is one where it is said below
    answer[0].scatter_(-1, base[0].argsort()[..., -3, None], 9.0)
    answer[1].scatter_(-1, base[1].argsort()[..., 0, None], 9.0)
    drafts = blocks.Drafts(base, correction, base, base, answer, tokens, tokens[:, 0])
    for loss in (kl_div, label):
        found = BlockDistillation(head, target, loss).selector_loss(drafts)
        assert (found[1] == 0).all()
        for d in range(3):
            ids = base[0, d].topk(120).indices
            pairs = head.candidate_selector.successor_codebook[head.to_target_ids(ids)] @ correction[0, d]
            scores = base[0, d, ids] + pairs
            right = answer[0, d, ids].softmax(0) if loss is kl_div else (ids == tokens[0, d]).float()
            assert found[0, d].item() == pytest.approx(-(right * scores.log_softmax(0)).sum().item(), rel=1e-4)


def test_an_objective_holds_its_head_once(target):
    made = BlockDistillation(make_head("dspark", target), target, kl_div)
    assert all(name.startswith("head.") for name, _ in made.named_parameters(remove_duplicate=False))


def test_objectives_of_blocks_refuse_other_heads(target):
    with pytest.raises(ValueError, match="this objective is for heads that draft in blocks, and eagle3 does not"):
        BlockDistillation(make_head("eagle3", target), target, kl_div)


# -- trees ------------------------------------------------------------------------------------------------------------


def begun(drafter, batch: int = 1):
    drafter.begin(batch, 64, Sampling.of([SamplingParams()] * batch, 1024))
    return drafter


def candidates(tree: BlockTree, block: Tensor, bonus: Tensor, noise: Tensor | None = None) -> tuple[Tensor, ...]:
    """Return the candidates of a tree whose head gives these hidden states."""
    tree.head.draft_block = lambda hidden, cache: block
    return tree.expand(None, None, bonus, noise, tree.sampling.temperature)


def test_candidates_are_chosen_with_the_noise(target):
    head = make_head("dflash2", target)
    head.candidates = 2
    tree = begun(BlockTree(head, target, nodes=4, width=2))
    tree.sampling = Sampling.of([SamplingParams(temperature=1.0)], target.vocab_size)
    hidden, noise = torch.randn(1, head.depth, 32), torch.zeros(1, head.depth, target.vocab_size)
    last = head.base_logits(hidden)[0, 0].argsort()[:2]  # what nobody would draft without noise
    noise[0, 0, head.to_target_ids(last)] = 50.0
    tree.levels = 1
    tokens, _, _ = candidates(tree, hidden, torch.tensor([[1]]), noise)
    assert set(tokens[0, 1:].tolist()) == set(head.to_target_ids(last).tolist())


@pytest.mark.parametrize("nodes", [2, 7, 24])
def test_the_tree_is_the_exact_set_of_the_best_paths(target, nodes):
    """Compare with a heap over prefixes, as DDTree's paper writes it."""
    tree = begun(BlockTree(make_head("jetspec", target), target, nodes=nodes), 2)
    hidden = torch.randn(2, 4, 32)
    proposed, _ = tree.rerank(*candidates(tree, hidden, torch.tensor([[1], [2]])))
    table = tree.log_probs(target.logits(hidden), None, tree.sampling.temperature)
    for row in range(2):
        best = [level.sort(descending=True) for level in table[row]]
        heap, expected = [(-best[0].values[0].item(), (0,))], set()
        while len(expected) < nodes - 1:
            score, path = heapq.heappop(heap)
            expected.add(tuple(best[d].indices[rank].item() for d, rank in enumerate(path)))
            d, rank = len(path) - 1, path[-1]
            sibling = best[d].values[rank] - best[d].values[rank + 1]
            heapq.heappush(heap, (score + sibling.item(), (*path[:-1], rank + 1)))
            if len(path) < 4:
                heapq.heappush(heap, (score - best[len(path)].values[0].item(), (*path, 0)))
        paths: list[tuple[int, ...]] = [()]
        for node in range(1, nodes):
            paths.append((*paths[proposed.parents[row, node]], proposed.tokens[row, node].item()))
        assert set(paths[1:]) == expected


@torch.no_grad()
@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_a_chain_takes_the_best_draft_of_every_depth(target, kind):
    head = make_head(kind, target)
    chain, logits = parity_gate.drafted_logits(head, target, PROMPT[:9], PROMPT[9])
    assert chain == [head.to_target_ids(row.argmax()).item() for row in logits] and len(chain) == head.depth


def test_nodes_that_rate_low_are_left_out(target):
    head = make_head("dspark", target)
    with torch.no_grad():
        head.confidence_head.proj.weight.zero_()
    for bias, kept in ((-9.0, 0), (9.0, 7)):
        head.confidence_head.proj.bias.data.fill_(bias)
        tree = begun(BlockTree(head, target, nodes=8, min_probability=0, min_confidence=0.3))
        _, _, scores = candidates(tree, torch.randn(1, 3, 32), torch.tensor([[1]]))
        assert scores.topk(7).values.isfinite().sum() == kept
    with pytest.raises(ValueError, match=r"min_confidence=0.3 .* the head must predict acceptance"):
        BlockTree(make_head("dflash", target), target, min_confidence=0.3)
