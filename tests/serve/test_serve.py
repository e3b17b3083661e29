"""The openai package against `foredraft serve`: what it answers is the target's own text, in OpenAI's words."""

import json
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import torch

from foredraft.heads import Target
from foredraft.inference import generate
from tests.support import ROOT

MESSAGES = [{"role": "user", "content": "def add(self, other): é"}]
PROMPT = "def add(self, other):"
# As in DeepSeek-R1's, the prompt opens the reasoning. Qwen3 supports `enable_thinking`.
TEMPLATE = (ROOT / "train" / "data" / "plain_chat.jinja").read_text() + (
    "{%- if enable_thinking is defined and enable_thinking %}<think>\n{% endif %}{# until </think> #}"
)
# The target itself is the drafter, so that drafts are accepted; their cost on this machine decides nothing.
SETTINGS = ["drafter=draft:{model}", "drafter.tree=fixed", "log_accepted=accepted.jsonl", "log_text=true"]
SETTINGS += ["cors=['https://chat.example']", "max_num_seqs=4", "max_tokens=24"]


def plain(target: Target, text: str, seed: int = 0, tokens: int = 24, **settings) -> str:
    """Return what the target writes after a text, decoded by the library."""
    ids = target.text_tokenizer(text, return_tensors="pt").input_ids
    new = generate(target, None, ids, seed=seed, max_new_tokens=tokens, **settings).new_tokens[0]
    return target.text_tokenizer.decode(new, skip_special_tokens=True).rstrip("�")


def streamed(chunks) -> tuple[str, list]:
    kept = list(chunks)
    return "".join(chunk.choices[0].delta.content or "" for chunk in kept if chunk.choices), kept


def test_a_chat_is_the_target_s_answer(client, target):
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, seed=5)
    prompt = "User: def add(self, other): é\nAssistant:"
    assert answer.choices[0].message.content == plain(target, prompt, 5, temperature=1.0)
    assert answer.choices[0].message.role == "assistant" and answer.choices[0].finish_reason == "length"
    usage = answer.usage
    assert usage.completion_tokens == 24 and usage.total_tokens == 24 + usage.prompt_tokens
    assert usage.prompt_tokens == len(target.text_tokenizer(prompt).input_ids)
    assert usage.acceptance_length > 1.5
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_a_stream_gives_the_same_text_in_parts(client):
    facts = {"model": "tiny", "messages": MESSAGES, "seed": 5}
    whole = client.chat.completions.create(**facts)
    text, chunks = streamed(
        client.chat.completions.create(**facts, stream=True, stream_options={"include_usage": True})
    )
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant" and len(chunks) > 4
    assert [c.choices[0].finish_reason for c in chunks[:-1] if c.choices[0].finish_reason] == ["length"]
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0},
        {"temperature": 0.7, "top_p": 0.9, "frequency_penalty": 0.5},
        {"presence_penalty": 0.6, "extra_body": {"top_k": 20, "min_p": 0.01, "repetition_penalty": 1.2}},
        {"logit_bias": {"33": 5, "34": -100}},
    ],
)
def test_settings_are_those_of_the_engine(client, target, settings):
    answer = client.completions.create(model="tiny", prompt=PROMPT, seed=3, max_tokens=20, **settings)
    ours = {"temperature": 1.0, **settings, **settings.get("extra_body", {})}
    ours.pop("extra_body", None)
    bias = {int(token): float(value) for token, value in ours.pop("logit_bias", {}).items()}
    assert answer.choices[0].text == plain(target, PROMPT, 3, 20, **ours, logit_bias=bias)


def test_a_text_is_the_same_with_drafts_and_without_alone_and_among_others(client):
    def ask(seed: int, speculative: bool) -> str:
        facts = {"model": "tiny", "prompt": PROMPT * (1 + seed % 3), "max_tokens": 12 + seed}
        return client.completions.create(**facts, seed=seed, extra_body={"speculative": speculative}).choices[0].text

    alone = [ask(seed, True) for seed in range(8)]
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(ask, [*range(8), *range(8)], [True] * 8 + [False] * 8))
    assert together == [*alone, *alone] and len({*alone}) == 8


def test_what_was_accepted_is_logged(client, target, model):
    """Expect a line per text, in the order in which answers end; none for texts without drafts."""
    log = model.parent / "accepted.jsonl"
    assert log.stat().st_mode & 0o077 == 0
    before = len(log.read_text().splitlines())
    answer = client.completions.create(model="tiny", prompt=PROMPT, n=2, seed=5)
    client.completions.create(model="tiny", prompt=PROMPT, extra_body={"speculative": False})
    lines = [json.loads(line) for line in log.read_text().splitlines()[before:]]
    assert [line["id"] for line in lines] == [f"{answer.id}-0", f"{answer.id}-1"]
    for line, choice in zip(lines, answer.choices, strict=True):
        assert line["prompt_ids"] == target.text_tokenizer(PROMPT).input_ids and line["created"] == answer.created
        assert target.text_tokenizer.decode(line["ids"], skip_special_tokens=True).rstrip("�") == choice.text
        emitted = 1 + sum(count + 1 for count in line["accepted"])
        assert len(line["ids"]) <= emitted < len(line["ids"]) + 6 and sum(line["accepted"]) > 4
        assert all(0 <= one <= most for one, most in zip(line["accepted"], line["drafted"], strict=True))


def test_an_answer_ends_before_a_stop_string(client):
    facts = {"model": "tiny", "prompt": PROMPT, "seed": 4, "max_tokens": 24}
    whole = client.completions.create(**facts).choices[0].text
    stop = whole[9:12]
    cut = whole[: whole.index(stop)]
    answer = client.completions.create(**facts, stop=[stop, "\0\0"])
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (cut, "stop")
    chunks = list(client.completions.create(**facts, stop=stop, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == cut
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_n_choices_have_seeds_of_their_own(client, target):
    answer = client.completions.create(model="tiny", prompt=[PROMPT, "class"], n=2, seed=6, max_tokens=10)
    expected = [
        plain(target, text, seed, 10, temperature=1.0) for text, seed in ((PROMPT, 6), (PROMPT, 7), ("class", 8))
    ]
    assert [choice.text for choice in answer.choices[:3]] == expected and len(answer.choices) == 4
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3] and answer.usage.completion_tokens == 40
    again = client.chat.completions.create(model="tiny", messages=MESSAGES, n=3, max_tokens=8)
    assert len({choice.message.content for choice in again.choices}) == 3


def test_log_probabilities_are_the_target_s(client, target):
    facts = {"model": "tiny", "seed": 2, "max_tokens": 6}
    answer = (
        client.chat.completions.create(**facts, messages=MESSAGES, logprobs=True, top_logprobs=2).choices[0].logprobs
    )
    assert len(answer.content) == 6 and all(len(one.top_logprobs) == 2 for one in answer.content)
    ids = target.text_tokenizer(PROMPT).input_ids
    choice = client.completions.create(**facts, prompt=ids, logprobs=1).choices[0]
    at = target.forward(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
    token = target.text_tokenizer.convert_tokens_to_ids(target.text_tokenizer.tokenize(choice.logprobs.tokens[0]))[0]
    assert choice.logprobs.token_logprobs[0] == pytest.approx(at[token].item(), abs=1e-4)
    assert [*choice.logprobs.top_logprobs[0].values()] == pytest.approx([at.max().item()], abs=1e-4)


def test_a_trace_tells_what_was_drafted(client):
    facts = {"model": "tiny", "messages": MESSAGES, "seed": 5, "stream": True}
    text, chunks = streamed(client.chat.completions.create(**facts, extra_body={"trace": True}))
    traces = [chunk.trace for chunk in chunks if getattr(chunk, "trace", None)]
    assert "".join(token["text"] for trace in traces for token in trace["tokens"]) == text
    drafted = [token["drafted"] for trace in traces for token in trace["tokens"]]
    assert 4 < sum(drafted) < 24 and not drafted[0]
    tree = traces[1]["tree"]
    assert tree["accepted"][0] == 0 and len(tree["tokens"]) == len(tree["parents"]) == len(tree["probabilities"]) > 1


@pytest.mark.parametrize("host, status", [("evil.example:8000", 403), ("", 403), ("[::1]:1", 200), ("127.0.0.1", 200)])
def test_only_names_of_this_machine_are_answered(server, host, status):
    """Check servers without a key: a page in a browser here may have had its own name point to 127.0.0.1."""
    assert server.post(json.dumps({"prompt": "a", "max_tokens": 1}).encode(), "/v1/completions", Host=host)[0] == status


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"max_tokens": -2}, "max_tokens"),
        ({"temperature": 9}, "temperature"),
        ({"n": 0}, "n: "),
        ({"extra_body": {"best_of": 3}}, "best_of is not supported"),
        ({"extra_body": {"chat_template": "{{ x }}"}}, "chat_template is not supported"),
        ({"logit_bias": {"400": 1}}, "logit_bias or bad_words_ids contains token 400, but the target has 0 to"),
        ({"logit_bias": {"4": 101}}, "logit_bias.4"),
        ({"logit_bias": {"a": 1}}, "logit_bias.a"),
        ({"top_logprobs": 2}, "top_logprobs needs logprobs"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "not text"),
        ({"extra_body": {"typical_p": 0.5}}, "Unknown parameter: 'typical_p'"),
        ({"extra_body": {"chat_template_kwargs": {"tools": []}}}, "contains 'tools', which is reserved"),
        ({"extra_body": {"stop_token_ids": [400]}}, "stop_token_ids names .400."),
        ({"extra_body": {"min_tokens": 4}, "max_tokens": 3}, "min_tokens=4 is more than max_tokens=3"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(client, settings, message):
    for more in ({}, {"stream": True}):
        with pytest.raises(openai.BadRequestError, match=message) as caught:
            client.chat.completions.create(**{"model": "tiny", "messages": MESSAGES} | more | settings)
        assert caught.value.type == "invalid_request_error"


def test_fields_that_do_no_harm_are_ignored(client, model):
    """Check also that `store` keeps an answer out of the log."""
    before = (model.parent / "accepted.jsonl").read_text()
    harmless = {"user": "me", "metadata": {"a": "b"}, "store": False, "response_format": {"type": "text"}, "n": None}
    asked = {"model": "tiny", "messages": MESSAGES, "max_tokens": 1, "service_tier": "auto"}
    harmless |= {
        "stop": ["", ""],
        "top_logprobs": 0,
        "prediction": {"type": "content", "content": "guess"},
        "tools": [],
    }
    more = {"echo": None, "client_metadata": {"session": "a"}, "store": False, "cache_prompt": True, "keep_alive": "5m"}
    more |= {
        "temperature": "",
        "logit_bias": [],
        "stream_options": [],
        "separate_reasoning": True,
        "suffix": "",
    }  # empty is not set
    assert client.completions.create(model="tiny", prompt=PROMPT, max_tokens=1, n=2, best_of=2, extra_body=more).choices
    assert client.chat.completions.create(**asked, **harmless, extra_body=more).choices
    for stop, options in (("", {"include_usage": None}), (None, None), ([], {})):
        assert [*client.chat.completions.create(**asked, stop=stop, stream=True, stream_options=options, store=False)]
    assert (model.parent / "accepted.jsonl").read_text() == before


def test_values_of_other_servers_mean_what_they_mean_there(client):
    """Check that top_p=0 is greedy as in OpenAI's API, and that seed=-1 is a random seed as in vLLM and llama.cpp."""
    asked = {"model": "tiny", "prompt": PROMPT, "max_tokens": 24}
    greedy, *drawn = (
        client.completions.create(**asked, **more).choices[0].text
        for more in ({"temperature": 0}, {"top_p": 0}, {"top_p": 0, "seed": 3}, {"seed": -1}, {"seed": -1})
    )
    assert drawn[:2] == [greedy, greedy] and drawn[2] != drawn[3]


def test_the_model_has_a_name(client):
    assert client.models.retrieve("tiny").max_model_len == 256
    assert client.completions.create(model="", prompt="a", max_tokens=1).model == "tiny"  # as some clients send none
    for ask in (client.models.retrieve, lambda name: client.chat.completions.create(model=name, messages=MESSAGES)):
        with pytest.raises(openai.NotFoundError, match="other") as caught:
            ask("other/model")
        assert caught.value.code == "model_not_found"


@pytest.mark.parametrize(
    "asked, words",
    [({"messages": [{"role": "user", "content": "word " * 300}]}, "messages"), ({"max_tokens": 250}, "messages")],
)
def test_what_the_context_does_not_hold_is_refused_in_openai_s_words(client, asked, words):
    with pytest.raises(openai.BadRequestError, match=r"maximum context length is 256 tokens\. However") as one:
        client.chat.completions.create(**{"model": "tiny", "messages": MESSAGES} | asked)
    assert one.value.code == "context_length_exceeded" and one.value.param == words


def test_thoughts_are_told_apart_where_the_template_begins_them(client):
    asked = {"model": "tiny", "messages": MESSAGES, "seed": 5, "extra_body": {"chat_template_kwargs": {}}}
    assert client.chat.completions.create(**asked).choices[0].message.reasoning is None
    for more in ({"chat_template_kwargs": {"enable_thinking": True}}, {"reasoning_effort": "low"}):
        message = client.chat.completions.create(**asked | {"extra_body": more}).choices[0].message
        assert message.reasoning and not message.content and message.reasoning_content == message.reasoning
        chunks = [*client.chat.completions.create(**asked | {"extra_body": more}, stream=True)]
        for name in ("reasoning", "reasoning_content"):
            thoughts = [getattr(chunk.choices[0].delta, name, None) or "" for chunk in chunks]
            assert "".join(thoughts) == message.reasoning
        assert not any(chunk.choices[0].delta.content for chunk in chunks)


def test_json_follows_the_reasoning_that_the_prompt_opens(client):
    asked = {
        "model": "tiny",
        "messages": MESSAGES,
        "seed": 5,
        "max_tokens": 9,
        "response_format": {"type": "json_object"},
    }
    assert client.chat.completions.create(**asked).choices[0].message.content.lstrip().startswith("{")
    thinks = {"chat_template_kwargs": {"enable_thinking": True}}
    message = client.chat.completions.create(**asked, extra_body=thinks).choices[0].message
    assert message.reasoning and not message.reasoning.startswith("{") and not message.content


def test_a_stop_string_ends_the_answer_and_not_its_reasoning(client, target):
    word = target.text_tokenizer(" return").input_ids[0]
    asked = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": 4, "logit_bias": {str(word): 100}}
    asked["stop"] = target.text_tokenizer.decode([word]).strip()
    assert client.chat.completions.create(**asked).choices[0].finish_reason == "stop"
    thinks = {"chat_template_kwargs": {"enable_thinking": True}}
    (choice,) = client.chat.completions.create(**asked, extra_body=thinks).choices
    assert choice.finish_reason == "length" and choice.message.reasoning


def test_token_ids_are_told_to_who_asks(client, target):
    asked = {"model": "tiny", "seed": 5, "extra_body": {"return_token_ids": True}}
    answer = client.chat.completions.create(**asked, messages=MESSAGES)
    (choice,) = answer.choices
    assert target.text_tokenizer.decode(answer.prompt_token_ids).endswith("é\nAssistant:")
    assert target.text_tokenizer.decode(choice.token_ids).rstrip("�") == choice.message.content
    chunks = [*client.chat.completions.create(**asked, messages=MESSAGES, stream=True)]
    assert chunks[0].prompt_token_ids == answer.prompt_token_ids
    assert [token for chunk in chunks[1:] for token in chunk.choices[0].token_ids] == choice.token_ids
    (choice,) = client.completions.create(**asked, prompt=[7, 8]).choices
    assert choice.prompt_token_ids == [7, 8] and len(choice.token_ids) == 24


def test_an_echo_is_the_prompt_with_its_log_probabilities(client, target):
    """Ask like evaluation harnesses: a prompt's entries, the first without a value, and the new token's."""
    ids = target.text_tokenizer("def add(self, other):\n    return self" * 3).input_ids[:70]
    facts = {"model": "tiny", "max_tokens": 1, "echo": True, "seed": 1}
    plain, *scored = (
        client.completions.create(**facts, prompt=[ids, ids[:9]], **more).choices[0]
        for more in ({}, {"logprobs": 2}, {"logprobs": 2, "temperature": 0, "extra_body": {"speculative": False}})
    )
    assert plain.text.startswith(target.text_tokenizer.decode(ids))
    own = target.forward(torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = own[:-1].gather(-1, torch.tensor(ids)[1:, None])[:, 0].tolist()
    for choice in scored:
        found = choice.logprobs
        assert found.token_logprobs[0] is found.top_logprobs[0] is None and len(found.tokens) == len(ids) + 1
        assert found.token_logprobs[1:-1] == pytest.approx(expected, abs=1e-4)
        assert max(found.top_logprobs[5].values()) == pytest.approx(own[4].max().item(), abs=1e-4)
    (streamed,) = [*client.completions.create(**facts, prompt="def", stream=True)][:1]
    assert streamed.choices[0].text == "def"


def test_pages_of_named_origins_may_ask(server):
    asked = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
    for origin, allowed in (("https://chat.example", "https://chat.example"), ("https://evil.example", None)):
        _, headers, _ = server.post(asked, "/v1/completions", Origin=origin)
        assert headers.get("access-control-allow-origin") == allowed
