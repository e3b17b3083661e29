"""Whatever requests, drafters and interruptions follow each other in an engine: every text is that of decoding alone."""

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from foredraft.heads import Target
from foredraft.heads.caches.kv_cache import KEY_BLOCK
from foredraft.inference import Engine, Request, SamplingParams
from foredraft.inference.drafters import Drafter
from tests.support.decoding import PARAMS, drafters, prompt, run

NAMES = ("plain", "suffix", "eagle3", "medusa", "union of auto")


def requests(target: Target) -> list[Request]:
    """Return requests with shared beginnings, with all settings, and with budgets, end tokens and stop strings."""
    asked = [Request(prompt(9, 0) + prompt(i, i), params, 4 + 3 * i, seed=i) for i, params in enumerate(PARAMS)]
    asked += [Request(prompt(12, 0), max_new_tokens=budget) for budget in (0, 1)]
    texts = [run(Engine(target), [request])[0][0] for request in asked]
    asked.append(Request([*asked[1].prompt, *texts[1], 7], SamplingParams(temperature=0.5), 8, seed=5))
    word = target.text_tokenizer.decode(texts[4][5:8]).strip("\ufffd")
    for change in ({"stop_strings": ("zq", word)}, {"eos_token_ids": frozenset(texts[4][8:9])}):
        asked.append(Request(asked[4].prompt, asked[4].params, 30, asked[4].seed, **change))
        asked.append(Request(asked[4].prompt, asked[4].params, 30, asked[4].seed, **change, min_new_tokens=12))
    return asked


class Steps(RuleBasedStateMachine):
    kinds: list[Request]
    alone: list[tuple[list[int], str]]
    known: dict[str, Drafter]
    reused: list[int]  # number of tokens that were in the cache already

    def __init__(self) -> None:
        super().__init__()
        self.engine = Engine(self.target, max_num_seqs=3, prefill_chunk=7, reuse_prefixes=True)
        self.texts: dict[Request, list[int]] = {}
        self.wanted: dict[Request, tuple[list[int], str]] = {}

    @rule(kinds=st.lists(st.integers(0, 12), min_size=1, max_size=3), count=st.integers(0, 12))
    def add(self, kinds: list[int], count: int) -> None:
        for kind in kinds:
            request = Request(**vars(self.kinds[kind]))
            self.engine.add(request)
            self.texts[request], self.wanted[request] = [], self.alone[kind]
        self.step(count)

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        while self.engine.has_work and count > 0:
            count -= 1
            for output in self.engine.step():
                text, (wanted, reason) = self.texts[output.request], self.wanted[output.request]
                text += output.tokens
                assert text == wanted[: len(text)]
                assert output.finish_reason in (None, reason) and (output.finish_reason is None) == (text != wanted)
                if output.finish_reason is not None:
                    del self.wanted[output.request]

    @rule(which=st.integers(0, 20))
    def cancel(self, which: int) -> None:
        if self.wanted:
            request = list(self.wanted)[which % len(self.wanted)]
            self.engine.cancel(request)
            del self.wanted[request]

    @rule(name=st.sampled_from(("preempt", *NAMES)))
    def interrupt(self, name: str) -> None:
        """Forget what is computed, and perhaps replace the drafter."""
        if name == "preempt":
            self.engine.preempt()
        else:
            self.engine.swap(self.known.get(name))

    def teardown(self) -> None:
        self.step(1000)
        self.reused[0] += self.engine.slots.hits
        assert not self.wanted and not self.engine.has_work


@pytest.mark.parametrize("examples", [10, pytest.param(60, marks=pytest.mark.nightly)])
def test_every_text_is_that_of_decoding_alone(target: Target, examples: int) -> None:
    kinds = requests(target)
    alone = [tuple(part[0] for part in run(Engine(target), [kind])) for kind in kinds]
    assert {reason for _, reason in alone} == {"stop", "length"}
    facts = {"target": target, "kinds": kinds, "alone": alone, "known": drafters(target), "reused": [0]}
    checked = settings(max_examples=examples, stateful_step_count=20, deadline=None, database=None, derandomize=True)
    run_state_machine_as_test(
        type("Machine", (Steps,), facts), settings=settings(checked, suppress_health_check=list(HealthCheck))
    )
    assert facts["reused"][0] > 100


def test_padding_may_follow_the_last_column(target: Target) -> None:
    """Prefill the rest of a text that nearly fills its slot next to a longer part of another one."""
    first, second = prompt(KEY_BLOCK - 2, 0), prompt(20, 1)
    cache = target.new_cache(2, KEY_BLOCK)
    target.prefill(torch.tensor([first[:-3], [0] * (len(first) - 3)]), [len(first) - 3, 0], cache)
    cache.set_lengths([len(first) - 3, 0])
    logits = target.prefill(torch.tensor([first[-3:] + [0] * 17, second]), [3, 20], cache).logits[:, 0]
    for text, row in zip((first, second), logits, strict=True):
        expected = target.prefill(torch.tensor([text]), [len(text)], target.new_cache(1, KEY_BLOCK)).logits[0, 0]
        torch.testing.assert_close(row, expected, rtol=1e-4, atol=1e-4)
