"""Context parallelism: parts of rows in several processes learn what whole rows learn in one."""

import copy
import json
import pickle
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from foredraft.heads import Target
from foredraft.heads.attention import block_attention, flex, step_attention
from foredraft.heads.attention.row_parts import RowParts, columns_of
from foredraft.heads.attention.text_attention import attend_text
from foredraft.heads.base import PackedBatch, draft_loss_mask
from foredraft.heads.eagle import LayerHead
from foredraft.train.checks import check_context_parallel
from foredraft.train.hidden_states.storage import store
from foredraft.train.module import DistillationModel
from foredraft.train.runtime import distributed
from foredraft.train.runtime.context_parallel import ContextParallel, received, rounded_up, sendable
from tests.attention.test_flex import check_tables, dense, plainly
from tests.support import nightly_but
from tests.support.architectures import pair
from tests.support.batches import packed
from tests.support.configs import composed
from tests.support.head_factory import BLOCK_KINDS, OVERRIDES, PLAIN_KINDS, criterion, make_head
from tests.support.processes import end, succeeded, torchrun
from tests.support.tiny import tiny_model

LENGTH, MARGIN = 320, 3
SIZE = LENGTH // 4


def test_each_process_holds_two_parts_and_margins():
    both = [[[*range(-2, 6)], [*range(10, 18)]], [[*range(2, 10)], [*range(6, 14)]]]
    assert columns_of(16, processes=2, margin=2).tolist() == both
    own = columns_of(24, 3, 1)[..., 1:-1].flatten()
    assert sorted(own.tolist()) == [*range(24)]


def parts_of(starts: Tensor, process: int) -> tuple[RowParts, Tensor]:
    """Return the parts of rows that one of two processes holds, and its columns (2, width)."""
    columns = columns_of(LENGTH, 2, MARGIN)[process].clamp(0, LENGTH - 1)
    of_rows = starts[:, columns].flatten(0, 1)
    return RowParts(columns.repeat(len(starts), 1), of_rows, MARGIN, LENGTH, cast(Any, None)), columns


def cut(x: Tensor, columns: Tensor) -> Tensor:
    """Cut (batch, heads, length, dim) into the parts (2 * batch, heads, width, dim) of a process."""
    return x[:, :, columns].transpose(1, 2).flatten(0, 1)


def test_parts_of_rows_have_the_noise_of_whole_ones(target: Target, monkeypatch: pytest.MonkeyPatch):
    head = make_head("eagle", target).train()
    monkeypatch.setattr(LayerHead, "forward", lambda head, states, embeddings, text: states)
    text = packed((100, 200, 20), (320,))
    parts, columns = parts_of(text.document_starts(), 0)
    part = PackedBatch(*(x[:, columns].flatten(0, 1) for x in text[:4]), parts=parts)
    most = [head(torch.zeros(*one.tokens.shape, 32), None, one).abs().max() for one in (text, part)]
    torch.testing.assert_close(most[0], most[1], rtol=0.01, atol=0.0)


@pytest.mark.parametrize("window", [None, 7, 150])
@pytest.mark.parametrize("process", [0, 1])
def test_the_tables_of_parts_are_those_of_the_definition(process, window):
    text = packed((100, 200, 20), (320,))
    parts, columns = parts_of(text.document_starts(), process)
    assert text._replace(parts=parts).document_starts() is parts.starts
    mask = flex.text_mask(parts.starts, window, parts)
    near = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH) < (window or LENGTH)
    assert torch.equal(dense(mask), (text.mask() & near)[:, columns.flatten()])
    check_tables(mask, exact=False)


@pytest.mark.parametrize("by_flex", [True, False])
@pytest.mark.parametrize("process", [0, 1])
def test_parts_attend_as_whole_rows(process, by_flex, monkeypatch):
    text, slots = packed((100, 200, 20), (320,)), 4
    monkeypatch.setattr(flex, "attend", plainly)
    torch.manual_seed(0)
    q, *others = (torch.randn(2, heads, LENGTH, 16, dtype=torch.float64) for heads in (4, *[2] * 6))
    pairs = list(zip(others[::2], others[1::2], strict=True))
    starts = text.document_starts()
    parts, columns = parts_of(starts, process)
    inner = slice(MARGIN + 2, MARGIN + SIZE)  # of a part, where no draft of these three steps began before its margin

    def own(x: Tensor) -> Tensor:
        return cut(x, columns)[:, :, inner]

    whole = [step_attention.at_start(*pair, step, text) for step, pair in enumerate(pairs)]
    expected = own(step_attention.attend_steps(q, whole, starts))
    anchors = torch.tensor([[5, 90, 250], [1, 140, 319]])
    blocks = block_attention.Blocks.of(text._replace(anchors=anchors), slots)
    own_q, own_keys, own_values = (torch.randn(2, heads, 3 * slots, 16, dtype=torch.float64) for heads in (4, 2, 2))
    by_blocks = block_attention.attend_blocks(own_q, pairs[0], (own_keys, own_values), blocks, True, 100)
    of_text = own(attend_text(q, *pairs[0], starts, window=50))

    monkeypatch.setattr(flex, "is_supported", lambda q, keys: by_flex)
    later = [step_attention.at_start(*(cut(x, columns) for x in pair), step, text) for step, pair in enumerate(pairs)]
    attended = step_attention.attend_steps(cut(q, columns), [pairs[0], *later[1:]], parts.starts, parts)
    torch.testing.assert_close(attended[:, :, inner], expected)
    monkeypatch.setattr(RowParts, "gather", lambda self, keys, values: pairs[0])
    ours = attend_text(cut(q, columns), *(cut(x, columns) for x in pairs[0]), parts.starts, 50, parts=parts)
    torch.testing.assert_close(ours[:, :, inner], of_text)

    places = torch.stack([anchors - part[0] for part in columns], dim=1).flatten(0, 1)
    real = (places >= MARGIN) & (places < MARGIN + SIZE) & (columns[:, :1] > 0).repeat(2, 1)
    here = text._replace(tokens=torch.zeros(4, columns.shape[1]), anchors=places.masked_fill(~real, -1), parts=parts)
    in_parts = block_attention.Blocks.of(here, slots)
    queries, keys, values = (x.repeat_interleave(2, 0) for x in (own_q, own_keys, own_values))
    found = block_attention.attend_blocks(queries, pairs[0], (keys, values), in_parts, True, 100)
    chosen = real.repeat_interleave(slots, 1)
    assert real.any()
    torch.testing.assert_close(found.transpose(1, 2)[chosen], by_blocks.repeat_interleave(2, 0).transpose(1, 2)[chosen])


RUNS = {  # processes, how many share a row, and what they learn
    (2, 2): ["eagle3", "hydra_pp", "dflash", "p_eagle", "eagle3:gemma3_text"],
    (4, 2): ["eagle3", "dflash"],
    (4, 4): [*PLAIN_KINDS, "eagle3:gpt_oss", "eagle3:mistral", "draft_model:gemma3_text"],
}


@pytest.mark.parametrize(("processes", "share"), nightly_but(RUNS))
def test_processes_that_share_rows_learn_what_one_does(processes: int, share: int, tmp_path: Path):
    assert {"dflash", "dspark", "p_eagle"} <= {*BLOCK_KINDS} & {*PLAIN_KINDS}
    kinds = RUNS[processes, share]
    ended = succeeded(end(torchrun(__file__, "96", str(share), *kinds, cwd=tmp_path, processes=processes)))
    found = json.loads(ended.out.splitlines()[-1])
    assert found.keys() == {*kinds}
    assert max(found.values()) < 1e-5, found


def test_stored_features_of_any_dtype_travel():
    part = {"tokens": torch.arange(4), "anchors": None}
    part |= store("features", torch.randn(1, 4, 8), "float8", 2) | store("last", torch.randn(1, 4, 4), "bfloat16", 1)
    again = received(pickle.loads(pickle.dumps(sendable(part))))
    assert again.keys() == part.keys() and again["features"].dtype == torch.float8_e4m3fn
    assert torch.equal(again["features"].float(), part["features"].float()) and torch.equal(again["last"], part["last"])


def test_few_numbers_of_anchors_are_compiled():
    sizes = [rounded_up(count) for count in range(8193)]
    assert all(count <= size <= max(32, 1.25 * count) + 32 for count, size in enumerate(sizes))
    assert len({*sizes}) < 40


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["context_parallel=3"], "context_parallel=3 must divide the 4 processes"),
        (["context_parallel=0"], "context_parallel=0 must divide the 4 processes"),
        (["context_parallel=null"], "context_parallel=None must divide the 4 processes"),
        (["context_parallel=2", "strategy=zero2"], "strategy=ddp or fsdp, and this is zero2"),
        (["context_parallel=4", "max_length=100"], "8 equal parts: max_length=100 must be a multiple of that"),
    ],
)
def test_rows_that_cannot_be_shared(settings, message):
    with pytest.raises(ValueError, match=message):
        cfg = composed("train", "strategy=ddp", *settings)
        check_context_parallel(cfg, 4, cfg.strategy)


# One of the processes: LENGTH, how many share a row, KIND[:FAMILY] of a head and its target ...


def row(length: int, number: int, vocab_size: int) -> dict[str, Tensor]:
    """Return a row of four documents, of which one is long and one is padding, with gaps in the loss."""
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(3, vocab_size, (1, length), generator=generator)
    sizes = [length // 8 + number, length // 2 + 3, length // 8 - 2]
    sizes.append(length - sum(sizes))
    documents = torch.arange(4).repeat_interleave(torch.tensor(sizes))[None]
    positions = torch.cat([torch.arange(size) for size in sizes])[None]
    documents[documents == 3] = -1
    loss_mask = (documents >= 0) & (torch.rand(1, length, generator=generator) < 0.8)
    weights = torch.rand(1, length, generator=generator)
    return {
        "tokens": tokens,
        "loss_mask": loss_mask,
        "documents": documents,
        "positions": positions,
        "weights": weights,
    }


def learn(model: DistillationModel, batches: list[dict[str, Any]]) -> list[Tensor]:
    """Return the loss of batches, the hits and the gradients."""
    model.zero_grad()
    loss, hits = torch.zeros(()), torch.zeros(model.head.depth)
    for batch in batches:
        outcome = model(**batch)
        outcome.loss.backward()
        loss, hits = loss + outcome.loss.detach(), hits + outcome.hits
    return [loss, hits, *(weight.grad for weight in model.parameters() if weight.grad is not None)]


def compare(length: int, name: str, context: ContextParallel) -> float:
    """Return the largest difference, relative to the largest number of its tensor."""
    kind, _, family = name.partition(":")
    target = pair(family, "eager" if family == "gpt_oss" else "sdpa").target if family else Target(tiny_model())
    torch.manual_seed(0)
    small = {"draft_vocab_size": 30} if family and "draft_vocab_size" in OVERRIDES.get(kind, {}) else {}
    model = criterion(kind, make_head(kind, target, **small), target).eval()
    model.head.on_train_begin(target)
    rows = [row(length, number, target.vocab_size) for number in range(distributed.world_size())]
    whole = [some | model.prepare(PackedBatch.of(some), step=0) for some in rows]
    depths = range(1, model.head.depth + 1)
    masks = [[draft_loss_mask(PackedBatch.of(some), depth).sum() for depth in depths] for some in whole]
    model.num_items = torch.tensor(masks).sum(0)
    alone = [tensor.clone() for tensor in learn(model, copy.deepcopy(whole))]
    parts = context.exchange(whole[distributed.rank()], model.head.depth)
    together = learn(model, parts)
    assert isinstance(RowParts(**parts[0]["parts"]), RowParts)
    assert len(alone) == len(together) > 2
    found = []
    for ours, theirs in zip(together, alone, strict=True):
        dist.all_reduce(ours)
        found.append(((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-6)).item())
    return max(found)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    context = ContextParallel(int(sys.argv[2]))
    found = {name: compare(int(sys.argv[1]), name, context) for name in sys.argv[3:]}
    if distributed.rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()
