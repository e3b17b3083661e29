"""Layers with a sliding window keep what it can still see: memory, and what depends on what is kept."""

import copy

import pytest
import torch
import transformers as hf

from foredraft.heads import Target
from foredraft.heads.target import sliding_cache
from foredraft.inference import Engine, Request
from foredraft.inference.prefix_cache import PrefixCache
from foredraft.inference.serve.worker import Worker
from tests.support.architectures import SIZES, WINDOW, pair
from tests.support.batches import prompt
from tests.support.decoding import alone, run
from tests.support.drafters import Random

ENTRY = 2 * 2 * 8 * 4  # bytes of a layer's: keys and values of 2 heads of 8 numbers
FAMILIES = ["mistral", "gemma3_text", "gpt_oss"]


def text(length: int, seed: int) -> list[int]:
    return (prompt(length, seed)[0] % 45 + 3).tolist()


def test_a_long_text_keeps_a_window_of_sliding_layers(monkeypatch):
    """Decode eight windows, in chunks, and then trees, and compare with what transformers writes."""
    monkeypatch.setattr("foredraft.heads.target.cache.KEY_BLOCK", 1)
    config = hf.Gemma3TextConfig(**SIZES | {"num_hidden_layers": 6, "head_dim": 8}, sliding_window=64)
    assert config.layer_types.count("sliding_attention") == 5
    plain = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    target, ids = Target(copy.deepcopy(plain)), text(512, 0)
    engine = Engine(target, Random(), prefill_chunk=200)
    engine.add(Request(ids, max_new_tokens=20))
    found, sizes = [], []
    while engine.has_work:
        for output in engine.step():
            found += output.tokens
        for cache in [engine.batch.cache, *(prompts.cache for prompts in engine.prefilling)]:
            if cache is not None:
                sizes.append((cache.capacity, sum(block.nbytes for block in cache.blocks.values())))
    ring = 64 + 16 + sliding_cache.SLACK
    assert len(sizes) > 8 and all(size == ENTRY * (capacity + 5 * ring) for capacity, size in sizes)
    theirs = plain.generate(torch.tensor([ids]), max_new_tokens=20, do_sample=False, eos_token_id=-1, pad_token_id=0)
    assert found == theirs[0, 512:].tolist()


@pytest.fixture
def narrow(monkeypatch):
    """Make sliding layers keep no more than they need."""
    monkeypatch.setattr(sliding_cache, "SLACK", 0)
    monkeypatch.setattr("foredraft.heads.target.cache.KEY_BLOCK", 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_rejected_drafts_that_are_erased_hide_nothing(family, narrow):
    """Write text, then a tree over what its window has left, erase it, and write another."""
    target, ids = pair(family, "eager").target, torch.tensor([text(30, 1)])
    cache, mask = target.new_cache(1, 60, nodes=8), torch.ones(1, 8, 8).tril().bool()
    target.prefill(ids, [30], cache)
    cache.set_lengths([30])
    positions = 30 + torch.arange(8)[None]
    logits = [target.forward_tree(ids[:, at : at + 8], positions, cache.mask(mask), cache).logits for at in (0, 9)]
    for block in cache.blocks.values():
        assert block[:, :, 0, :, cache.columns_of((True,), positions[0])].any()
    cache.erase_uncommitted(0)
    again = target.forward_tree(ids[:, :8], positions, cache.mask(mask), cache).logits
    assert torch.equal(again, logits[0]) and not torch.equal(again, logits[1])
    for key, block in cache.blocks.items():
        block.fill_(float("nan")) if key[0] else None
    cache.erase_uncommitted(0)
    rings = [block for key, block in cache.blocks.items() if key[0]]
    assert rings and all(block.isfinite().all(-1).sum(-1).eq(8).all() for block in rings)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_shared_beginning_beyond_the_window_is_taken_where_a_chunk_ended(family, narrow):
    """Use texts that share 40 tokens, of which a chunk ended at 32; then they continue from each other."""
    target, read = pair(family, "eager").target, []
    asked = [Request(text(40, 0) + text(9, seed), max_new_tokens=8) for seed in (1, 2)]
    expected = alone(target, asked)
    asked.append(Request(asked[1].prompt + expected[1] + text(3, 3), max_new_tokens=8))
    expected += alone(target, asked[2:])
    engine = Engine(target, Random(), prefill_chunk=16, prefixes=PrefixCache(2**24, block=4))
    for request, answer in zip(asked, expected, strict=True):
        seen = engine.prefixes.hits
        assert run(engine, [request])[0] == [answer]
        read.append(engine.prefixes.hits - seen)
    assert read[:2] == [0, 32] and read[2] >= 48
    assert all(block.is_whole for block in engine.prefixes.find(engine.namespace, asked[2].prompt, 0)[-1:])
    assert engine.prefixes.bytes == sum(block.bytes for block in engine.prefixes.blocks.values())


def test_chunks_of_a_prompt_that_ends_in_nan_are_not_kept(narrow, monkeypatch):
    target, read = pair("gemma3_text", "eager").target, Target.forward
    engine = Engine(target, prefill_chunk=16, prefixes=PrefixCache(2**24, block=4))
    poison = lambda self, *args, **kwargs: (lambda out: out._replace(logits=out.logits * float("nan")))(  # noqa: E731
        read(self, *args, **kwargs)
    )
    monkeypatch.setattr(Target, "forward", poison)
    request, kept = Request(text(40, 0), max_new_tokens=3), []
    texts, reasons = run(engine, [request], lambda step: kept.append(len(engine.prefixes.blocks)))
    assert texts == [[]] and reasons == ["error"] and max(kept) > 0
    assert not engine.prefixes.blocks and engine.prefixes.bytes == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_a_short_rest_beside_a_long_prompt(family, monkeypatch):
    """Check that its padding is at places where nothing of its text may be lost."""
    monkeypatch.setattr(sliding_cache, "SLACK", 8)
    target = pair(family, "eager").target
    asked = [Request(text(48, 0)[:length] + text(more, 1), max_new_tokens=8) for length, more in ((48, 1), (0, 70))]
    expected = alone(target, asked)
    engine = Engine(target, Random(), prefixes=PrefixCache(2**24, block=4))
    run(engine, [Request(asked[0].prompt[:48], max_new_tokens=1)])
    assert run(engine, asked)[0] == expected and engine.prefixes.hits == 48


@pytest.mark.parametrize("what", ["preempt", "swap"])
@pytest.mark.parametrize("family", FAMILIES)
def test_texts_go_on_after_they_were_interrupted(family, what, narrow):
    target = pair(family, "eager").target
    asked = [Request(text(length, length), max_new_tokens=12) for length in (40, 7, 21)]
    engine, expected = Engine(target, Random()), alone(target, asked)
    wide = type("Wide", (Random,), {"nodes": 20})()  # another ring
    interrupt = engine.preempt if what == "preempt" else lambda: engine.swap(wide)
    assert run(engine, asked, lambda step: interrupt() if step in (3, 5) else None)[0] == expected


def test_a_limit_counts_what_is_kept(narrow, monkeypatch):
    """Let two of four layers slide, with rings of 6 entries and of 20."""
    monkeypatch.setattr("foredraft.inference.batch.INITIAL_ENTRIES", 4)
    target, size = pair("gemma3_text", "eager").target, 100 * 4 * ENTRY
    worker = Worker(target, Random(), cache_gib=2 * 2.25 * size / 2**30, prefix_cache_gib=0)
    engines, rings = worker.engines, (WINDOW + 16, WINDOW + 2)
    for engine, ring in zip(engines, rings, strict=True):
        assert engine.batch.max_cache_tokens == 100 and target.sliding(engine.drafter.nodes).ring == ring
        most = engine.batch.max_text_tokens()
        assert 100 - ring // 2 - 1 <= (most + 2 * engine.drafter.nodes) / 2 <= 100 - ring // 2
        with pytest.raises(ValueError, match="exceeds the cache of 100 tokens"):
            engine.check(Request(text(most, 0), max_new_tokens=1))
    asked, used = [Request(text(40 + number, number), max_new_tokens=12) for number in range(6)], []
    expected = alone(target, asked)

    def note(step: int) -> None:
        found = [engines[0].batch.cache, *(prompts.cache for prompts in engines[0].prefilling)]
        caches = [cache for cache in found if cache is not None]
        size = sum(block.nbytes for cache in caches for block in cache.blocks.values())
        assert size == 0 or 0 <= 4 * ENTRY * sum(cache.entries for cache in caches) - size < 6 * 4 * ENTRY
        used.append((len(engines[0].batch.unfinished()), size))

    assert run(engines[0], asked, note)[0] == expected
    assert max(rows for rows, _ in used) == 2 and size / 2 < max(size for _, size in used) <= 2.25 * size
