"""A server of a target whose tokenizer is SentencePiece's: the text of its answers, and what load generators and evaluation
harnesses send."""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from foredraft.heads import Target
from foredraft.inference.serve import service
from foredraft.scripts import generate as program
from tests.support.chats import sentencepiece
from tests.support.processes import on_cpu

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MESSAGES = [{"role": "user", "content": "The sky is"}]
BLUE, DEF, BYTE = sentencepiece().convert_tokens_to_ids(["▁blue", "▁def", "<0xF0>"])
NO_BYTES = {str(token): -100 for token in sentencepiece().convert_tokens_to_ids([f"<0x{n:02X}>" for n in range(256)])}
GREEDY = {"model": "tiny", "temperature": 0}


SETTINGS = ["drafter=draft:{model}", "drafter.tree=fixed", "max_tokens=24"]


@pytest.fixture(scope="module")
def model(model: Path) -> Path:
    """Change the tokenizer. The target's generation config ends texts at token 0, and this tokenizer at 2."""
    tokenizer = sentencepiece()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(model)
    return model


@pytest.fixture(scope="module")
def spelled(model: Path) -> Target:
    return Target.from_pretrained(model, dtype="float32", device="cpu")


def says(token: int, **more) -> dict:
    """Return settings by which each token is this one."""
    return {**GREEDY, "logit_bias": {str(token): 100}, "max_tokens": 3, **more}


def joined(chunks) -> str:
    return "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)


def test_a_first_word_keeps_its_space(client):
    asked = says(BLUE, prompt="The sky is")
    assert client.completions.create(**asked).choices[0].text == " blue blue blue"
    assert joined(client.completions.create(**asked, stream=True)) == " blue blue blue"
    assert client.completions.create(**asked, echo=True).choices[0].text == "The sky is blue blue blue"
    assert joined(client.completions.create(**asked, echo=True, stream=True)) == "The sky is blue blue blue"
    cut = client.completions.create(**asked, stop=" blue blue").choices[0]
    assert (cut.text, cut.finish_reason) == ("", "stop")


def test_a_text_is_what_decoding_adds_to_the_prompt(client, spelled):
    tokenizer = spelled.text_tokenizer
    prompt = tokenizer("The 🧪 sky").input_ids
    for seed in range(4):
        facts = {"model": "tiny", "prompt": prompt, "seed": seed, "max_tokens": 20, "logit_bias": NO_BYTES}
        more = {"extra_body": {"return_token_ids": True}}
        (choice,) = client.completions.create(**facts, **more).choices
        (echoed,) = client.completions.create(**facts, echo=True).choices
        whole = tokenizer.decode(prompt + choice.token_ids, skip_special_tokens=True).rstrip("�")
        assert echoed.text == whole and choice.text == whole[len("The 🧪 sky") :]
        chunks = [*client.completions.create(**facts, **more, stream=True)]
        assert joined(chunks) == choice.text
        assert chunks[0].choices[0].prompt_token_ids == prompt
        assert not any(hasattr(chunk.choices[0], "prompt_token_ids") for chunk in chunks[1:])


def test_log_probabilities_name_every_token_apart(client, spelled):
    """Use a random model, whose likeliest tokens are bytes."""
    asked = {"model": "tiny", "prompt": "The sky", "max_tokens": 20, "seed": 1, "logprobs": 20}
    for more in ({}, {"echo": True}):
        (choice,) = client.completions.create(**asked, **more).choices
        found = choice.logprobs
        assert {len(top) for top in found.top_logprobs if top} == {20}
        assert any(token.startswith("bytes:\\x") for top in found.top_logprobs if top for token in top)
        assert len(found.text_offset) == len(found.tokens) and found.text_offset == sorted(found.text_offset)
    assert found.tokens[:3] == ["<s>", "The", " sky"] and found.text_offset[:4] == [0, 0, 3, 7]
    chunks = [*client.completions.create(**asked, echo=True, stream=True)]
    assert [one for chunk in chunks for one in chunk.choices[0].logprobs.text_offset] == found.text_offset
    (choice,) = client.completions.create(**says(BLUE, prompt="The sky", logprobs=1, echo=True)).choices
    offsets = [*choice.logprobs.text_offset, len(choice.text)]
    pieces = [choice.text[start:end] for start, end in itertools.pairwise(offsets)]
    assert pieces[1:] == choice.logprobs.tokens[1:] == ["The", " sky", " blue", " blue", " blue"] and pieces[0] == ""
    assert client.completions.create(**asked | {"logprobs": False}).choices[0].logprobs is None
    ids = client.completions.create(**asked, extra_body={"return_tokens_as_token_ids": True}).choices[0].logprobs
    assert all(token.startswith("token_id:") for token in ids.tokens)


def test_bytes_of_a_chat_s_tokens_are_its_content(client):
    asked = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 20}
    (choice,) = client.chat.completions.create(**says(BLUE, **asked)).choices
    content = choice.logprobs.content
    assert b"".join(bytes(one.bytes) for one in content).decode() == choice.message.content == "blue blue blue"
    (choice,) = client.chat.completions.create(**says(BYTE, **asked)).choices
    for one in choice.logprobs.content:
        assert (one.token, one.bytes) == ("bytes:\\xf0", [0xF0])
        assert len({top.token for top in one.top_logprobs}) == 20


@pytest.mark.parametrize("speculative", [True, False])
@pytest.mark.parametrize("end", [0, 2])
def test_a_text_ends_at_the_end_of_tokenizer_and_generation_config(client, end, speculative):
    asked = says(end, messages=MESSAGES, extra_body={"speculative": speculative})
    answer = client.chat.completions.create(**asked)
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("stop", 1)
    assert answer.choices[0].message.content == ""


def test_a_benchmark_may_go_on_after_the_end(client):
    more = {"ignore_eos": True, "stop_token_ids": [DEF], "return_token_ids": True}
    (choice,) = client.completions.create(**says(2, prompt="The", extra_body=more)).choices
    assert (choice.finish_reason, choice.token_ids, choice.text) == ("length", [2, 2, 2], "")
    (choice,) = client.completions.create(**says(DEF, prompt="The", extra_body=more)).choices
    assert (choice.finish_reason, choice.token_ids, choice.text) == ("stop", [DEF], "")


def test_an_end_is_shown_to_who_asks(client):
    """Check that a token that ends a text is not part of it, as in vLLM, and neither are its log-probabilities."""
    asked = says(DEF, prompt="The", logprobs=1)
    for more, text in (({}, ""), ({"include_stop_str_in_output": True}, " def")):
        body = {"stop_token_ids": [DEF], **more}
        (choice,) = client.completions.create(**asked, extra_body=body).choices
        assert (choice.text, "".join(choice.logprobs.tokens), choice.finish_reason) == (text, text, "stop")
        (choice,) = client.completions.create(**asked, stop="ef", extra_body=more).choices
        assert (choice.text, choice.finish_reason) == (" def" if more else " d", "stop")
    body = {"stop_token_ids": [DEF], "return_token_ids": True}
    assert len(client.completions.create(**asked, extra_body=body).choices[0].logprobs.tokens) == 1
    for skip, text in ((True, ""), (False, "<s><s><s>")):
        body = {"skip_special_tokens": skip}
        assert client.completions.create(**says(1, prompt="The"), extra_body=body).choices[0].text == text
    assert client.completions.create(**says(2, prompt="The"), extra_body=body).choices[0].text == ""


@pytest.mark.parametrize("speculative", [True, False])
def test_a_stop_string_waits_for_the_least_tokens(client, speculative):
    more = {"min_tokens": 4, "return_token_ids": True, "speculative": speculative}
    asked = says(BLUE, prompt="The", stop=" blue") | {"max_tokens": 9}
    (choice,) = client.completions.create(**asked, extra_body=more).choices
    assert (choice.text, choice.token_ids, choice.finish_reason) == (" blue" * 4, [BLUE] * 5, "stop")
    (choice,) = client.completions.create(**says(2, prompt="The", extra_body=more | {"min_tokens": 3})).choices
    assert choice.finish_reason == "length" and not {0, 2} & {*choice.token_ids}


def test_a_prompt_has_one_bos_token(client):
    def ids(prompt: str, **more) -> list[int]:
        body = {"return_token_ids": True, **more}
        asked = {**GREEDY, "prompt": prompt, "max_tokens": 1, "extra_body": body}
        return client.completions.create(**asked).choices[0].prompt_token_ids

    once = ids("The sky")
    assert once[0] == 1 and ids("<s>The sky").count(1) == 1
    assert ids("The sky", add_special_tokens=False) == once[1:]


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_is_scored_without_an_answer(client, spelled, stream):
    """Ask like older harnesses, also with a prompt that fills the context."""
    ids = spelled.text_tokenizer("The sky is blue").input_ids
    own = spelled.forward(torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = own[:-1].gather(-1, torch.tensor(ids)[1:, None])[:, 0].tolist()
    asked = {**GREEDY, "prompt": ids, "max_tokens": 0, "echo": True, "logprobs": 1}
    if stream:
        first, *rest = client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        choice, usage, reason = first.choices[0], rest[-1].usage, rest[0].choices[0].finish_reason
    else:
        answer = client.completions.create(**asked)
        (choice,), usage, reason = answer.choices, answer.usage, answer.choices[0].finish_reason
    assert (choice.text, reason, usage.completion_tokens) == ("The sky is blue", "length", 0)
    assert choice.logprobs.token_logprobs[0] is None and choice.logprobs.tokens == [
        "<s>",
        "The",
        " sky",
        " is",
        " blue",
    ]
    assert choice.logprobs.token_logprobs[1:] == pytest.approx(expected, abs=1e-4)
    full = client.completions.create(**asked | {"prompt": [BLUE] * 256, "n": 2})
    assert [len(one.logprobs.tokens) for one in full.choices] == [256, 256]


def test_usage_is_told_with_every_chunk(client):
    """Ask for both, as load generators do."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    for ask, asked in (
        (client.completions.create, says(BLUE, prompt="The")),
        (client.chat.completions.create, says(BLUE, messages=MESSAGES)),
    ):
        chunks = [*ask(**asked, stream=True, stream_options=options)]
        counts = [chunk.usage.completion_tokens for chunk in chunks]
        assert counts == sorted(counts) and counts[-1] == 3 and chunks[-1].choices == []


def test_minus_one_token_is_as_many_as_fit(client):
    asked = says(BLUE) | {"max_tokens": -1}
    (choice,) = client.completions.create(**asked, prompt=[BLUE] * 251).choices
    assert (choice.text, choice.finish_reason) == (" blue" * 5, "length")
    asked = says(BLUE, messages=MESSAGES) | {"max_tokens": None, "max_completion_tokens": -1}
    assert client.chat.completions.create(**asked).usage.completion_tokens == 24  # as the server's max_tokens has it


def test_a_temperature_of_nearly_nothing_is_greedy(client):
    facts = {"model": "tiny", "prompt": "The sky", "max_tokens": 12}
    texts = [client.completions.create(**facts, temperature=heat).choices[0].text for heat in (0, 1e-38, 1e-9)]
    assert texts[0] == texts[1] == texts[2]


COMMON = {"model": "tiny", "stream": True, "ignore_eos": True}
USAGE = {"include_usage": True}
SENT = [  # by the sources of each, with their defaults
    ("guidellm", "completions", {**COMMON, "prompt": "The", "max_tokens": 4, "stop": None,
                                 "stream_options": USAGE | {"continuous_usage_stats": True}}),
    ("guidellm", "chat/completions", {**COMMON, "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
                                      "max_completion_tokens": 4, "max_tokens": 4, "stop": None,
                                      "stream_options": USAGE | {"continuous_usage_stats": True}}),
    ("vllm bench serve", "completions", {**COMMON, "prompt": "The", "max_tokens": 4, "repetition_penalty": 1.0,
                                         "temperature": 0.0, "logprobs": None, "stream_options": USAGE}),
    ("vllm bench serve", "completions", {**COMMON, "prompt": [7, 8], "max_tokens": 4, "top_k": -1, "min_p": 0.0,
                                         "use_beam_search": False, "best_of": 1, "logprobs": 20}),
    ("sglang bench_serving", "completions", {**COMMON, "prompt": "The", "temperature": 0.0, "best_of": 1, "max_tokens": 4}),
    ("lm-eval", "completions", {"model": "tiny", "prompt": [[7, 8, 9], [7, 8]], "temperature": 0, "max_tokens": 1,
                                "logprobs": 1, "seed": 1234, "echo": True}),
    ("lm-eval", "completions", {"model": "tiny", "prompt": ["The"], "temperature": 0, "max_tokens": 4,
                                "stop": ["\n\n", "</s>"], "seed": 1234}),
    ("aiperf", "chat/completions", {**COMMON, "messages": MESSAGES, "max_completion_tokens": 4, "min_tokens": 4,
                                    "stream_options": USAGE}),
    ("genai-perf", "completions", {**COMMON, "prompt": ["The"], "max_tokens": 4, "min_tokens": 4, "n": 1}),
    ("evalscope", "chat/completions", {**COMMON, "messages": MESSAGES, "max_tokens": 4, "min_tokens": 4, "top_p": 1.0,
                                       "logprobs": False, "stop_token_ids": [5], "stream_options": USAGE}),
    ("Open WebUI", "chat/completions", {
        "model": "tiny", "messages": [{"role": "system", "content": "Be brief."}, *MESSAGES], "stream": True,
        "temperature": 0.8, "top_p": 0.9, "max_tokens": 4, "seed": 1, "stop": ["###"], "logit_bias": {"0": -100, "2": -100},
        "frequency_penalty": 0.1, "presence_penalty": 0.1, "top_k": 40, "min_p": 0.05,
        "stream_options": USAGE,
    }),
    ("Open WebUI's request for a title", "chat/completions", {"model": "tiny", "messages": MESSAGES, "stream": False,
                                                              "max_completion_tokens": 8}),
    ("vLLM's own example", "chat/completions", {
        "model": "tiny", "messages": MESSAGES, "max_tokens": 2, "echo": False, "add_special_tokens": False,
        "skip_special_tokens": True, "spaces_between_special_tokens": False, "include_stop_str_in_output": False,
        "add_generation_prompt": True, "continue_final_message": False, "length_penalty": 1.0, "early_stopping": False,
        "truncate_prompt_tokens": None, "prompt_logprobs": None, "allowed_token_ids": None, "bad_words": [],
        "priority": 0, "request_id": "a", "cache_salt": "b", "include_reasoning": True, "guided_json": None,
    }),
]  # fmt: skip


@pytest.mark.parametrize("tool, route, body", SENT)
def test_what_load_generators_and_harnesses_send_is_answered(server, tool, route, body):
    status, _, answer = server.post(json.dumps(body).encode(), f"/v1/{route}")
    assert status == 200, answer
    if not body.get("stream"):
        assert len(json.loads(answer)["choices"]) in (1, 2)
        return
    events = [json.loads(line[6:]) for line in answer.decode().split("\n\n") if line.startswith("data: {")]
    assert not any("error" in event for event in events)
    if "stream_options" in body:
        assert events[-1]["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize(
    "route, more, message",
    [
        ("completions", {"truncate_prompt_tokens": 5}, "truncate_prompt_tokens is not supported"),
        ("completions", {"prompt_logprobs": 1}, "prompt_logprobs is not supported"),
        ("completions", {"bad_words": ["a"]}, "bad_words is not supported"),
        ("completions", {"max_tokens": -2}, "max_tokens"),
        ("completions", {"logprobs": 21}, "logprobs"),
        ("completions", {"temprature": []}, "Unknown parameter: 'temprature'"),
        ("chat/completions", {"web_search_options": []}, "web_search_options is not supported"),
        ("chat/completions", {"guided_regex": {}}, "send one of json"),
        ("chat/completions", {"max_tokens": 0}, "max_tokens"),
        ("chat/completions", {"echo": True}, "echo"),
        ("chat/completions", {"add_special_tokens": True}, "add_special_tokens"),
        ("chat/completions", {"ignore_eos": True, "response_format": {"type": "json_object"}}, "ignore_eos cannot be"),
    ],
)
def test_what_would_change_an_answer_is_refused_by_name(server, route, more, message):
    body = {"prompt": "The"} if route == "completions" else {"messages": MESSAGES}
    status, _, answer = server.post(json.dumps({"model": "tiny", **body, **more}).encode(), f"/v1/{route}")
    assert status == 400 and message in json.loads(answer)["error"]["message"]


def test_a_stream_that_is_silent_for_long_sends_pings(monkeypatch):
    """Hold a call back, for example: proxies would end the stream."""
    monkeypatch.setattr(service, "PING", 0.05)

    async def sent() -> AsyncIterator[str]:
        yield "first"
        await asyncio.sleep(0.5)
        yield "last"

    async def events() -> list[str]:
        stream = service.EventStream(SimpleNamespace(events=sent, ping=lambda: "ping"), None)
        return [event async for event in stream.body_iterator]

    first, *pings, last = asyncio.run(events())
    assert (first, last) == ("first", "last")
    assert set(pings) == {"ping"}


@pytest.mark.parametrize("chat, expected", [(False, " blue blue"), (True, "blue blue")])
def test_the_program_writes_the_same_text(model, tmp_path, call, monkeypatch, chat, expected):
    """Write to the terminal as it comes, and into a file; in a chat, an answer starts after its mark."""
    prompts = []

    def written(target, drafter, ids, mask, streamer, **settings):
        prompts.append(ids[0].tolist())
        if streamer is not None:
            for tokens in (ids, torch.tensor([BLUE, BLUE])):
                streamer.put(tokens)
            streamer.end()
        return SimpleNamespace(new_tokens=[[BLUE, BLUE, 2]], steps=[])

    monkeypatch.setattr(program, "generate", written)
    given = [*on_cpu(model), f"chat={chat}"]
    assert call(program.main, *given, "prompt=The sky").out == expected + "\n"
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": "The sky" if chat else "<s>The sky"}) + "\n")
    assert json.loads(call(program.main, *given, "prompts=in.jsonl").out)["text"] == expected
    assert prompts[0] == prompts[1]  # with one bos token
