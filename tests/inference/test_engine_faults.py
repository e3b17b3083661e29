"""What a server asks of the engine: rows that leave early, fail or wait for room do not change the texts of others."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from foredraft.heads import Target
from foredraft.heads.caches import cuda_graphs
from foredraft.heads.eagle3 import Eagle3Head
from foredraft.inference import Engine, Request, SamplingParams, target_sampler
from foredraft.inference.drafters import Drafter, DraftModel, DynamicTree, NgramDrafter
from foredraft.inference.request import SequenceState
from tests.support import decoding
from tests.support.batches import states_of
from tests.support.chats import byte_level, sentencepiece
from tests.support.decoding import prompt as ids
from tests.support.decoding import run, with_trees
from tests.support.modes import Tape


def requests(count: int = 4, **facts) -> list[Request]:
    params = SamplingParams(temperature=1.0, frequency_penalty=0.3)
    return [Request(ids(5 + 3 * i, i), params, 16 + 4 * i, seed=i, **facts) for i in range(count)]


def drafters(target: Target) -> list[Drafter]:
    return [NgramDrafter(), DraftModel(target, target, nodes=5, depth=3, width=2, min_probability=0)]


@pytest.fixture(scope="module")
def alone(target) -> list[list[int]]:
    return decoding.alone(target, requests())


@pytest.mark.parametrize("number", range(2))
def test_a_cancelled_request_frees_its_row_at_once(target, alone, number):
    asked, sizes = requests(), []
    engine = Engine(target, drafters(target)[number], max_num_seqs=3)

    def between(step: int) -> None:
        if step == 3:
            engine.cancel(asked[1])
            engine.cancel(asked[1])  # once more does no harm
        if step == 4:
            sizes.append([row.request for row in engine.slots.sequences])

    texts, _ = run(engine, asked, between)
    assert sizes == [[asked[0], asked[3], asked[2]]]  # its very place
    assert len(texts[1]) < len(alone[1]) and texts[1] == alone[1][: len(texts[1])]
    assert [texts[0], *texts[2:]] == [alone[0], *alone[2:]]


@pytest.mark.parametrize("number", range(2))
@pytest.mark.parametrize("when", [0, 2])
def test_logits_that_are_not_numbers_end_their_row_alone(target, alone, monkeypatch, number, when):
    """Replace the second sequence's logits by NaN, of its prompt (step 0) or of a tree; and leave NaN in its cache."""
    asked = requests()
    engine = Engine(target, drafters(target)[number], max_num_seqs=3)
    read, now = type(target).forward, [0]

    def poisoned(self, tokens, positions=None, mask=None, cache=None, *args, **kwargs):
        reading = read(self, tokens, positions, mask, cache, *args, **kwargs)
        if cache is engine.slots.cache and now[0] == when:
            reading.logits[1] = float("nan")
            for states in states_of(cache):
                states[1, :, : cache.used] = float("nan")  # all that forwards write
        return reading

    monkeypatch.setattr(type(target), "forward", poisoned)
    texts, reasons = run(engine, asked, lambda step: now.__setitem__(0, step))
    assert reasons == ["length", "error", "length", "length"]
    assert texts[1] == alone[1][: len(texts[1])] and [texts[0], *texts[2:]] == [alone[0], *alone[2:]]


def test_the_place_of_a_broken_row_is_clean(target, alone, monkeypatch):
    """Replace all that is read in it by NaN; the last sequence takes its place, and a late request joins at the end."""
    head = Eagle3Head.for_target(target, ttt_steps=3).eval()
    engine = Engine(target, DynamicTree(head, target, nodes=8, depth=3, width=2, min_probability=0))
    late, read, now = Request(ids(3, 9), max_new_tokens=9), type(target).forward, [0]
    expected, _ = run(Engine(target), [late])

    def poisoned(self, tokens, positions=None, mask=None, cache=None, *args, **kwargs):
        reading = read(self, tokens, positions, mask, cache, *args, **kwargs)
        if cache is engine.slots.cache and now[0] > 1 and asked[1] in [row.request for row in engine.slots.sequences]:
            reading.logits[1] = reading.aux_hidden_states[1] = float("nan")
            for states in states_of(cache):
                states[1, :, : cache.used] = float("nan")
        return reading

    def between(step: int) -> None:
        now[0] = step
        if step == 5:
            engine.add(late)
        if step == 7:
            assert [row.request for row in engine.slots.sequences] == [asked[0], asked[2], late]
            (reader,) = engine.drafter.cached_drafters  # NaN there would spoil the drafts, and not the text
            assert all(states.isfinite().all() for states in states_of(reader.cache))

    monkeypatch.setattr(type(target), "forward", poisoned)
    asked = requests()[:3]
    texts, reasons = run(engine, asked, between, late)
    assert reasons == ["length", "error", "length", "length"]
    assert [texts[0], *texts[2:]] == [alone[0], alone[2], *expected]


@pytest.mark.parametrize("captured", [False, True])
def test_rows_join_and_leave_in_memory_that_stays(target, alone, captured, monkeypatch):
    """Check that a new sequence takes a finished one's place, otherwise the last one does; what was captured for a size is
    used again."""
    if captured:
        monkeypatch.setitem(cuda_graphs.CAPTURES, "cpu", Tape)
        target = with_trees(Target(target.model, target.tokenizer, target.name))  # without the cache of another engine
    asked = [
        replace(request, max_new_tokens=number) for number, request in zip((12, 9, 5, 28), requests(), strict=True)
    ]
    engine, seen = Engine(target, drafters(target)[1], max_num_seqs=3), []

    def between(step: int) -> None:
        if step:
            blocks = [states for cache in engine.slots.caches() for states in states_of(cache)]
            rows = [asked.index(row.request) if row.request in asked else None for row in engine.slots.sequences]
            seen.append((rows, [block.data_ptr() for block in blocks], len(engine.slots.cache.graphs.graphs)))

    for _ in range(3):
        texts, _ = run(engine, asked, between)
        assert texts == [text[: request.max_new_tokens] for text, request in zip(alone, asked, strict=True)]
    rows, pointers, graphs = zip(*seen, strict=True)
    filled_up = [None] if captured else []
    assert list(dict.fromkeys(map(tuple, rows)))[:2] == [(0, 1, 2, *filled_up), (0, 3)]
    assert min(map(len, rows)) == 1
    again = 2 * len(seen) // 3  # by the third time there is room for all, and every size was captured
    assert all(one == pointers[-1] for one in pointers[again:])
    assert graphs[again] == graphs[-1] and (graphs[-1] > 0) == captured


def test_a_batch_of_mostly_finished_rows_shrinks_when_one_joins(target):
    asked = [Request(ids(5, row), max_new_tokens=20 if row == 2 else 3) for row in range(6)]
    late, sizes = Request(ids(7, 9), max_new_tokens=6), []
    expected = decoding.alone(target, [*asked, late])
    engine = Engine(target, NgramDrafter())

    def between(step: int) -> None:
        if step == 5:
            engine.add(late)
        sizes.append(len(engine.slots.sequences))

    texts, _ = run(engine, asked, between, late)
    assert texts == expected and list(dict.fromkeys(sizes)) == [0, 6, 1, 2]


def test_a_full_cache_lets_requests_wait(target, alone):
    sizes, rows = set(), []
    engine = Engine(target, max_num_seqs=2, slot_tokens=14 + 28 + 2)  # the longest

    def between(step: int) -> None:
        rows.append(len(engine.slots.unfinished()))
        sizes.update(states.shape for states in (states_of(engine.slots.cache) if step else ()))

    assert run(engine, requests(), between)[0] == alone
    assert max(rows) == 2 and len(sizes) == 1 and sizes.pop()[0] == 2
    with pytest.raises(ValueError, match="60 tokens with max_new_tokens=50 exceeds the cache of 44 tokens"):
        engine.add(Request(ids(60, 0), max_new_tokens=50))


@pytest.mark.parametrize("number", range(2))
def test_a_trace_is_of_the_tokens_and_their_tree(target, number):
    """Check that its log-probabilities are those of reading the whole text at once; accepted nodes and new tokens are the
    same."""
    asked = [*requests(2), *requests(1, trace=3)]
    engine, text, accepted = Engine(target, drafters(target)[number]), list(asked[2].prompt), []
    for request in asked:
        engine.add(request)
    while engine.has_work:
        for output in engine.step():
            if output.request is not asked[2]:
                assert output.trace is None
                continue
            trace = output.trace
            logprobs = target.forward(torch.tensor([text + output.tokens])).logits[0].log_softmax(-1)
            for place, token in enumerate(output.tokens):
                at = logprobs[len(text) - 1 + place]
                assert trace.logprobs[place] == pytest.approx(at[token].item(), abs=1e-4)
                assert [one for one, _ in trace.top[place]] == at.topk(3).indices.tolist()
            assert trace.tokens[0] == text[-1] and trace.parents[0] == 0 and trace.path[0] == 0
            drafted = [trace.tokens[node] for node in trace.path[1:]]
            assert drafted[: len(output.tokens)] == output.tokens[: len(drafted)]
            for node, before in zip(trace.path[1:], trace.path, strict=False):
                assert trace.parents[node] == before
            accepted += [trace.probabilities[node] for node in trace.path[1:]]
            text += output.tokens
    assert all(0 < probability <= 1 for probability in accepted)
    assert bool(accepted) == (number == 1)


@pytest.mark.parametrize("number", range(2))
def test_a_nan_at_a_rejected_node_ends_no_text(target, alone, monkeypatch, number):
    """Check also what it left in the cache, where the next tree of another sequence is wider."""
    asked = requests()
    engine = Engine(target, drafters(target)[number], max_num_seqs=3)
    verify, poisoned = engine.verify, [0]

    def verify_poisoned(tree, logits, gumbel):
        verification, _ = verify(tree, logits, gumbel)
        path = verification.path[1, : verification.counts[1]].tolist() if len(logits) > 1 else range(10**6)
        rejected = [node for node in range(logits.shape[1]) if node not in path]
        if rejected:
            poisoned[0] += 1
            logits = logits.clone()
            logits[1, rejected] = float("nan")
            cache = engine.slots.open_cache()
            for states in states_of(cache):
                states[1, :, [cache.lengths[1] + node for node in rejected]] = float("nan")
        return verify(tree, logits, gumbel)

    monkeypatch.setattr(engine, "verify", verify_poisoned)
    texts, reasons = run(engine, asked)
    assert texts == alone and set(reasons) == {"length"} and poisoned[0] > 1


def test_a_request_for_which_memory_ran_out_still_waits(target, alone, monkeypatch):
    asked, engine = requests(), Engine(target)
    for request in asked:
        engine.add(request)
    with monkeypatch.context() as patch:
        patch.setattr(engine.slots, "allocate", lambda *size: (_ for _ in ()).throw(MemoryError))
        with pytest.raises(MemoryError):
            engine.step()
    assert [one.request for one in engine.waiting] == asked
    assert run(engine, [], lambda step: None, *asked)[0] == alone


def test_a_long_stop_string_costs_no_more_than_a_short_one(target, monkeypatch):
    """Check that each token is decoded a bounded number of times, however long text and stop string are."""
    decoded, decode = [], target.text_tokenizer.decode
    words = target.tokenizer("class Pair" + "x" * 989 + "\n").input_ids
    monkeypatch.setattr(
        target.text_tokenizer, "decode", lambda ids, **how: decoded.append(len(ids)) or decode(ids, **how)
    )
    stops = "class Pair" + "x" * 990, "Pair" + "x" * 989 + "\n"
    sequence = SequenceState(Request([1], stop_strings=stops), target)
    found = [sequence.completes_stop_string(token) for token in words]
    assert found == [False] * (len(words) - 1) + [True]
    assert sum(decoded) < 40 * len(words)


@pytest.mark.parametrize(
    "marks, text",
    [
        (("<think>", "</think>"), "\n<think>a.b.c</think>d|."),
        (("<think>", "</think>"), "<thi|."),  # not a mark
        (("<think>", "</think>"), "|.<think>a"),
        (("", "</think>"), "a.b</think>|.c"),
        (("", "</think>"), "a.b</thi.</think"),
        (("", ""), "a|.b</think>.c"),
    ],
)
def test_a_stop_string_does_not_count_within_reasoning(target, marks, text):
    """Check each token's answer: `|` stands before the stop string that ends the text."""
    sequence = SequenceState(Request([1], stop_strings=(".",), reasoning=marks), target)
    tokens = [target.tokenizer.convert_tokens_to_ids(sign) for sign in text.replace("|", "").replace("\n", "Ċ")]
    found = [sequence.completes_stop_string(token) for token in tokens]
    assert (found.index(True) if True in found else -1) == text.find("|")


@pytest.mark.parametrize("marks", [("<think>", "</think>"), ("", "</think>")])
def test_the_end_of_the_reasoning_may_be_a_stop_string(target, marks):
    """Ask for the reasoning only. The mark is one token or several."""
    for stop in ("</think>", "</think>\n"):
        sequence = SequenceState(Request([1], stop_strings=(stop, "b"), reasoning=marks), target)
        signs = [*(marks[0] + "ab"), *stop.replace("\n", "Ċ"), "c"]
        tokens = [target.tokenizer.convert_tokens_to_ids(sign) for sign in signs]
        found = [sequence.completes_stop_string(token) for token in tokens]
        assert found.index(True) == len(signs) - 2


def test_a_stop_string_is_found_with_the_space_before_it():
    """Check also the first word's, and one before half a character."""
    tokenizer = sentencepiece()
    blue, sky = tokenizer.convert_tokens_to_ids(["▁blue", "▁sky"])
    target = SimpleNamespace(tokenizer=tokenizer, text_tokenizer=tokenizer, context=None, name="x")
    for stop, tokens in ((" blue", [blue]), (" sky blue", [sky, blue])):
        sequence = SequenceState(Request([1, sky], stop_strings=(stop,)), target)
        assert [sequence.completes_stop_string(token) for token in tokens] == [False] * (len(tokens) - 1) + [True]
    tokenizer = byte_level()
    target = SimpleNamespace(tokenizer=tokenizer, text_tokenizer=tokenizer, context=None, name="x")
    sequence = SequenceState(Request([1], stop_strings=(" ",)), target)
    assert sequence.completes_stop_string(tokenizer.convert_tokens_to_ids("Ġð"))


def test_a_request_for_no_tokens_writes_none(target):
    """Check it next to others, also if its prompt fills the context, and after it was canceled."""
    engine = Engine(target)
    nothing, cancelled, full = (Request([3] * length, max_new_tokens=0) for length in (5, 5, 256))
    writing = Request([3, 4], max_new_tokens=2)
    for request in (nothing, writing, cancelled, full):
        engine.add(request)
    engine.cancel(cancelled)
    texts = {}
    while engine.has_work:
        for output in engine.step():
            texts.setdefault(output.request, []).extend(output.tokens)
            assert output.request is writing or output.finish_reason == "length"
    assert texts[nothing] == texts[full] == [] and len(texts[writing]) == 2 and cancelled not in texts


@pytest.mark.parametrize("number", [1, 2])
def test_a_request_that_is_added_twice_is_written_twice(target, number):
    (request,), tokens = requests(1), list[int]()
    engine = Engine(target, None, max_num_seqs=number)
    engine.add(request)
    engine.add(request)
    while engine.has_work:
        tokens += [token for output in engine.step() for token in output.tokens]
    assert len(tokens) == 2 * request.max_new_tokens


def test_a_single_stop_string_is_not_a_list_of_letters():
    assert Request([1], stop_strings="END").stop_strings == ("END",)
    assert Request([1], stop_strings=["END", ""]).stop_strings == ("END",)


@pytest.mark.parametrize("name", ["max_num_seqs", "slot_tokens", "prefill_chunk"])
@pytest.mark.parametrize("value", [0, "8", 1.5, True])
def test_an_engine_refuses_what_is_not_a_count(target, name, value):
    with pytest.raises(ValueError, match=f"{name}={value!r} is not a whole number of at least 1"):
        Engine(target, None, **{name: value})


def test_an_engine_refuses_what_is_not_a_target_or_a_drafter(target):
    with pytest.raises(ValueError, match="target is LlamaForCausalLM, not a Target"):
        Engine(target.model, None)
    for name in ("suffix", ""):
        with pytest.raises(ValueError, match="drafter is str, not a Drafter"):
            Engine(target, None).swap(name)
        with pytest.raises(ValueError, match="drafter is str, not a Drafter"):
            Engine(target, name)


def test_a_trace_of_more_tokens_than_the_vocabulary_has_them_all(target):
    engine = Engine(target, None)
    engine.add(Request([5], max_new_tokens=2, trace=10 * target.vocab_size))
    traces = [output.trace for _ in range(2) for output in engine.step()]
    assert [len(trace.top[0]) for trace in traces if trace] == [target.vocab_size] * 2


def test_least_tokens_need_no_copy_of_the_tree(target, monkeypatch):
    monkeypatch.setattr(target_sampler, "host_copy", None)
    engine, request = (
        Engine(target),
        Request([3, 4], max_new_tokens=8, min_new_tokens=3, eos_token_ids=frozenset(range(9, 320))),
    )
    engine.add(request)
    text = []
    while engine.has_work:
        text += [token for output in engine.step() for token in output.tokens]
    assert len(text) == 4 and max(text[:3]) < 9 <= text[3] and engine.slots.sampler.ends is None
