"""Heads that draft in blocks against the papers' equations, written out in loops. Known ways to get them wrong are broken on
purpose and seen."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.heads import Target, save_head
from foredraft.heads.attention import block_attention
from foredraft.heads.base import BlockHead, PackedBatch
from foredraft.train import parity_gate
from tests.support.batches import PROMPT
from tests.support.equations import attention, ffn, mlp, rms
from tests.support.head_factory import BLOCK_KINDS, edit, make_head

every_kind = pytest.mark.parametrize("kind", BLOCK_KINDS)


def conv(head, w: dict[str, Tensor], name: str, x: Tensor, which: int, read: Tensor) -> Tensor:
    """Compute DFlash-2's convolution: slot t of x (slots, hidden) and the slot before it, by kernels of what the sublayer
    read."""
    taps, size = head.own["conv_kernel_size"], head.own["conv_group_size"]
    base, groups = w[name + "base_kernel"][which], x.shape[1] // size
    rows = []
    for t in range(len(x)):
        dynamic = (w[name + "kernel_projection.weight"] @ read[t]).view(2, taps, groups)[which]
        row = torch.zeros(x.shape[1])
        for c in range(x.shape[1]):
            for tap in range(taps):
                if t >= tap:
                    row[c] += (base[tap, c] + dynamic[tap, c // size]) * x[t - tap, c]
        rows.append(row)
    return torch.stack(rows)


def block_pass(head, w: dict[str, Tensor], context: Tensor, root: int, embed: Tensor) -> Tensor:
    """Return outputs (slots, hidden) of the last norm, for a block behind context (a, hidden); `root` is at position a."""
    a, size, config = len(context), head.block_size, head.config
    dim, convolved = config.head_dim, "blocks.0.mlp_conv.base_kernel" in w
    x = torch.stack([embed[root], *[embed[head.mask_token_id]] * (size - 1)])
    for number in range(len(head.blocks)):
        name = f"blocks.{number}."
        sliding = head.layer_types[number] == "sliding_attention"
        normed = rms(x, w[name + "input_layernorm.weight"])
        if convolved:
            normed, kernel = conv(head, w, name + "attention_conv.", normed, 0, normed), normed
        both = torch.cat([context, normed])
        keys, values = ((both @ w[f"{name}self_attn.{one}_proj.weight"].T).view(a + size, -1, dim) for one in "kv")
        keys = rms(keys, w[name + "self_attn.k_norm.weight"])
        queries = (normed @ w[name + "self_attn.q_proj.weight"].T).view(size, -1, dim)
        queries = rms(queries, w[name + "self_attn.q_norm.weight"])

        def sees(j: int, p: int, sliding: bool = sliding) -> bool:
            ahead = p >= a and p - a > j and (head.causal or (sliding and head.kind != "dflash2"))
            return not ahead and not (sliding and (a + j) - p >= head.window)

        places = list(range(a + size))
        attended = attention(queries, keys, values, places[a:], places, sees) @ w[name + "self_attn.o_proj.weight"].T
        if convolved:
            x = x + conv(head, w, name + "attention_conv.", attended, 1, kernel)
            inner = rms(x, w[name + "post_attention_layernorm.weight"])
            read = conv(head, w, name + "mlp_conv.", inner, 0, inner)
            x = x + conv(head, w, name + "mlp_conv.", ffn(read, w, name), 1, inner)
            continue
        x = x + attended
        x = x + mlp(x, w, name)
    return rms(x, w["norm.weight"])


def p_eagle_pass(head, w: dict[str, Tensor], fused: Tensor, text: list[int]) -> Tensor:
    """Return outputs (depth, hidden) of the last norm, for drafts behind fused hidden states (a, hidden) and text (a + 1,):
    the last entry of the text, and the mask entries behind it."""
    config, a = head.config, len(fused)
    embed, unknown = w["embed_tokens.weight"], w["fc.weight"] @ w["mask_hidden"][0, 0]
    x = torch.stack([*fused, *[unknown] * (head.depth - 1)])
    read = torch.stack([*(embed[token] for token in text[1:]), *[embed[head.mask_token_id]] * (head.depth - 1)])
    for number in range(len(head.blocks)):
        name = f"blocks.{number}."
        inputs = rms(x, w[name + ("input_layernorm.weight" if number else "hidden_norm.weight")])
        if number == 0:
            inputs = torch.cat([rms(read, w[name + "input_layernorm.weight"]), inputs], -1)
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
    """Return what is added to the logits per depth, and the rating of the draft, given the path's tokens, the root first."""
    added, ratings = [], []
    memory = torch.zeros(head.memory)
    for number, (h, previous) in enumerate(zip(slots, path, strict=True)):
        if head.kind == "dspark":
            e = w["markov_head.markov_w1.weight"][previous]
            z = e
            if head.markov_head.variant == "gated":
                z = torch.sigmoid(affine(w, "markov_head.gate_proj", torch.cat([h, e]))) * e
            elif head.markov_head.variant == "rnn":
                joint = affine(w, "markov_head.joint_proj", torch.cat([memory, e, h]))
                g, c, o = joint.view(3, -1)
                memory = torch.sigmoid(g) * memory + (1 - torch.sigmoid(g)) * torch.tanh(c)
                z = torch.tanh(o)
            added.append(w["markov_head.markov_w2.weight"] @ z)
            ratings.append(affine(w, "confidence_head.proj", torch.cat([h, e])))
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
    """Return DFlash-2's best candidates of each row (vocab,), scored after the token before; others are far below."""
    selector, rows = "candidate_selector.", []
    for row, h, previous in zip(base, slots, path, strict=False):
        context = w[selector + "predecessor_codebook"][previous] * (w[selector + "hidden_projection.weight"] @ h)
        new = torch.full_like(row, -1e4)
        for token in sorted(range(len(row)), key=lambda token: -row[token].item())[: head.candidates]:
            new[token] = row[token] + context @ w[selector + "successor_codebook"][head.to_target_ids(token)]
        rows.append(new)
    return rows


def affine(w: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return w[name + ".weight"] @ x + w[name + ".bias"]


def refined(head, w: dict[str, Tensor], block: Tensor, path: list[int]) -> list[Tensor]:
    """Return what xPress adds to the logits per depth. block: (block_size, hidden), of all positions."""
    w = {name.removeprefix("xpress_head."): tensor for name, tensor in w.items()}
    tokens, u, added = path if head.sample_from_anchor else [path[0], *path], [], []
    for j, h in enumerate(block):
        parts = w["down_h.weight"] @ h, w["down_g.weight"] @ (sum(block) / len(block)), w["w1.weight"][tokens[j]]
        u.append(w["in_proj.weight"] @ torch.cat(parts))
        x = u[j] + sum(w["mix.L"][:, j, i] * u[i] for i in range(j + 1))
        x = x + w["mlp.down_proj.weight"] @ (F.silu(w["mlp.gate_proj.weight"] @ x) * (w["mlp.up_proj.weight"] @ x))
        added.append(w["w2.weight"] @ x)
    return added if head.sample_from_anchor else added[1:]


@torch.no_grad()
def by_the_paper(head, target: Target, text: list[int], a: int) -> tuple[Tensor, list[Tensor]]:
    """Return logits (depth, vocab), and ratings, of the drafts after the root at position `a` of `text`."""
    w, embed = head.state_dict(), target.embeddings
    states = target.model(torch.tensor([text[:a]]), output_hidden_states=True).hidden_states
    fused = torch.cat([states[layer][0] for layer in head.layers], -1) @ w["fc.weight"].T
    if head.kind == "p_eagle":
        return p_eagle_pass(head, w, fused, text[: a + 1]) @ w["lm_head.weight"].T, []
    context = rms(fused, w["hidden_norm.weight"])
    block = block_pass(head, w, context, text[a], embed)
    slots = block if head.sample_from_anchor else block[1:]
    added, ratings = corrections(head, w, slots, text[a : a + len(slots)], embed)
    base = slots @ w.get("lm_head.weight", target.model.lm_head.weight).T
    if head.kind == "dflash2":
        return torch.stack(selected(head, w, base, slots, text[a:])), ratings
    if head.kind == "xpress":
        return base + torch.stack(refined(head, w, block, text[a : a + len(slots)])), ratings
    return base + torch.stack(added), ratings


@torch.no_grad()
def trained(head, target: Target, text: list[int], starts: list[int] | None) -> tuple[Tensor, Tensor]:
    """Return logits (n, depth, vocab) of the training forward, and its ratings."""
    tokens = torch.tensor([text])
    places = torch.arange(len(text))[None]
    chosen = None if starts is None else torch.tensor([starts])
    whole = PackedBatch(tokens, torch.ones_like(tokens).bool(), torch.zeros_like(tokens), places, chosen)
    aux_hidden_states = target.forward(tokens, layers=head.layers).aux_hidden_states
    states = head.draft_blocks(aux_hidden_states, target.embed(tokens), whole)[0]
    return torch.stack([head.logits(states[:, d - 1], d) for d in range(1, head.depth + 1)], 1), states[..., -1]


@every_kind
def test_logits_are_those_of_the_equations(target, kind):
    head, text = make_head(kind, target), PROMPT[:20]
    assert isinstance(head, BlockHead)
    starts = [0, 3, 11]
    logits, ratings = trained(head, target, text, starts)
    for number, start in enumerate(starts):
        expected, rated = by_the_paper(head, target, text, start + 1)
        largest = expected[expected > -1e3].abs().max().item()  # logits of other tokens are far below
        torch.testing.assert_close(logits[number], expected, atol=1e-5 * largest, rtol=1e-5)
        if head.confident:
            torch.testing.assert_close(ratings[number], torch.cat(rated), atol=1e-4, rtol=1e-4)


# kind, and what its config.json says instead
TRAPS: list[tuple[str, dict[str, Any]]] = [
    ("dflash", {"dflash_config": {"sample_from_anchor": True}}),
    ("dflash", {"dflash_config": {"causal": True}}),
    ("jetspec", {"is_causal": False, "dflash_config": {"causal": False, "causal_head": False}}),
    ("dflash", {"dflash_config": {"target_layer_ids": [0, 1]}}),
    ("dflash", {"dflash_config": {"mask_token_id": 9}}),
    ("dflash anchor first", {"layer_types": ["full_attention"] * 3}),
    ("dflash anchor first", {"sliding_window": 3}),
    ("p_eagle", {"pard_token": 9}),
    ("p_eagle", {"norm_before_residual": True}),
    ("p_eagle", {"eagle_aux_hidden_state_layer_ids": [2, 3, 4]}),
    ("domino", {"dflash_config": {"pure_draft_prefix_len": 2}}),
]


@pytest.mark.parametrize(("kind", "change"), TRAPS)
def test_the_gate_sees_a_setting_that_the_files_lost(target, tmp_path, kind, change):
    head = make_head(kind, target)
    save_head(head, tmp_path, target)
    parity_gate.check(head, target, PROMPT, saved=tmp_path)

    def lose(config: dict) -> None:
        for key, value in change.items():
            config[key] = config[key] | value if isinstance(value, dict) else value

    edit(tmp_path, lose)
    with pytest.raises(ValueError, match="parity gate: "):
        parity_gate.check(head, target, PROMPT, saved=tmp_path)


@every_kind
def test_a_block_depends_neither_on_others_nor_on_how_many_are_read_at_a_time(target, kind, monkeypatch):
    head, text, starts = make_head(kind, target), PROMPT[:20], [2, 3, 7, 8, 13]
    whole = trained(head, target, text, None)[0]
    monkeypatch.setattr(block_attention, "QUERIES", 9)
    some, none = (trained(head, target, text, given)[0] for given in (starts, [-1, -1, *starts]))
    assert torch.isfinite(none).all()  # also where no block starts
    torch.testing.assert_close(some, whole[starts], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(none[2:], some, atol=1e-4, rtol=1e-4)
