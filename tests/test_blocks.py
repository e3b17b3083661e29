"""Heads that draft in blocks against the papers' equations, written out in loops; their trees; and what is learned from which
blocks. Known ways to get them wrong are broken on purpose and seen."""

import heapq
import itertools
import json

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from heads import Target, block_attention, save_head
from heads.base import BlockHead, PackedBatch, draft_loss_mask
from heads.dflash import DFlashHead, mask_token, spread_layers
from heads.dspark import DSparkHead
from inference import generate
from inference.drafters import AutoTree, BlockTree, drafter_for
from inference.drafters.block import Rows
from inference.sampling import Sampling, SamplingParams
from tests.support.batches import PROMPT, batch
from tests.support.equations import attention, ffn, mlp, rms
from tests.support.head_factory import KINDS, make_head, objective
from train import blocks, parity_gate
from train.blocks import BlockDistillation
from train.losses import label, soft
from train.module import DistillationModel

BLOCK_KINDS = [
    name for name in KINDS if name.split()[0] in ("dflash", "dflash2", "jetspec", "dspark", "domino", "p_eagle")
]


@pytest.fixture(params=BLOCK_KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


# -- the equations ----------------------------------------------------------------------------------------------------


def conv(head, w: dict[str, Tensor], name: str, x: Tensor, which: int, read: Tensor) -> Tensor:
    """DFlash-2: slot t of x (slots, hidden) and the slot before it, by kernels of what the sublayer read."""
    base, groups = w[name + "base_kernel"][which], head.width // head.group
    rows = []
    for t in range(len(x)):
        dynamic = (w[name + "kernel_projection.weight"] @ read[t]).view(2, head.taps, groups)[which]
        row = torch.zeros(head.width)
        for c in range(head.width):
            for tap in range(head.taps):
                if t >= tap:
                    row[c] += (base[tap, c] + dynamic[tap, c // head.group]) * x[t - tap, c]
        rows.append(row)
    return torch.stack(rows)


def block_pass(head, w: dict[str, Tensor], context: Tensor, root: int, embed: Tensor) -> Tensor:
    """Outputs (slots, hidden) of the last norm, for a block behind context (a, hidden); `root` stands at position a."""
    a, size, config = len(context), head.block_size, head.config
    dim = config.head_dim
    x = torch.stack([embed[root], *[embed[head.mask_token_id]] * (size - 1)])
    for number in range(config.num_hidden_layers):
        name = f"blocks.{number}."
        sliding = head.layer_types[number] == "sliding_attention"
        normed = rms(x, w[name + "input_layernorm.weight"])
        if head.kind == "dflash2":
            normed, kernel = conv(head, w, name + "attention_conv.", normed, 0, normed), normed
        both = torch.cat([context, normed])
        keys = (both @ w[name + "self_attn.k_proj.weight"].T).view(a + size, -1, dim)
        values = (both @ w[name + "self_attn.v_proj.weight"].T).view(a + size, -1, dim)
        keys = rms(keys, w[name + "self_attn.k_norm.weight"])
        queries = rms(
            (normed @ w[name + "self_attn.q_proj.weight"].T).view(size, -1, dim), w[name + "self_attn.q_norm.weight"]
        )

        def sees(j: int, p: int, sliding: bool = sliding) -> bool:
            ahead = p >= a and p - a > j and (head.causal or (sliding and head.kind != "dflash2"))
            return not ahead and not (sliding and (a + j) - p >= head.window)

        places = list(range(a + size))
        attended = attention(queries, keys, values, places[a:], places, sees) @ w[name + "self_attn.o_proj.weight"].T
        if head.kind == "dflash2":
            x = x + conv(head, w, name + "attention_conv.", attended, 1, kernel)
            inner = rms(x, w[name + "post_attention_layernorm.weight"])
            x = x + conv(
                head, w, name + "mlp_conv.", ffn(conv(head, w, name + "mlp_conv.", inner, 0, inner), w, name), 1, inner
            )
            continue
        x = x + attended
        x = x + mlp(x, w, name)
    return rms(x, w["norm.weight"])


def p_eagle_pass(head, w: dict[str, Tensor], fused: Tensor, text: list[int]) -> Tensor:
    """Outputs (depth, hidden) of the last norm, for drafts behind fused features (a, hidden) and text (a + 1,): the last
    entry of the text, and the mask entries behind it."""
    config, a = head.config, len(fused)
    embed, unknown = w["embed_tokens.weight"], w["fc.weight"] @ w["mask_hidden"][0, 0]
    x = torch.stack([*fused, *[unknown] * (head.depth - 1)])
    read = torch.stack([*(embed[token] for token in text[1:]), *[embed[head.mask_token_id]] * (head.depth - 1)])
    for number in range(config.num_hidden_layers):
        name = f"blocks.{number}."
        if number:
            inputs = rms(x, w[name + "input_layernorm.weight"])
        else:
            inputs = torch.cat(
                [rms(read, w[name + "input_layernorm.weight"]), rms(x, w[name + "hidden_norm.weight"])], -1
            )
        q, k, v = (
            (inputs @ w[f"{name}self_attn.{one}_proj.weight"].T).view(len(x), -1, config.head_dim) for one in "qkv"
        )
        places = list(range(len(x)))
        attended = attention(q, k, v, places, places, lambda j, p: p <= j)
        x = x + attended @ w[name + "self_attn.o_proj.weight"].T
        x = x + mlp(x, w, name)
    return rms(x[a - 1 :], w["norm.weight"])


def corrections(
    head, w: dict[str, Tensor], slots: Tensor, path: list[int], embed: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """Per depth what is added to the logits, and the rating of the draft, given the path's tokens, the root first."""
    added, ratings = [], []
    memory = torch.zeros(head.memory)
    for number, (h, previous) in enumerate(zip(slots, path, strict=True)):
        if head.kind == "dspark":
            e = w["markov_head.markov_w1.weight"][previous]
            z = e
            if head.markov_head.variant == "gated":
                both = torch.cat([h, e])
                z = torch.sigmoid(w["markov_head.gate_proj.weight"] @ both + w["markov_head.gate_proj.bias"]) * e
            elif head.markov_head.variant == "rnn":
                joint = (
                    w["markov_head.joint_proj.weight"] @ torch.cat([memory, e, h]) + w["markov_head.joint_proj.bias"]
                )
                g, c, o = joint.view(3, -1)
                memory = torch.sigmoid(g) * memory + (1 - torch.sigmoid(g)) * torch.tanh(c)
                z = torch.tanh(o)
            added.append(w["markov_head.markov_w2.weight"] @ z)
            ratings.append(w["confidence_head.proj.weight"] @ torch.cat([h, e]) + w["confidence_head.proj.bias"])
        elif head.kind == "domino":
            i, m = w["prefix_gru.weight_ih_l0"] @ embed[previous], w["prefix_gru.weight_hh_l0"] @ memory
            (ir, iz, iN), (mr, mz, mn) = i.view(3, -1), m.view(3, -1)
            gate = torch.sigmoid(iz + mz)
            memory = (1 - gate) * torch.tanh(iN + torch.sigmoid(ir + mr) * mn) + gate * memory
            low = F.silu(w["embed_proj.0.weight"] @ torch.cat([h, memory]))
            slot = number if head.sample_from_anchor else number + 1
            added.append(w["embed_proj.2.weight"] @ low if slot >= 1 else torch.zeros(head.draft_vocab))
        else:
            added.append(torch.zeros(head.draft_vocab))
    return added, ratings


def selected(head, w: dict[str, Tensor], base: Tensor, slots: Tensor, path: list[int]) -> list[Tensor]:
    """DFlash-2: the best candidates of each row (vocab,), rated after the token before; what is none is far below."""
    selector, rows = "candidate_selector.", []
    for row, h, previous in zip(base, slots, path, strict=False):
        context = w[selector + "predecessor_codebook"][previous] * (w[selector + "hidden_projection.weight"] @ h)
        new = torch.full_like(row, -1e4)
        for token in sorted(range(len(row)), key=lambda token: -row[token].item())[: head.candidates]:
            new[token] = row[token] + context @ w[selector + "successor_codebook"][head.to_target_ids(token)]
        rows.append(new)
    return rows


@torch.no_grad()
def by_the_paper(head, target: Target, text: list[int], a: int) -> tuple[Tensor, list[Tensor]]:
    """Logits (depth, vocab), and ratings, of the drafts after the root at position `a` of `text`."""
    w, embed = head.state_dict(), target.embeddings
    states = target.model(torch.tensor([text[:a]]), output_hidden_states=True).hidden_states
    fused = torch.cat([states[layer][0] for layer in head.layers], -1) @ w["fc.weight"].T
    if head.kind == "p_eagle":
        return p_eagle_pass(head, w, fused, text[: a + 1]) @ w["lm_head.weight"].T, []
    slots = block_pass(head, w, rms(fused, w["hidden_norm.weight"]), text[a], embed)
    slots = slots if head.sample_from_anchor else slots[1:]
    added, ratings = corrections(head, w, slots, text[a : a + len(slots)], embed)
    base = slots @ w.get("lm_head.weight", target.model.lm_head.weight).T
    if head.kind == "dflash2":
        return torch.stack(selected(head, w, base, slots, text[a:])), ratings
    return base + torch.stack(added), ratings


@torch.no_grad()
def trained(head, target: Target, text: list[int], starts: list[int] | None) -> tuple[Tensor, Tensor]:
    """Logits (n, depth, vocab) of the training forward, and its ratings."""
    tokens = torch.tensor([text])
    places = torch.arange(len(text))[None]
    chosen = None if starts is None else torch.tensor([starts])
    whole = PackedBatch(tokens, torch.ones_like(tokens).bool(), torch.zeros_like(tokens), places, chosen)
    features = target.read(tokens, layers=head.layers).features
    states = head.draft_blocks(features, target.embed(tokens), whole)[0]
    return torch.stack([head.logits(states[:, d - 1], d) for d in range(1, head.depth + 1)], 1), states[..., -1]


def test_logits_are_those_of_the_equations(target, kind):
    head, text = make_head(kind, target), PROMPT[:20]
    assert isinstance(head, BlockHead)
    starts = [0, 3, 11]
    logits, ratings = trained(head, target, text, starts)
    for number, start in enumerate(starts):
        expected, rated = by_the_paper(head, target, text, start + 1)
        torch.testing.assert_close(logits[number], expected, atol=1e-5 * expected.abs().max().item(), rtol=1e-5)
        if head.confident:
            torch.testing.assert_close(ratings[number], torch.cat(rated), atol=1e-4, rtol=1e-4)


TRAPS = {
    "layout": ("dflash", lambda config: config["dflash_config"].update(sample_from_anchor=True)),
    "causal": ("dflash", lambda config: config["dflash_config"].update(causal=True)),
    "not causal": ("jetspec", lambda config: config["dflash_config"].update(causal=False)),
    "layers": ("dflash", lambda config: config["dflash_config"].update(target_layer_ids=[0, 1])),
    "mask token": ("dflash", lambda config: config["dflash_config"].update(mask_token_id=9)),
    "sliding": ("dflash anchor first", lambda config: config.update(layer_types=["full_attention"] * 3)),
    "window": ("dflash anchor first", lambda config: config.update(sliding_window=3)),
    "mask token of P-EAGLE": ("p_eagle", lambda config: config.update(pard_token=9)),
    "residual": ("p_eagle", lambda config: config.update(norm_before_residual=True)),
    "layers of P-EAGLE": ("p_eagle", lambda config: config.update(eagle_aux_hidden_state_layer_ids=[2, 3, 4])),
    "pure slots": ("domino", lambda config: config["dflash_config"].update(pure_draft_prefix_len=2)),
}


@pytest.mark.parametrize("name", TRAPS)
def test_the_gate_sees_a_setting_that_the_files_lost(target, tmp_path, name):
    kind, change = TRAPS[name]
    head = make_head(kind, target)
    save_head(head, tmp_path, target)
    parity_gate.check(head, target, PROMPT, saved=tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    change(config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError):
        parity_gate.check(head, target, PROMPT, saved=tmp_path)


def test_rows_without_a_block_are_numbers_and_change_nothing(target, kind):
    head, text = make_head(kind, target), PROMPT[:20]
    some, none = (trained(head, target, text, starts)[0] for starts in ([4, 9], [-1, -1, 4, 9]))
    assert torch.isfinite(none).all()
    torch.testing.assert_close(none[2:], some)


def test_blocks_do_not_depend_on_how_many_are_read_at_a_time(target, kind, monkeypatch):
    head, text = make_head(kind, target), PROMPT[:20]
    whole = trained(head, target, text, None)[0]
    monkeypatch.setattr(block_attention, "QUERIES", 9)
    starts = [2, 3, 7, 8, 13]
    torch.testing.assert_close(trained(head, target, text, starts)[0], whole[starts], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("n", "count", "ids"), [(36, 5, [1, 9, 17, 25, 33]), (32, 5, [1, 8, 15, 22, 29]), (64, 5, [1, 16, 31, 46, 61])]
)
def test_layers_are_the_published_ones(n, count, ids):
    assert [layer - 1 for layer in spread_layers(n, count)] == ids


def test_settings_that_make_no_block_are_named(target):
    for changes, message in (
        ({"block_size": 1}, "head.block_size=1"),
        ({"layers": [2, 1]}, r"head.layers=\[2, 1\] must ascend"),
        ({"layers": [6]}, r"head.layers=\[6\] must ascend within 0..5"),
        ({"mask_token_id": 320}, "head.mask_token_id=320 is no row"),
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
    whole = DistillationModel(head, target, soft)(*text)
    made = BlockDistillation(head, target, soft, confidence_weight=0.0, starts=1.0)
    for chunk in (1000, 5):
        made.chunk = chunk
        got = made(*text._replace(starts=made.choose_starts(text, 0)))
        torch.testing.assert_close(got.loss, whole.loss)
        assert torch.equal(got.counts, whole.counts) and torch.equal(got.hits, whole.hits)


def test_gradients_do_not_depend_on_recomputation(target, monkeypatch):
    head, text = make_head("dspark", target), batch(20, 12)
    made, found = objective("dspark", head, target), []
    for small in (1 << 30, 0):
        monkeypatch.setattr(blocks, "SMALL", small)
        made.zero_grad()
        made(*text).loss.backward()
        found.append([parameter.grad for parameter in head.parameters()])
    torch.testing.assert_close(*found)


def test_some_positions_begin_drafts_and_others_in_the_next_step(target):
    made = BlockDistillation(make_head("dflash", target), target, soft, starts=0.2)
    text = batch(25, 15)
    text = text._replace(loss_mask=text.positions >= 10)
    first, second = (made.choose_starts(text, step) for step in (0, 1))
    assert first.shape == (1, 8) and not torch.equal(first, second)
    assert (first.diff() > 0).all() and (first >= 0).all()
    useful = [any(draft_loss_mask(text, d)[0, t + d - 1] for d in (1, 2, 3) if t + d - 1 < 40) for t in range(40)]
    assert all(useful[t] for t in first[0].tolist())
    both = PackedBatch(*(torch.cat([x.flip(1), x]) for x in text[:4]))
    assert torch.equal(made.choose_starts(both, 0)[1:], first)  # whatever stands in other rows
    counts = made(*text._replace(starts=first)).counts
    for depth, count in enumerate(counts.tolist(), start=1):
        assert count == sum(bool(draft_loss_mask(text, depth)[0, t + depth - 1]) for t in first[0].tolist())


def test_rows_with_little_to_learn_begin_fewer_drafts(target):
    made = BlockDistillation(make_head("dflash", target), target, soft, starts=0.5)
    text = batch(20)
    starts = made.choose_starts(text._replace(loss_mask=text.positions == 18), 0)
    assert starts[0].tolist() == [-1] * 7 + [14, 15, 16]
    assert made.choose_starts(text._replace(loss_mask=text.positions > 99), 0).max() == -1


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
        made = BlockDistillation(head, target, soft, base_weight=base_weight)
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
    for loss in (soft, label):
        found = BlockDistillation(head, target, loss).selector_loss(base, correction, answer, tokens)
        assert (found[1] == 0).all()
        for d in range(3):
            ids = base[0, d].topk(120).indices
            pairs = head.candidate_selector.successor_codebook[head.to_target_ids(ids)] @ correction[0, d]
            scores = base[0, d, ids] + pairs
            right = answer[0, d, ids].softmax(0) if loss is soft else (ids == tokens[0, d]).float()
            assert found[0, d].item() == pytest.approx(-(right * scores.log_softmax(0)).sum().item(), rel=1e-4)


def test_an_objective_holds_its_head_once(target):
    made = BlockDistillation(make_head("dspark", target), target, soft)
    assert all(name.startswith("head.") for name, _ in made.named_parameters(remove_duplicate=False))


def test_objectives_of_blocks_refuse_other_heads(target):
    with pytest.raises(ValueError, match="objective=block is for heads that draft in blocks, and eagle3 does not"):
        BlockDistillation(make_head("eagle3", target), target, soft)


# -- trees ------------------------------------------------------------------------------------------------------------


def begun(drafter, batch: int = 1):
    drafter.begin(batch, 64, Sampling.of([SamplingParams()] * batch, 1024))
    return drafter


@pytest.mark.parametrize("nodes", [2, 7, 24])
def test_the_tree_is_the_exact_set_of_the_best_paths(target, nodes):
    """Against a heap over prefixes, as DDTree's paper writes it."""
    tree = begun(BlockTree(make_head("jetspec", target), target, nodes=nodes), 2)
    hidden = torch.randn(2, 4, 32)
    rows = Rows(tree, hidden, None, tree.sampling)
    proposed, _ = tree.rerank(*tree.expand(rows, torch.tensor([[1], [2]])))
    table = tree.log_probs(target.logits(hidden), None, tree.sampling)
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
        rows = Rows(tree, torch.randn(1, 3, 32), None, tree.sampling)
        _, _, scores = tree.expand(rows, torch.tensor([[1]]))
        assert scores.topk(7).values.isfinite().sum() == kept
    with pytest.raises(ValueError, match=r"min_confidence=0.3 .* of a head that rates"):
        BlockTree(make_head("dflash", target), target, min_confidence=0.3)


@pytest.mark.parametrize("tree", ["fixed", "auto"])
@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}], ids=str)
def test_text_is_the_targets_own_in_a_batch(target, kind, settings, tree):
    rows = torch.tensor([PROMPT[:12], [0] * 5 + PROMPT[20:27], [0] * 11 + PROMPT[5:6]])
    mask = (torch.arange(12) >= torch.tensor([[0], [5], [11]])).long()
    settings = settings | {"max_new_tokens": 20, "eos_token_id": -1, "seed": 3}
    drafter = drafter_for(make_head(kind, target), target, nodes=9, min_probability=0.0, tree=tree)
    assert isinstance(drafter, AutoTree if tree == "auto" else BlockTree)
    drafted = generate(target, drafter, rows, mask, **settings)
    assert drafted.new_tokens == generate(target, None, rows, mask, **settings).new_tokens
