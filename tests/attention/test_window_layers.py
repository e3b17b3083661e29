"""Layers with a sliding window keep what it can still see: memory, and what depends on what is kept."""

import copy
from types import SimpleNamespace

import pytest
import torch
import transformers as hf

from foredraft.heads import Target
from foredraft.heads.attention.masks import Masks, mentions_windows, within_window
from foredraft.heads.caches import kv_cache, layers
from foredraft.heads.caches.device import FEWEST_ROWS
from foredraft.heads.caches.kv_cache import KVCache
from foredraft.inference import Engine, Request
from foredraft.inference.serve.worker import Worker
from tests.support.architectures import SIZES, WINDOW, pair
from tests.support.batches import prompt, states_of
from tests.support.decoding import Random, alone, run

ENTRY = 2 * 2 * 8 * 4  # bytes of a layer's: keys and values of 2 heads of 8 numbers
FAMILIES = ["mistral", "gemma3_text", "gpt_oss"]


def text(length: int, seed: int) -> list[int]:
    return (prompt(length, seed)[0] % 45 + 3).tolist()


def test_a_long_text_keeps_a_window_of_sliding_layers(monkeypatch):
    """Decode eight windows, in chunks, and then trees, and compare with what transformers writes."""
    monkeypatch.setattr("foredraft.heads.caches.kv_cache.KEY_BLOCK", 1)
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
        cache = engine.slots.open_cache()
        sizes.append((cache.capacity, sum(states.nbytes for states in states_of(cache))))
    ring = 64 + 16 + layers.SLACK
    assert len(sizes) > 8 and all(size == ENTRY * (capacity + 5 * ring) for capacity, size in sizes)
    theirs = plain.generate(torch.tensor([ids]), max_new_tokens=20, do_sample=False, eos_token_id=-1, pad_token_id=0)
    assert found == theirs[0, 512:].tolist()


def test_a_window_is_as_long_as_its_config_says_and_off_where_that_says_so():
    model = pair("mistral", "sdpa").target.model
    for use, window in ((None, 4), (True, 4), (False, None)):
        config = SimpleNamespace(sliding_window=4, use_sliding_window=use)
        assert Masks.of(config, model) == Masks(window, mixed=False)  # type: ignore[arg-type]
    assert mentions_windows("sys")  # of a module without Python code nothing is known
    entries = torch.arange(5)[None]
    seen = Masks(4, mixed=False)(torch.ones(1, 1, 5, dtype=torch.bool), torch.float32, entries[:, 4:], entries, entries)
    assert (seen == 0).flatten().tolist() == [False, True, True, True, True]


def test_a_text_goes_on_from_as_far_before_its_end_as_a_ring_has_spare_entries():
    sliding = layers.Sliding(frozenset({0}), window=8, nodes=16)
    cache = KVCache(2, num_slots=1, capacity=1000, device="cpu", sliding=sliding)
    assert cache.can_rewind(500, 500 - layers.SLACK) and not cache.can_rewind(500, 499 - layers.SLACK)
    assert cache.can_rewind(layers.SLACK + 8, 8) and not cache.can_rewind(500, 0)
    last = sliding.ring - sliding.nodes  # the longest text whose first entry no draft has replaced
    assert cache.can_rewind(last, 5) and not cache.can_rewind(last + 1, 5)


@pytest.mark.parametrize("rows", [[0, 1], [2, 0]])
def test_texts_of_all_lengths_go_on_together(rows, monkeypatch):
    """Compare logits after parts of a long and of a short text, in slots next to each other or not, with those of the text
    alone. The third part is as long as a tree."""
    monkeypatch.setattr("foredraft.heads.caches.kv_cache.KEY_BLOCK", 1)
    target, texts, ends = pair("mistral", "sdpa").target, [text(300, 0), text(60, 1)], [0, 0]
    cache = target.new_cache(3, len(texts[0]), nodes=8)
    assert cache.sliding.ring < 160
    cache.use(rows)
    for counts in ([160, 7], [10, 2], [8, 5], [100, 40]):
        parts = [one[end : end + count] for one, end, count in zip(texts, ends, counts, strict=True)]
        tokens = torch.tensor([part + [0] * (max(counts) - len(part)) for part in parts])
        logits = target.prefill(tokens, counts, cache).logits[:, 0]
        ends = [end + count for end, count in zip(ends, counts, strict=True)]
        cache.set_lengths(ends)
        for one, end, row in zip(texts, ends, logits, strict=True):
            torch.testing.assert_close(
                row, target.forward(torch.tensor([one[:end]])).logits[0, -1], rtol=1e-4, atol=1e-4
            )


def test_a_window_that_a_model_ignores_limits_nothing():
    """Check a config with a word that Llama's code never reads: all texts are those of forwards of the whole text."""
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(hf.LlamaConfig(**SIZES, sliding_window=WINDOW)).eval()
    ids, found = text(40, 0), []
    with torch.inference_mode():
        for _ in range(12):
            found.append(int(model(torch.tensor([ids + found]), use_cache=False).logits[0, -1].argmax()))
    target = Target(model)
    for settings in ({}, {"prefill_chunk": 7}):
        assert run(Engine(target, Random(), **settings), [Request(ids, max_new_tokens=12)])[0] == [found]


@pytest.fixture
def narrow(monkeypatch):
    """Make sliding layers keep no more than they need."""
    monkeypatch.setattr(layers, "SLACK", 0)
    monkeypatch.setattr("foredraft.heads.caches.kv_cache.KEY_BLOCK", 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_rejected_drafts_that_are_erased_hide_nothing(family, narrow):
    """Write text, then a tree over what its window has left, erase it, and write another."""
    target, ids = pair(family, "eager").target, torch.tensor([text(30, 1)])
    cache, mask = target.new_cache(1, 60, nodes=8), torch.ones(1, 8, 8).tril().bool()
    target.prefill(ids, [30], cache)
    cache.set_lengths([30])
    positions = 30 + torch.arange(8)[None]
    logits = [target.forward_tree(ids[:, at : at + 8], positions, cache.mask(mask), cache).logits for at in (0, 9)]
    for layer in cache.kv_layers:
        assert all(states[0, :, layer.columns(positions[0])].any() for states in layer.states)
    cache.erase_uncommitted(0)
    again = target.forward_tree(ids[:, :8], positions, cache.mask(mask), cache).logits
    assert torch.equal(again, logits[0]) and not torch.equal(again, logits[1])
    rings = [states for layer in cache.kv_layers if isinstance(layer, layers.WindowLayer) for states in layer.states]
    for states in rings:
        states.fill_(float("nan"))
    cache.erase_uncommitted(0)
    assert rings and all(states.isfinite().all(-1).sum(-1).eq(8).all() for states in rings)


def test_a_ring_shows_its_first_entry_and_hides_empty_places():
    """A short text next to a long one is seen whole, through the ring that the long one needs."""
    seen, cached = torch.ones(1, 1, 4).bool(), torch.tensor([[0, 1, -1, -1]])
    shown = Masks(window=3, mixed=False)(seen, torch.float32, torch.tensor([[2]]), torch.arange(4)[None], cached)
    assert (shown == 0).tolist() == [[[[True, True, False, False]]]]


def test_padding_after_the_last_entry_of_a_forward_is_hidden_as_that_entry_is():
    cached = torch.tensor([[1, 2, 4, 5]])  # the forward sees four entries
    for last in (False, True):
        seen = torch.tensor([[[True, True, True, last]]])
        shown = Masks(window=9, mixed=False)(seen, torch.float32, torch.tensor([[3]]), torch.arange(4)[None], cached)
        assert (shown == 0).tolist() == [[[[True, True, last, last]]]]


def test_a_forward_sees_the_whole_blocks_that_uncommitted_entries_reach():
    cache, widths = pair("mistral", "eager").target.new_cache(1, 200), []
    cache.key_block = 16
    cache.set_lengths([63])
    for cache.num_uncommitted in (0, 1):
        widths.append(cache.width(1))
    assert widths == [64, 80] and kv_cache.key_block(torch.device("cuda")) == 1
    cache.clear()
    assert cache.lengths == [0] and cache.causal_mask(4) is None
    cache.keeps_bits = True  # also an empty cache has a mask, as one with text has
    assert torch.equal(cache.causal_mask(4)[0, :, :4], torch.ones(4, 4).tril().bool())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_slot_is_erased_from_its_first_entry_on(family, narrow):
    target = pair(family, "eager").target
    cache = target.new_cache(2, 60)
    target.prefill(torch.tensor([text(30, 1)] * 2), [30, 30], cache)
    for states in states_of(cache):
        states[:, :, :30] = float("nan")
    cache.erase(1)
    assert states_of(cache) and not any(states[1].any() for states in states_of(cache))
    assert all(states[0].isnan().any() for states in states_of(cache))


def test_a_captured_forward_sees_no_more_columns_than_there_are():
    cache, widths = KVCache(1, num_slots=1, capacity=300, device="cpu"), []
    cache.graphs = SimpleNamespace(active=True)
    for length in (0, 245, 280):
        cache.set_lengths([length])
        cache.set_bucket(12)
        widths.append(cache.kv_bucket)
    assert widths == [256, 300, 300]


@pytest.mark.parametrize("rows", [[0, 1, 2], [2, 0], [1]])
def test_accepted_entries_move_behind_the_text_of_their_slot(rows):
    cache = KVCache(1, num_slots=3, capacity=40, device="cpu")
    cache.slot_lengths = [4, 9, 7]
    cache.rows = []
    cache.use(rows)
    (layer,) = cache.layers
    assert not cache.kv_layers
    layer.update(*(torch.zeros(len(rows), 2, 5, 3) for _ in range(2)))
    columns = torch.arange(layer.num_columns, dtype=torch.float32)[None, None, :, None]
    for states in layer.states:
        states.copy_(columns + 1000 * torch.arange(3)[:, None, None, None])
    cache.commit([[0, 2, 4]] * len(rows))
    assert layer.get_seq_length() == cache.get_seq_length() == max(cache.lengths) and layer.get_max_length() == 40
    for slot, length in enumerate([4, 9, 7]):
        moved = [length, length + 2, length + 4] if slot in rows else [length, length + 1, length + 2]
        for states in layer.states:
            found = states[slot, :, : length + 3] - 1000 * slot
            assert (found == torch.tensor([*range(length), *moved])[None, :, None]).all()
        assert cache.slot_lengths[slot] == length + 3 * (slot in rows)


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_memory_of_a_cache_is_zero_and_can_be_written(platform, monkeypatch):
    monkeypatch.setattr(layers.sys, "platform", platform)
    states = layers.zeros((2, 3, 5), torch.bfloat16, torch.device("cpu"))
    assert states.shape == (2, 3, 5) and states.dtype == torch.bfloat16 and not states.any()
    states[1] += 2
    assert states.sum() == 30
    assert layers.zeros((2, 3), torch.bfloat16, torch.device("meta")).shape == (2, 3)


def test_a_long_prompt_writes_each_place_of_a_ring_once(narrow, monkeypatch):
    """Two entries for one place would be a race on a GPU."""
    target, written, write = pair("mistral", "eager").target, [], layers.WindowLayer.write
    monkeypatch.setattr(layers.WindowLayer, "write", lambda *a: written.append(a[1]) or write(*a))
    cache = target.new_cache(1, 120, nodes=8)
    target.prefill(torch.tensor([text(100, 1)]), [100], cache)
    assert written and all(len(set(columns[0].tolist())) == columns.shape[1] for columns in written)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_text_is_continued_at_its_end_or_shortly_before(family, narrow, monkeypatch):
    """Use texts that share 40 tokens, after which the first one's rings have gone on. Then continue the second one, and
    replace its last tokens."""
    monkeypatch.setattr(layers, "SLACK", 3 + Random.nodes)
    target = pair(family, "eager").target
    engine = Engine(target, Random(), prefill_chunk=16, max_num_seqs=3, slot_tokens=150, reuse_prefixes=True)

    def ask(prompt: list[int]) -> tuple[list[int], int]:
        request, seen = Request(prompt, max_new_tokens=8), engine.slots.hits
        expected = alone(target, [request])
        assert run(engine, [request])[0] == expected
        return prompt + expected[0], engine.slots.hits - seen

    _, nothing = ask(text(40, 0) + text(19, 1))
    second, diverged = ask(text(40, 0) + text(19, 2))
    longer, continued = ask(second + text(3, 3))
    _, replaced = ask(longer[:-2] + text(9, 4))
    assert nothing == diverged == 0 and continued == len(second) - 1 and replaced >= len(longer) - 3


@pytest.mark.parametrize("family", FAMILIES)
def test_a_short_rest_beside_a_long_prompt(family, monkeypatch):
    """Check that its padding is at places where nothing of its text may be lost."""
    monkeypatch.setattr(layers, "SLACK", 8)
    target = pair(family, "eager").target
    asked = [Request(text(48, 0)[:length] + text(more, 1), max_new_tokens=8) for length, more in ((48, 1), (0, 70))]
    expected = alone(target, asked)
    engine = Engine(target, Random(), max_num_seqs=2, slot_tokens=120, reuse_prefixes=True)
    run(engine, [Request(asked[0].prompt[:48], max_new_tokens=1)])
    assert run(engine, asked)[0] == expected and engine.slots.hits in (47, 48)


@pytest.mark.parametrize("what", ["preempt", "swap"])
@pytest.mark.parametrize("family", FAMILIES)
def test_texts_go_on_after_they_were_interrupted(family, what, narrow):
    target = pair(family, "eager").target
    asked = [Request(text(length, length), max_new_tokens=12) for length in (40, 7, 21)]
    engine, expected = Engine(target, Random()), alone(target, asked)
    wide = type("Wide", (Random,), {"nodes": 20})()  # another ring
    interrupt = engine.preempt if what == "preempt" else lambda: engine.swap(wide)
    assert run(engine, asked, lambda step: interrupt() if step in (3, 5) else None)[0] == expected


def test_a_limit_counts_what_is_kept(narrow):
    """Let two of four layers slide, with rings of 20 entries and of 8."""
    target, size, slots = pair("gemma3_text", "eager").target, 100 * 4 * ENTRY, 1
    worker = Worker(target, Random(), max_num_seqs=slots, cache_gib=2 * slots * size / 2**30)
    engines, rings = worker.engines, (WINDOW + 16, WINDOW + FEWEST_ROWS)
    for engine, ring in zip(engines, rings, strict=True):
        assert engine.slot_tokens == (2 * 100 * 4 - 2 * sum(rings)) // 4
        assert target.new_cache(1, 1, engine.drafter.nodes).sliding.ring == ring
        with pytest.raises(ValueError, match="exceeds the cache of"):
            engine.check(Request(text(engine.max_text_tokens(), 0), max_new_tokens=1))
    asked = [Request(text(40 + number, number), max_new_tokens=12) for number in range(6)]
    expected, sizes = alone(target, asked), []
    for engine in engines:
        assert run(engine, asked)[0] == expected
        sizes.append(sum(states.nbytes for states in states_of(engine.slots.cache)))
    assert 0 <= 2 * slots * size - sum(sizes) < 8 * slots * ENTRY


def test_masks_of_packed_rows_end_at_the_document_and_the_window():
    starts, columns = torch.tensor([[0, 0, 0, 0, 4, 4, 4]]), torch.arange(7)
    masks = Masks(2, mixed=True).packed(starts, torch.float32)
    sees = (columns >= starts[0, :, None]) & (columns <= columns[:, None])
    assert torch.equal(masks["full_attention"].dense()[0, 0] == 0, sees)
    near = masks["sliding_attention"].dense()
    assert torch.equal(near[0, 0] == 0, sees & (columns[:, None] - columns < 2))
    assert torch.equal(Masks(2, mixed=False).packed(starts, torch.float32).dense(), near)


def test_a_few_queries_see_the_window_before_them():
    seen = within_window(torch.ones(1, 2, 8, dtype=torch.bool), torch.tensor([[5, 6]]), 3)
    assert seen[0].tolist() == [[key >= first for key in range(8)] for first in (3, 4)]
    assert within_window(mask := torch.ones(1, 2, 3, dtype=torch.bool), torch.tensor([[1, 2]]), 3) is mask


def test_paths_of_several_lengths_are_kept_without_a_padded_one():
    cache = KVCache(1, 2, 6, "cpu")
    cache.set_lengths([2, 1])
    new = torch.arange(16.0).view(2, 1, 4, 2)
    cache.update(new, new, 0)
    assert cache.layers[0].get_max_length() == 6  # BLOOM's code asks for it
    cache.commit([[0, 2, 3], [3]])
    assert cache.lengths == [5, 2]
    keys, _ = cache.layers[0].states
    assert torch.equal(keys[0, 0, 2:5], new[0, 0, [0, 2, 3]]) and torch.equal(keys[1, 0, 1], new[1, 0, 3])
