"""Training attention by FlexAttention's kernel, whose masks and tables are ours. A CPU has no backward pass of it."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from foredraft.heads.attention import block_attention, flex, step_attention
from foredraft.heads.attention.flex import NO_KEY
from foredraft.heads.attention.masks import PackedMask
from foredraft.heads.attention.text_attention import attend_text
from foredraft.train.run import main as train
from tests.support import nightly_but
from tests.support.batches import packed
from tests.support.head_factory import BLOCK_KINDS
from tests.support.processes import SMALL

# (lengths of the documents) of each row
ROWS = {"short": [(15, 10), (4, 21)], "tiles": [(100, 200, 20), (320,)], "whole tiles": [(256,), (130, 126)]}


def dense(mask) -> torch.Tensor:
    """Return (batch, queries, keys) bool: the result of the function of indices."""
    queries, keys = mask.seq_lengths
    index = [torch.arange(n) for n in (len(mask.kv_num_blocks), 1, queries, keys)]
    return mask.mask_mod(*torch.meshgrid(*index, indexing="ij"))[:, 0]


def tiles(counts: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return (batch, tiles of queries, tiles of keys) bool: those that a table names."""
    named = torch.arange(indices.shape[-1]) < counts[..., None]
    return torch.zeros(indices.shape, dtype=torch.bool).scatter(-1, indices.long(), named)[:, 0]


def check_tables(mask, exact: bool) -> None:
    queries, keys = mask.seq_lengths
    best = create_block_mask(mask.mask_mod, len(mask.kv_num_blocks), None, queries, keys, device="cpu")
    ours, theirs = (
        (tiles(m.kv_num_blocks, m.kv_indices), tiles(m.full_kv_num_blocks, m.full_kv_indices)) for m in (mask, best)
    )
    assert not (ours[0] & ours[1]).any()
    assert not (ours[1] & ~theirs[1]).any() and not ((theirs[0] | theirs[1]) & ~(ours[0] | ours[1])).any()
    if exact:
        assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])


@pytest.mark.parametrize("window", [None, 7, 150])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_a_slot_sees_its_text(rows, window):
    text = packed(*rows)
    mask, columns = flex.text_mask(text.document_starts(), window), torch.arange(text.tokens.shape[1])
    seen = text.mask() & (columns[:, None] - columns < (window or NO_KEY))
    assert torch.equal(dense(mask), seen)
    assert torch.equal(PackedMask(text.document_starts(), torch.float32, window).dense() == 0, seen[:, None])
    check_tables(mask, exact=True)


def test_a_mask_without_memory_is_a_tensor_for_others():
    mask = PackedMask(packed(*ROWS["short"]).document_starts(), torch.float32, 7)
    assert torch.equal(mask[..., :5], mask.dense()[..., :5])
    assert mask.double().dtype == torch.float64 and mask.shape == mask.dense().shape


@pytest.mark.parametrize(
    ("slots", "everywhere"), [(3, True), (3, False), (16, False), pytest.param(16, True, marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (True, 7), (True, 150)])
def test_a_block_sees_its_text_and_itself(slots, causal, window, everywhere):
    text = packed(*ROWS["tiles"])
    chosen = torch.tensor([[-1, 0, 99, 130, 310], [1, 2, 140, 150, 319]])
    blocks = block_attention.Blocks.of(text if everywhere else text._replace(anchors=chosen), slots)
    mask = flex.blocks_mask(blocks.first, blocks.last, slots, blocks.length, causal, window)
    inside = block_attention.intra_block_mask(slots, causal, window, torch.device("cpu"))
    expected = block_attention.chunk_mask(blocks.first, blocks.last, inside, blocks.length, window)
    assert torch.equal(dense(mask), expected)
    check_tables(mask, exact=False)


def test_masks_are_made_once_for_a_batch_and_go_with_it():
    before, starts = len(flex.MASKS), packed(*ROWS["short"]).document_starts()
    assert flex.text_mask(starts) is flex.text_mask(starts)
    block = flex.blocks_mask(starts, starts, 2, 25, True, None)
    assert block is flex.blocks_mask(starts, starts, 2, 25, True, None)
    assert block is not flex.blocks_mask(starts, starts, 2, 25, False, None)
    assert len(flex.MASKS) == before + 1
    del starts
    assert len(flex.MASKS) == before


def plainly(q, keys, values, mask, scale=None):
    """Compute `flex.attend` with all scores at once."""
    index = [torch.arange(n) for n in (len(q), 1, q.shape[2], keys.shape[2])]
    seen = mask.mask_mod(*torch.meshgrid(*index, indexing="ij"))
    keys, values = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (keys, values))
    scores = (q @ keys.mT * (scale or q.shape[-1] ** -0.5)).masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ values, scores.logsumexp(-1)


def by_kernel(q, keys, values, mask, scale=None):
    """Run the kernel's forward pass; on a CPU it returns no sums."""
    out = torch.compile(flex_attention, dynamic=False)(q, keys, values, block_mask=mask, enable_gqa=True, scale=scale)
    return out, plainly(q, keys, values, mask, scale)[1]


@pytest.mark.parametrize(("window", "sinks"), [(7, torch.tensor([-1.0, 0.5, 2.0, 0.0])), (None, None)])
@pytest.mark.parametrize("attend", nightly_but([by_kernel, plainly], plainly))
def test_packed_rows_of_a_target_attend_by_it_as_without(attend, window, sinks, monkeypatch):
    monkeypatch.setattr(flex, "attend", attend)
    q, keys, values = (torch.randn(2, heads, 320, 16) for heads in (4, 2, 2))
    starts, found = packed(*ROWS["tiles"]).document_starts(), []
    for by_flex in (True, False):
        monkeypatch.setattr(flex, "is_supported", lambda q, keys, by_flex=by_flex: by_flex)
        found.append(attend_text(q, keys, values, starts, window, scale=0.3, sinks=sinks))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kernel", [pytest.param(True, marks=pytest.mark.nightly), False])
def test_steps_and_blocks_attend_by_it_as_without(kernel, monkeypatch):
    """Compare the kernel's forward, and its definition with all gradients."""
    text, slots = packed(*ROWS["tiles"]), 4
    length, dtype = text.tokens.shape[1], torch.float32 if kernel else torch.float64
    starts = text._replace(anchors=torch.tensor([[-1, 5, 180], [1, 140, 319]]))
    torch.manual_seed(0)
    q, own_q, own_keys, own_values, *others = (
        torch.randn(2, heads, n, 16, dtype=dtype, requires_grad=not kernel)
        for heads, n in ((4, length), (4, 3 * slots), *[(2, 3 * slots)] * 2, *[(2, length)] * 6)
    )
    pairs, found = list(zip(others[::2], others[1::2], strict=True)), []
    monkeypatch.setattr(flex, "attend", by_kernel if kernel else plainly)
    for by_flex in (True, False):
        monkeypatch.setattr(flex, "is_supported", lambda q, keys, by_flex=by_flex: by_flex)
        steps = [step_attention.at_start(*pair, step, text) for step, pair in enumerate(pairs)]
        outs = [step_attention.attend_steps(q, steps[: n + 1], text.document_starts()) for n in range(3)]
        blocks = block_attention.Blocks.of(starts, slots)
        outs.append(block_attention.attend_blocks(own_q, pairs[0], (own_keys, own_values), blocks, True, 100))
        if not kernel:
            total = torch.stack([(out * torch.linspace(-1, 1, 16)).sum() for out in outs]).sum()
            outs += torch.autograd.grad(total, [q, own_q, own_keys, own_values, *others])
        found.append(outs)
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6 if kernel else 1e-9)


def test_where_the_kernel_does_not_work_a_warning_says_why_and_blocks_serve():
    with pytest.warns(
        UserWarning, match="FlexAttention does not work on cpu, so training is slower: .*backward on CPU"
    ):
        assert not flex.kernel_available(torch.device("cpu"), torch.float32, 4, 2, 16)


def test_a_full_device_says_nothing_of_the_kernel(monkeypatch):
    """Check that it is not remembered: otherwise a device that is full at the first step would train by blocks to the
    end."""
    asked = []

    def full(*args, **kwargs):
        asked.append(args)
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(flex, "attend", full)
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            flex.kernel_available(torch.device("cpu"), torch.float32, 2, 1, 24)
    assert len(asked) == 2


@pytest.mark.parametrize("kind", nightly_but(["eagle3", "dflash", "hydra_pp"]))
def test_a_run_compiles_few_shapes(kind, tiny_path, folder, monkeypatch, call):
    """Count the shapes of a run that trains, measures held-out text and passes the parity gate: a GPU may need a minute to
    compile one."""
    shapes = set()

    def counted(q, keys, values, mask, scale=None):
        shapes.add((len(q), q.shape[2], keys.shape[2]))
        return plainly(q, keys, values, mask, scale)

    monkeypatch.setattr(flex, "attend", counted)
    monkeypatch.setattr(flex, "is_supported", lambda q, keys: True)
    given = [f"target.path={tiny_path}", f"data.path={folder}", "output_dir=out", f"head={kind}"]
    ended = call(train, *SMALL, *given, "trainer.max_steps=7", "eval.steps=3")
    assert ended.code == 0 and 3 <= len({*shapes}) <= (6 if kind in BLOCK_KINDS else 3), (shapes, ended.err[-500:])
