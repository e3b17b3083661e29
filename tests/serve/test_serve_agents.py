"""Agents: a conversation of three tool calls and an answer, through the openai package and the served application over HTTP,
for each chat template that has a tool role. The tiny target writes no calls by itself, so they are forced."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest
import uvicorn

from foredraft.heads import Target
from foredraft.inference.drafters import NgramDrafter
from foredraft.inference.serve.app import create_app
from foredraft.inference.serve.worker import Worker
from tests.support import ROOT

TEMPLATES = ROOT / "tests" / "support" / "chat_templates"
BY_DAY = ("mistral", "gpt_oss", "qwen3_coder")
WITH_TOOLS = [
    pytest.param(path.stem, marks=[] if path.stem in BY_DAY else pytest.mark.nightly)
    for path in sorted(TEMPLATES.glob("*.jinja"))
    if path.stem not in ("deepseek_r1", "gemma3", "phi3", "phi4", "smollm2")  # these do not show tools
]
REASONING = ("glm5", "minimax_m2", "qwen3_5", "qwq")  # their prompts open reasoning, which the tiny target never ends
KIND = {"type": "object", "properties": {"kind": {"enum": ["alpha", "beta"]}}, "required": ["kind"]}
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": "d", "parameters": KIND | {"additionalProperties": False}},
    }
    for name in ("look_up", "weigh")
]
QUESTION = {"role": "user", "content": "Which is heavier?"}


@pytest.fixture(scope="module")
def serve(tiny_path: Path) -> Callable:
    """Return the served application for the tiny target with this chat template, and a client."""
    target = Target.from_pretrained(tiny_path, dtype="float32", device="cpu")
    target.context = 8192

    @contextmanager
    def start(name: str) -> Iterator[openai.OpenAI]:
        target.text_tokenizer.chat_template = (TEMPLATES / f"{name}.jinja").read_text()
        if name in REASONING:
            before, _, after = target.text_tokenizer.chat_template.rpartition("<think>")
            target.text_tokenizer.chat_template = before + after.removeprefix("\\n")
        app = create_app(Worker(target, NgramDrafter()), ["tiny"])
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
        thread = threading.Thread(target=server.run)
        thread.start()
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        try:
            yield openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=120)
        finally:
            server.should_exit = True
            thread.join()

    blank = [
        token
        for token, text in enumerate(map(target.text_tokenizer.decode, range(target.vocab_size)))
        if text.isspace()
    ]
    start.facts = {  # white space between the parts of JSON would fill the answer
        "model": "tiny",
        "temperature": 0,
        "parallel_tool_calls": False,  # it would go on calling
        "logit_bias": {str(token): -100 for token in blank},
        "extra_body": {"return_token_ids": True},
    }
    start.decode = target.text_tokenizer.decode
    return start


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_an_agent_calls_three_tools_and_answers(serve, name):
    messages: list = [QUESTION]
    with serve(name) as client:
        for number in range(3):
            (choice,) = client.chat.completions.create(
                messages=messages, tools=TOOLS, tool_choice="required", max_tokens=400, **serve.facts
            ).choices
            assert choice.finish_reason == "tool_calls" and not choice.message.content, choice
            messages.append(choice.message.model_dump())  # as agents replay it, with its null fields
            messages += [
                {"role": "tool", "tool_call_id": call.id, "content": f"result {number}"}
                for call in choice.message.tool_calls
            ]
            assert all(call.function.name in ("look_up", "weigh") for call in choice.message.tool_calls)
        answer = client.chat.completions.create(messages=messages, tools=TOOLS, max_tokens=4, **serve.facts)
        (choice,) = answer.choices
        assert choice.finish_reason == "length" and choice.message.tool_calls is None
    prompt = serve.decode(answer.prompt_token_ids)
    assert all(f"result {number}" in prompt for number in range(3))
    assert all(call["function"]["name"] in prompt for message in messages for call in message.get("tool_calls") or [])


def test_earlier_calls_are_replayed_to_a_template_that_shows_no_tools(serve):
    """Use DeepSeek-R1's, whose tools are described by the user; asking for calls is refused by name."""
    call = {"id": "call_1", "type": "function", "function": {"name": "look_up", "arguments": '{"kind": "alpha"}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "audio": None}
    turns = [message, {"role": "tool", "tool_call_id": "call_1", "content": "result"}] * 3
    with serve("deepseek_r1") as client:
        answer = client.chat.completions.create(messages=[QUESTION, *turns], max_tokens=2, **serve.facts)
        prompt = serve.decode(answer.prompt_token_ids)
        assert prompt.count("look_up") == prompt.count("result") == 3 and prompt.count("<｜Assistant｜>") == 1
        with pytest.raises(openai.BadRequestError, match=r"tools: the chat template of .* Remove tools"):
            client.chat.completions.create(messages=[QUESTION], tools=TOOLS, **serve.facts)
