"""Texts of very different lengths in one batch: each is the plain one, and none pays for the longest."""

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from foredraft.heads.target import ragged_cache
from foredraft.heads.target.ragged_cache import spans
from foredraft.heads.target.ragged_tensor import RaggedTensor
from foredraft.inference import Engine, Request
from foredraft.inference.drafters import NgramDrafter
from foredraft.inference.serve.worker import Worker
from tests.support import decoding
from tests.support.architectures import VOCAB, pair
from tests.support.batches import prompt
from tests.support.decoding import alone, requests
from tests.support.drafters import Random, drafters

LENGTHS = (60, 5, 33, 12, 47, 8, 21, 3)


@pytest.fixture(params=["cohorts", "spans"])
def parted(request, monkeypatch) -> str:
    """Split texts of a few tokens into cohorts, and texts longer than what sliding layers keep."""
    monkeypatch.setattr("foredraft.heads.target.sliding_cache.SLACK", 0)
    monkeypatch.setattr("foredraft.inference.batch.INITIAL_ENTRIES", 3)
    monkeypatch.setattr("foredraft.heads.target.cache.KEY_BLOCK", 1)
    if request.param == "cohorts":
        monkeypatch.setattr(ragged_cache, "SHORT", 8)
    else:
        monkeypatch.setattr(ragged_cache, "CALL_COST", 1)
    return request.param


def parts(engine: Engine) -> int:
    return sum(map(len, engine.batch.cache.spans))


def test_spans_spare_padding_where_that_is_worth_a_call():
    lengths = [10, 11, 10, 90, 12, 10]
    assert spans(lengths, 150) == [(slice(0, 3), 11), (slice(3, 4), 90), (slice(4, 6), 12)]
    assert spans(lengths, 200) == [(slice(0, 3), 11), (slice(3, 6), 90)]  # another would spare 2 x 78
    assert spans(lengths, 240) == [(slice(0, 6), 90)]
    assert spans(lengths, 0.5)[0] == (slice(0, 1), 10) and spans([7], 1) == [(slice(0, 1), 7)]
    assert spans([5, 5, 5], 0) == [(slice(0, 3), 5)]


def asked(new: int = 12) -> list[Request]:
    texts = [[1 + token % (VOCAB - 1) for token in prompt(length, length)[0].tolist()] for length in LENGTHS]
    return [Request(text, max_new_tokens=new + number % 3) for number, text in enumerate(texts)]


def run(engine: Engine, requests: list[Request], note: Callable[[], object]) -> list[list[int]]:
    """Run requests that come in the first steps, two in each; note() is called after every step."""
    coming = iter(requests[1:])

    def between(step: int) -> None:
        for request in itertools.islice(coming, 2):
            engine.add(request)
        if step:
            note()

    return decoding.run(engine, requests[:1], between, *requests[1:])[0]


@pytest.mark.parametrize("name", ["random", "medusa", "eagle3", "draft model"])
def test_texts_are_the_plain_ones(target, name, parted):
    """Check greedy and sampled texts that join and leave, and grow."""
    expected, engine, counts = alone(target, requests()), Engine(target, drafters(target)[name], max_num_seqs=4), []
    texts = run(engine, requests(), lambda: counts.append(parts(engine)))
    assert texts == expected and max(counts) > 2


@pytest.mark.parametrize("family", ["mistral", "gemma3_text", "gpt2", "deepseek_v3", "gpt_neox", "gpt_oss"])
def test_texts_of_every_kind_of_attention(family, parted):
    """Check windows, learned positions, and keys of two widths."""
    model, counts = pair(family, "eager" if family == "gpt_oss" else "sdpa").target, []
    expected, engine = alone(model, asked()), Engine(model, Random())
    assert run(engine, asked(), lambda: counts.append(parts(engine))) == expected
    slides = parted == "spans" and model.window is not None
    assert max(counts) == 1 if slides else max(counts) > 2


def test_logits_are_the_same_with_spans_and_without(target, monkeypatch):
    """Check one new token and several, every one of which sees itself."""
    monkeypatch.setattr("foredraft.heads.target.cache.KEY_BLOCK", 1)
    lengths, tokens = [4, 19, 5, 11], torch.cat([prompt(19, seed) for seed in range(4)])
    first = target.new_cache(4, 40)
    target.prefill(tokens, lengths, first)
    first.set_lengths(lengths)
    cache = ragged_cache.RaggedCache(first, 40)
    for new in (1, 3):
        positions, logits = cache.seq_lens + torch.arange(new), []
        for cost, count in ((1 << 30, 1), (1, 4)):
            monkeypatch.setattr(ragged_cache, "CALL_COST", cost)
            cache.note_lengths()
            assert len(cache.spans[0]) == count
            mask = cache.mask(torch.ones(4, new, new, dtype=torch.bool).tril())
            logits.append(target.forward_tree(tokens[:, :new], positions, mask, cache).logits)
        torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-5)


def test_each_part_attends_to_its_own_length(target, parted, monkeypatch):
    """Check that cohorts reserve no more memory, either."""
    engine, keys, seen = Engine(target, NgramDrafter()), list[tuple[int, int]](), []
    attention = F.scaled_dot_product_attention

    def spy(query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Tensor:
        keys.append((len(query), key.shape[2]))
        return attention(query, key, value, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)

    def note() -> None:
        if len(engine.batch.unfinished()) == len(LENGTHS) and not engine.last_was_prefill:
            tokens = sum(rows * width for rows, width in keys) / target.num_layers
            seen.append((tokens / sum(engine.batch.cache.lengths), engine.batch.cache.entries))
        keys.clear()

    run(engine, asked(), note)
    longest = max(LENGTHS) + 14
    assert seen and max(ratio for ratio, _ in seen) < 1.5 < len(LENGTHS) * longest / (sum(LENGTHS) + 8 * 14)
    assert parted == "spans" or max(entries for _, entries in seen) < 0.75 * len(LENGTHS) * longest


def test_what_knows_no_parts_gets_one_tensor():
    two, rows = [torch.ones(1, 2, 3, 4), torch.full((2, 2, 5, 4), 2.0)], [torch.tensor([1]), torch.tensor([0, 2])]
    ragged = RaggedTensor(two, rows, 2, -9.0)
    assert ragged.shape == (3, 2, 5, 4)
    dense = ragged * 1
    assert type(dense) is Tensor and dense[1, :, :3].unique().tolist() == [1] and dense[[0, 2]].unique().tolist() == [2]
    assert dense[1, :, 3:].unique().tolist() == [-9]


class Peak(TorchDispatchMode):
    """Record the most bytes of caches that existed together: nothing else has as many dimensions as a block of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.ndim >= 5:
                self.note(tensor.untyped_storage())
        return out

    def note(self, storage: torch.UntypedStorage) -> None:
        size, key = storage.nbytes(), storage._cdata
        if key not in self.known:
            self.known.add(key)
            self.now += size
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self.free, key, size)

    def free(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


@pytest.mark.parametrize("name", [None, "draft model"])
def test_a_limit_bounds_all_that_is_ever_reserved(target, name, monkeypatch):
    """Count growth and prompts. Entries are of 6 layers with 2 heads of 8 numbers, keys and values."""
    monkeypatch.setattr("foredraft.inference.batch.INITIAL_ENTRIES", 4)
    monkeypatch.setattr("foredraft.heads.target.cache.KEY_BLOCK", 1)
    monkeypatch.setattr(ragged_cache, "SHORT", 16)
    asked, limit, entry = requests(), 2**18 if name is None else 2**19, 6 * 2 * 8 * 2 * 4
    expected, together = alone(target, asked), set()
    worker = Worker(target, name and drafters(target)[name], cache_gib=limit / 2**30, prefix_cache_gib=0)
    engine = worker.engines[0]
    others = engine.batch.max_cache_tokens * entry * 5 // 4  # of the plain engine, which has nothing to do
    with Peak() as peak:
        texts = run(engine, asked, lambda: together.add(len(engine.batch.unfinished())))
    assert texts == expected and max(together) > 1
    assert (limit - others) / 3 < peak.most <= limit - others
