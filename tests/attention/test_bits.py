"""Half precision on a CPU: after drafted chains the target's logits equal the baseline's in every bit."""

from collections.abc import Callable

import pytest
import torch

from foredraft import Engine, Request, SamplingParams, Target
from foredraft.heads.caches.kv_cache import KEY_BLOCK
from foredraft.inference.drafters import Drafter, NgramDrafter, SuffixDrafter, drafter_for, load_drafter
from tests.support import ROOT
from tests.support.decoding import prompt
from tests.support.head_factory import make_head

LENGTHS = (9, KEY_BLOCK - 7, 30, 250)  # of prompts; the text of the second one crosses a block of keys
DRAFTERS: dict[str, Callable[[Target], Drafter]] = {
    "n-gram": lambda target: NgramDrafter(),
    "suffix": lambda target: SuffixDrafter(width=1),
    "lookahead": lambda target: load_drafter("lookahead", target),
    "eagle3": lambda target: drafter_for(make_head("eagle3", target), target, depth=3),
    "medusa": lambda target: drafter_for(make_head("medusa", target), target),
    "dflash": lambda target: drafter_for(make_head("dflash", target), target),
}


@pytest.fixture(scope="module")
def half() -> Target:
    target = Target.from_pretrained(ROOT / "scripts" / "test_model", dtype="bfloat16", device="cpu")
    if not target.capabilities.prefers_chains:
        pytest.skip("the products of this processor depend on how many rows are computed together")
    return target


def decode(target: Target, drafter: Drafter | None, temperature: float, batch: int) -> tuple[dict, dict, int]:
    """Return the texts, the bits of the logits by text and position, and how many drafts were accepted."""
    rows: dict[tuple[int, int], bytes] = {}
    texts: dict[int, list[int]] = {}
    accepted, engine = 0, Engine(target, drafter, max_num_seqs=batch)
    verify = engine.verify

    def noted(tree, logits, gumbel):
        verification, valid = verify(tree, logits, gumbel)
        for slot, sequence in enumerate(engine.slots.sequences):
            if sequence.finish_reason is None:
                path = verification.path[slot, : verification.counts[slot]].tolist()
                for place, node in enumerate(path, start=len(sequence.text)):
                    rows[sequence.request.seed, place] = logits[slot, node].view(torch.int16).numpy().tobytes()
        return verification, valid

    engine.verify = noted  # type: ignore[method-assign]
    for seed, length in enumerate(LENGTHS):
        text = (prompt(11, seed) * length)[:length]  # which repeats itself, so that drafts are accepted
        engine.add(Request(text, SamplingParams(temperature), 24, seed))
    while engine.has_work:
        for output in engine.step():
            texts.setdefault(output.request.seed, []).extend(output.tokens)
            accepted += output.accepted or 0
    engine.close()
    return texts, rows, accepted


@pytest.mark.parametrize(("temperature", "batch"), [(0.0, 1), (1.0, 3)])
@pytest.mark.parametrize("name", DRAFTERS)
def test_drafts_change_no_bit(half, name, temperature, batch):
    """Check it for a single sequence, and in a batch that others join and leave."""
    texts, rows, _ = decode(half, None, temperature, 1)
    drafted, drafted_rows, accepted = decode(half, DRAFTERS[name](half), temperature, batch)
    assert drafted == texts
    assert all(bits == rows[place] for place, bits in drafted_rows.items() if place in rows)
    assert len(rows.keys() & drafted_rows.keys()) > 60 and (accepted > 0 or name not in ("n-gram", "suffix"))


def test_forwards_keep_to_shapes_that_keep_bits(half, monkeypatch):
    """Check that fewer rows of queries, single rows and other widths, which give other bits on some processors, do not
    occur."""
    attention, products = set(), set()
    attend, forward = torch.nn.functional.scaled_dot_product_attention, half.forward

    def noted(query, key, *args, **kwargs):
        if kwargs.get("attn_mask") is not None:
            attention.add((query.shape[2], key.shape[2]))
        return attend(query, key, *args, **kwargs)

    def counted(tokens, *args, **kwargs):
        products.add(tokens.numel())
        return forward(tokens, *args, **kwargs)

    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", noted)
    monkeypatch.setattr(half, "forward", counted)
    decode(half, None, 0.0, 3)
    assert attention and all(rows >= 4 and width % 512 == 0 for rows, width in attention)
    assert 2 in products and 1 not in products


def test_half_precision_drafts_chains_unless_branches_are_asked_for(half, target):
    head = make_head("eagle3", half)
    assert not drafter_for(head, half, tree="auto").branches and not drafter_for(head, half).branches
    assert drafter_for(head, half, tree="auto", width=3).branches
    assert drafter_for(make_head("eagle3", target), target, tree="auto").branches  # float32
    assert not load_drafter("suffix", half).branches and load_drafter("suffix", target).branches
