"""The text is the target's own: for every drafter, greedy and seeded, alone and in ragged batches."""

import itertools
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import numpy
import pytest
import torch

from foredraft.heads import Target, load_head, save_head
from foredraft.heads.caches.kv_cache import KEY_BLOCK
from foredraft.heads.eagle3 import Eagle3Head
from foredraft.inference import Engine, Request, generate
from foredraft.inference.drafters import DynamicTree, NgramDrafter, drafter_for, load_drafter
from foredraft.inference.sampling import SamplingParams
from tests.support.batches import prompt
from tests.support.decoding import SETTINGS, Oracle
from tests.support.head_factory import new_head


def test_a_perfect_drafter_is_accepted_whole(target):
    for settings in SETTINGS.values():
        plain = generate(target, None, prompt(9), max_new_tokens=61, eos_token_id=-1, seed=3, **settings)
        oracle = Oracle(plain.sequences.tolist(), target.vocab_size, right=True)
        out = generate(target, oracle, prompt(9), max_new_tokens=61, eos_token_id=-1, seed=3, **settings)
        assert out.new_tokens == plain.new_tokens
        assert [step.emitted for step in out.steps] == [[6]] * 10
        assert out.acceptance_length == 6.0


def test_other_seeds_give_other_texts(target):
    texts = [generate(target, None, prompt(9), temperature=1.0, seed=s, eos_token_id=-1).new_tokens for s in range(4)]
    assert all(a != b for a, b in itertools.combinations(texts, 2))


def test_seeds_of_numpy_are_seeds(target):
    settings = {"temperature": 1.0, "max_new_tokens": 20, "eos_token_id": -1}
    texts = generate(target, None, prompt(9).repeat(2, 1), seed=3, **settings).new_tokens
    for seed in (numpy.int64(3), numpy.array([3, 4]), [numpy.int32(3), 4]):
        assert generate(target, None, prompt(9).repeat(2, 1), seed=seed, **settings).new_tokens == texts


@pytest.mark.parametrize("kind", ["eagle3", "medusa", "dflash"])
def test_the_default_device_of_a_program_is_not_that_of_the_host(kind, target, tiny_path, tmp_path):
    """Set one as the card of Phi-2 does, here one without numbers (flashinfer-ai/flashinfer#755)."""
    settings = {"temperature": 1.0, "repetition_penalty": 1.2, "max_new_tokens": 12, "eos_token_id": -1, "seed": 1}
    expected = generate(target, None, prompt(9), **settings)
    save_head(new_head(kind, target), tmp_path, target)
    torch.set_default_device("meta")
    try:
        again = Target.from_pretrained(tiny_path, dtype="float32", device="cpu")
        drafters = [drafter_for(load_head(tmp_path, again), again), load_drafter(f"{tmp_path}+suffix", again)]
        prompts = torch.tensor(expected.sequences[:, :9].tolist(), device="cpu")
        texts = [generate(again, drafter, prompts, **settings) for drafter in drafters]
        engine = Engine(Target(again.model, again.tokenizer), drafters[0])
        engine.add(Request(prompts[0].tolist(), SamplingParams(1.0, repetition_penalty=1.2), 12, seed=1))
        steps = list[int]()
        while engine.has_work:
            steps += chain.from_iterable(output.tokens for output in engine.step())
    finally:
        torch.set_default_device(None)
    assert all(torch.equal(text.sequences, expected.sequences) for text in texts)
    assert steps == expected.new_tokens[0]


def test_without_a_seed_torch_s_generator_has_the_word(target):
    settings = {"do_sample": True, "max_new_tokens": 20, "eos_token_id": -1}
    texts = []
    for seed in (1, 1):
        torch.manual_seed(seed)
        texts += [generate(target, None, prompt(9), **settings).new_tokens for _ in range(2)]
    assert texts[:2] == texts[2:] and texts[0] != texts[1]
    torch.manual_seed(1)
    generate(target, None, prompt(9), max_new_tokens=2)  # greedy: it draws nothing
    assert generate(target, None, prompt(9), **settings).new_tokens == texts[0]


def test_a_stop_string_cuts_at_the_token_that_completes_it(target):
    plain = generate(target, None, prompt(9), max_new_tokens=30, eos_token_id=-1)
    pieces = [target.tokenizer.decode(plain.new_tokens[0][: n + 1]) for n in range(30)]
    stop = pieces[20][-6:]
    first = next(n for n, text in enumerate(pieces) if stop in text)
    for drafter in (None, Oracle(plain.sequences.tolist(), target.vocab_size, right=True)):
        out = generate(target, drafter, prompt(9), max_new_tokens=30, eos_token_id=-1, stop_strings=stop)
        assert out.new_tokens[0] == plain.new_tokens[0][: first + 1]
    out = generate(target, None, prompt(9), max_new_tokens=30, eos_token_id=-1, stop_strings=["", "no such text"])
    assert out.new_tokens == plain.new_tokens


def test_end_tokens_may_be_a_tensor(target):
    plain = generate(target, None, prompt(9), max_new_tokens=8, eos_token_id=-1).new_tokens[0]
    for ends in (torch.tensor([plain[3]]), numpy.array([plain[3]]), numpy.int64(plain[3]), {plain[3]}):
        out = generate(target, None, prompt(9), max_new_tokens=8, eos_token_id=ends)
        assert out.new_tokens[0] == plain[: plain.index(plain[3]) + 1] and out.finish_reasons == ["stop"]


def test_streaming_gives_all_tokens_once(target):
    class Collect:
        def __init__(self):
            self.got, self.ended = [], False

        def put(self, tokens):
            self.got += tokens.flatten().tolist()

        def end(self):
            self.ended = True

    for new in (30, 0):
        collect = Collect()
        out = generate(target, NgramDrafter(), prompt(9), max_new_tokens=new, eos_token_id=-1, streamer=collect)
        assert collect.got == out.sequences[0].tolist() and collect.ended


def test_threads_share_a_target(target):
    """Check texts of threads whose batches have one shape, but prompts of other lengths."""
    lengths = [(3, 9), (9, 3), (5, 9), (9, 6)]

    def write(pair: tuple[int, int]) -> list[list[int]]:
        mask = torch.arange(9) < torch.tensor(pair)[:, None]
        return generate(target, None, prompt(9).repeat(2, 1), mask, max_new_tokens=4, eos_token_id=-1).new_tokens

    alone = list(map(write, lengths))
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(write, lengths * 5)) == alone * 5
    finally:
        sys.setswitchinterval(switch)


def test_bad_input_is_named(target):
    mask = torch.tensor([[1, 1, 1], [0, 0, 0]])
    for ids, settings, message in (
        (torch.ones(2, 3).long(), {"attention_mask": mask}, "sequence 1 is empty"),
        ("def main():", {}, "input_ids is str"),
        (torch.ones(1, 2).long(), {"attention_mask": [[1]]}, r"attention_mask is \(1, 1\), input_ids \(1, 2\)"),
        (torch.ones(1, 2), {}, "input_ids is torch.float32, not integers"),
        (prompt(300), {}, r"300 tokens.*256"),
        (prompt(3), {"temperature": -1}, "temperature=-1"),
        (prompt(3), {"max_new_tokens": -1}, "max_new_tokens=-1"),
        (prompt(3), {"max_new_tokens": 2.5}, "max_new_tokens=2.5 is not a whole number"),
        (prompt(3), {"temperature": "0.5"}, "temperature='0.5' is not a number"),
        (prompt(3), {"temperature": "0.5", "do_sample": False}, "temperature='0.5' is not a number"),
        (prompt(3), {"eos_token_id": "</s>"}, "eos_token_id='</s>' is not a whole number or a list of them"),
        (prompt(3), {"eos_token_id": 2.0}, "eos_token_id=2.0 is not a whole number or a list of them"),
        (prompt(3), {"temperature": 1.0, "top_k": 1.5}, "top_k=1.5 is not a whole number"),
        (prompt(3), {"grammar": "[0-9]+"}, r"grammar='\[0-9\]\+' is not a Grammar"),
        (prompt(3), {"seed": [1, 2]}, "seed has 2 entries"),
        *((prompt(3), {"seed": seed}, "seed=.* is not a whole number or a list") for seed in (1.5, "16", [1.5], ["a"])),
        *(
            (prompt(3), {"bad_words_ids": words}, "bad_words_ids=.* is not a list of lists of tokens")
            for words in (5, "x", [5], ["a"], [["a"]], {5: 1}, [None])
        ),
        *(
            (prompt(3), {"logit_bias": bias}, "logit_bias=.* does not map tokens to numbers")
            for bias in (5, [5], {5: None}, {5: "x"}, {"x": 1.0})
        ),
        *(
            (prompt(3), {"stop_strings": stops}, "stop_strings=.* is not a text or a list of")
            for stops in (5, [5], b"x")
        ),
        (prompt(3), {"streamer": 5}, "streamer=5 is not a streamer of transformers, which has put and end"),
        (prompt(3), {"progress": 5}, "progress=5 is not a function"),
        (prompt(3), {"trace": "x"}, "trace=x is not a setting"),
        (prompt(3), {"attention_mask": "x"}, "attention_mask='x' is not a tensor of 0 and 1"),
        (prompt(3), {"do_sample": "false"}, "do_sample='false' is not true or false"),
        (prompt(3), {"generation_config": {"top_k": 5}}, "generation_config=.* is not a GenerationConfig"),
    ):
        with pytest.raises(ValueError, match=message):
            generate(target, None, ids, **settings)
    with pytest.raises(ValueError, match="temperature=None is not a number"):
        SamplingParams(temperature=None)  # type: ignore[arg-type]
    for bias in (5, None, [5], [(5,)], [(5, 1.0, 2)], {5: 1.0}, [(5, "x")], [("a", 1.0)]):
        with pytest.raises(ValueError, match=r"logit_bias=.* is not pairs of a token and a number"):
            SamplingParams(logit_bias=bias)
    for name, values, message in (
        ("prompt", (5, "16", None), "is not a list of tokens"),
        ("prompt", (["a"], [5.5], [None]), "the prompt contains token .*, but the target has 0 to 319"),
        ("params", (5, None, {}), "is not SamplingParams"),
        ("max_new_tokens", ("16", 1.5, None), "is not a whole number"),
        ("min_new_tokens", ("16", 1.5, None), "is not a whole number"),
        ("seed", ("16", 1.5, None), "is not a whole number"),
        ("eos_token_ids", (5, None, "ab", {1.5}), "is not a set of tokens"),
        ("trace", ("16", 1.5, True, -1), "is not a whole number"),
    ):
        for value in values:
            with pytest.raises(ValueError, match=message):
                Engine(target, None).add(Request(**{"prompt": [5], name: value}))
    with pytest.raises(ValueError, match="drafter is str, not a Drafter"):
        generate(target, "suffix", prompt(3))
    with pytest.raises(ValueError, match="only commands have this short name: give the directory scripts/test_model"):
        Target.from_pretrained("test_model")
    with pytest.raises(ValueError, match="context='x' is not a whole number from 1 to 256"):
        Target(target.model, context="x")  # type: ignore[arg-type]
    for call in (lambda: generate(target.model, None, prompt(3)), lambda: load_drafter("suffix", target.model)):
        with pytest.raises(ValueError, match="target is LlamaForCausalLM, not a Target"):
            call()


def test_settings_beyond_the_vocabulary_have_a_defined_result(target):
    settings = {"temperature": 1.0, "max_new_tokens": 12, "eos_token_id": -1, "seed": 0}
    plain = generate(target, None, prompt(5), **settings).new_tokens
    assert generate(target, None, prompt(5), top_k=10_000, **settings).new_tokens == plain
    head = Eagle3Head.for_target(target, ttt_steps=3, draft_vocab_size=3, counts=torch.arange(target.vocab_size))
    wide = DynamicTree(head.eval(), target, nodes=64, depth=3, width=10_000, min_probability=0)
    assert generate(target, wide, prompt(5), **settings).new_tokens == plain


def test_a_read_sees_the_text_in_the_cache_and_not_the_room_behind_it(target):
    """Check that reads of a short text cost the same for any reserved `max_new_tokens`."""
    cache = target.new_cache(1, 4 * KEY_BLOCK)
    target.forward(prompt(9), cache=cache)
    cache.set_lengths([9])
    keys, values = cache.update(torch.zeros(1, 2, 4, 8), torch.zeros(1, 2, 4, 8), 0)
    assert keys.shape[2] == values.shape[2] == cache.mask(torch.ones(1, 4, 4).bool()).shape[-1] <= KEY_BLOCK


def test_logits_that_are_not_numbers_are_an_error(target, monkeypatch):
    read = type(target).forward

    def broken(self, *args, **kwargs):
        reading = read(self, *args, **kwargs)
        return reading._replace(logits=torch.where(torch.arange(320) == 17, float("nan"), reading.logits))

    monkeypatch.setattr(type(target), "forward", broken)
    with pytest.raises(ValueError, match="not numbers"):
        generate(target, None, prompt(3))


def test_settings_may_be_arrays(target):
    """Expect what a list or a bool of Python gives."""
    for name, value, same in (
        ("bad_words_ids", torch.tensor([[5]]), [[5]]),
        ("bad_words_ids", [numpy.array([5])], [[5]]),
        ("do_sample", numpy.bool_(True), True),
    ):
        texts = [
            generate(target, None, prompt(9), max_new_tokens=20, seed=3, **{name: setting}) for setting in (value, same)
        ]
        assert texts[0].new_tokens == texts[1].new_tokens
    assert SamplingParams(logit_bias={5: -1.0}.items()).logit_bias  # type: ignore[arg-type]
