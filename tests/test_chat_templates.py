"""The chat templates of real models: what is in the loss is exactly what the model wrote, found here by hand.

Once from messages, through the template, and once from what an engine gave: token ids, and messages as its parsers split
them.
The conversations are ours. What an answer wrote is all that the model emits after its generation prompt: thoughts, the answer
or a tool call, and the token that ends its turn.
"""

import asyncio
import json
from datetime import date
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from openai.types.chat import ChatCompletion

from foredraft.scripts.preview import runs
from foredraft.train.data.chat_template import ChatFormat
from foredraft.train.data.encoding import Encoder
from foredraft.train.data.generation_clients import Server
from foredraft.train.data.layouts import SkippedRow, split_thoughts
from foredraft.train.data.regeneration import AnsweredRow, GenerationSettings, questions
from foredraft.train.data.sources import Row, Source
from tests.support.chats import MODELS, form_of


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def assistant(text: str, **more) -> dict:
    return {"role": "assistant", "content": text, **more}


TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
CALL = {"id": "123456789", "type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
CONVERSATIONS = {
    "one turn": [user("What is 2 + 3?"), assistant("It is 5.")],
    "a system prompt": [{"role": "system", "content": "Be brief."}, user("What is 2 + 3?"), assistant("It is 5.")],
    "two turns": [user("What is 2 + 3?"), assistant("It is 5."), user("And 4 more?"), assistant("Then 9.\n\nReally.")],
    "thoughts": [user("What is 2 + 3?"), assistant("It is 5.", reasoning_content="2 and 3.")],
    "thoughts, two turns": [
        user("What is 2 + 3?"),
        assistant("It is 5.", reasoning_content="2 and 3."),
        user("And 4 more?"),
        assistant("Then 9.", reasoning_content="5 and 4."),
    ],
    "thoughts in the text": [user("What is 2 + 3?"), assistant("<think>\n2 and 3.\n</think>\n\nIt is 5.")],
    "a tool": [
        user("What is 2 + 3?"),
        assistant("", tool_calls=[CALL]),
        {"role": "tool", "content": "5", "tool_call_id": "123456789"},
        assistant("It is 5."),
    ],
}
CONVERSATIONS["thoughts and a tool"] = [
    message | ({"reasoning_content": thought} if thought else {})
    for message, thought in zip(CONVERSATIONS["a tool"], ["", "Call it.", "", "2 and 3."], strict=True)
]
PLAIN = {
    "one turn": ["It is 5."],
    "a system prompt": ["It is 5."],
    "two turns": ["It is 5.", "Then 9.\n\nReally."],
}
TWO_THOUGHTS = [("2 and 3.", "It is 5."), ("5 and 4.", "Then 9.")]
QWEN_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
WROTE: dict[str, dict[str, list[str]]] = {  # without the end of the turn
    "llama3": PLAIN | {"a tool": ['{"name": "add", "parameters": {"a": 2, "b": 3}}', "It is 5."]},
    "gemma3": PLAIN,
    "smollm2": PLAIN,
    "mistral": PLAIN
    | {"a tool": ['[TOOL_CALLS][{"name": "add", "arguments": {"a": 2, "b": 3}, "id": "123456789"}]', "It is 5."]},
    "qwen3": PLAIN
    | {
        "thoughts": ["<think>\n2 and 3.\n</think>\n\nIt is 5."],
        "thoughts, two turns": [f"<think>\n{thought}\n</think>\n\n{answer}" for thought, answer in TWO_THOUGHTS],
        "thoughts in the text": ["<think>\n2 and 3.\n</think>\n\nIt is 5."],
        "thoughts and a tool": [
            f"<think>\nCall it.\n</think>\n\n{QWEN_CALL}",
            "<think>\n2 and 3.\n</think>\n\nIt is 5.",
        ],
        "a tool": [QWEN_CALL, "It is 5."],
    },
    "qwq": {
        "thoughts": ["2 and 3.\n</think>\n\nIt is 5."],  # the generation prompt begins the thoughts
        "thoughts, two turns": [f"{thought}\n</think>\n\n{answer}" for thought, answer in TWO_THOUGHTS],
        "thoughts in the text": ["2 and 3.\n</think>\n\nIt is 5."],
        "thoughts and a tool": [f"Call it.\n</think>\n\n{QWEN_CALL}", "2 and 3.\n</think>\n\nIt is 5."],
    },
    "deepseek_r1": {
        "thoughts": ["2 and 3.\n</think>\n\nIt is 5."],
        "thoughts, two turns": [f"{thought}\n</think>\n\n{answer}" for thought, answer in TWO_THOUGHTS],
        "thoughts in the text": ["2 and 3.\n</think>\n\nIt is 5."],
    },
    "gpt_oss": {name: [f"<|channel|>final<|message|>{answer}" for answer in answers] for name, answers in PLAIN.items()}
    | {
        "thoughts": [
            "<|channel|>analysis<|message|>2 and 3.<|end|><|start|>assistant<|channel|>final<|message|>It is 5."
        ],
        "thoughts, two turns": [
            f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant<|channel|>final<|message|>{answer}"
            for thought, answer in TWO_THOUGHTS
        ],
        "a tool": [
            ' to=functions.add<|channel|>commentary json<|message|>{"a": 2, "b": 3}<|call|>',
            "<|channel|>final<|message|>It is 5.",
        ],
        "thoughts and a tool": [
            "<|channel|>analysis<|message|>Call it.<|end|>"
            '<|start|>assistant to=functions.add<|channel|>commentary json<|message|>{"a": 2, "b": 3}<|call|>',
            "<|channel|>analysis<|message|>2 and 3.<|end|><|start|>assistant<|channel|>final<|message|>It is 5.",
        ],
    },
}
CASES = [(model, name) for model, wrote in WROTE.items() for name in wrote]


def learned(form: ChatFormat, documents: list) -> list[str]:
    """Each stretch of tokens in the loss, as text."""
    return [text for document in documents for flag, text in runs(form.tokenizer, document) if flag]


def begins(documents: list) -> list[list[int]]:
    """The tokens before each stretch in the loss: the prompts behind which it was written."""
    return [tokens[:at] for tokens, mask, _ in documents for at in range(1, len(mask)) if mask[at] and not mask[at - 1]]


def wrote(model: str, name: str) -> list[str]:
    """All that the model emits, answer by answer."""
    return [text if text.endswith("<|call|>") else text + MODELS[model].end for text in WROTE[model][name]]


def rows_of(model: str, value: dict, **settings) -> tuple[ChatFormat, list]:
    """A row's documents, as training reads them."""
    form = form_of(model)
    return form, Encoder(form.tokenizer, Source("x"), **settings).documents(Row("", value))[0]


@pytest.mark.parametrize(("model", "name"), CASES)
@pytest.mark.parametrize("with_tools", [False, True])
def test_what_is_learned_is_what_the_model_wrote(model: str, name: str, with_tools: bool):
    row = {"messages": CONVERSATIONS[name]} | ({"tools": json.dumps([TOOL["function"]])} if with_tools else {})
    form, documents = rows_of(model, row)
    assert learned(form, documents) == wrote(model, name)
    if model != "qwen3" or "thoughts" in name:  # which has empty thoughts before an answer without any
        places = [number for number, message in enumerate(row["messages"]) if message["role"] == "assistant"]
        tools = [TOOL] if with_tools else None
        assert begins(documents) == [form.prompt(row["messages"][:place], tools) for place in places]
    shown = form.tokenizer.decode(documents[-1].tokens)
    knows_tools = model not in ("gemma3", "smollm2", "deepseek_r1")
    assert ("Adds." in shown) == (with_tools and knows_tools)


class VLLM:
    """Stands for the engine: gives token ids as the model wrote them, and what its parsers make of the text."""

    def __init__(self, model: str, name: str, cut: int = 0):
        self.form, self.cut = form_of(model), cut
        self.left = list(wrote(model, name))
        self.answers = [split_thoughts(one) for one in CONVERSATIONS[name] if one["role"] == "assistant"]
        self.chat, self.prompts = SimpleNamespace(completions=self), []

    async def create(self, messages: list[dict], tools: list[dict] | None = None, **request: Any) -> ChatCompletion:
        assert request["extra_body"]["return_token_ids"]
        answer = dict(self.answers.pop(0))
        answer["reasoning"], answer["content"] = answer.pop("reasoning_content", None), answer["content"] or None
        if "tool_calls" in answer:
            function = answer["tool_calls"][0]["function"]
            function = function | {"arguments": json.dumps(function["arguments"])}
            answer["tool_calls"] = [answer["tool_calls"][0] | {"function": function}]
        prompt, ids = self.form.prompt(messages, tools), self.form.tokenizer(self.left.pop(0))["input_ids"]
        if self.cut:
            ids, answer["content"] = ids[: self.cut], None
        self.prompts.append(prompt)
        choice = {"index": 0, "message": answer, "token_ids": ids, "finish_reason": "length" if self.cut else "stop"}
        more = {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "prompt_token_ids": prompt}
        return ChatCompletion.model_validate({"choices": [choice], **more})

    def regenerated(self, row: dict) -> dict:
        server = Server("http://127.0.0.1:9", "m", 1.0, 0, GenerationSettings(0.0, None, 99, 0), {})
        server.client = self
        (request,) = questions(SimpleNamespace(rows=lambda: [Row("", row)], conversation=Source("x").conversation), {})
        answered = AnsweredRow()
        asyncio.run(server.converse(request, answered))
        return json.loads(json.dumps(answered.row))


@pytest.mark.parametrize(("model", "name"), CASES)
def test_what_an_engine_wrote_is_learned_as_it_was_written(model: str, name: str):
    """Its own tokens, behind the prompts that it was given, whatever the template makes of them later."""
    engine = VLLM(model, name)
    form, documents = rows_of(model, engine.regenerated({"messages": CONVERSATIONS[name], "tools": [TOOL]}))
    asked = wrote(model, name)[: 1 if "a tool" in name else None]  # no result of the target's own call
    assert learned(form, documents) == asked
    assert begins(documents) == engine.prompts


@pytest.mark.parametrize("model", ["qwen3", "qwq", "deepseek_r1", "gpt_oss"])
def test_thoughts_that_were_cut_off_are_learned_up_to_there(model: str):
    """From ids, and from messages as an engine splits them."""
    row = VLLM(model, "thoughts", cut=40).regenerated({"messages": CONVERSATIONS["thoughts"]})
    assert row["error"] == "an answer without content (finish_reason length)"
    form, documents = rows_of(model, row)
    whole = wrote(model, "thoughts")[0]
    assert learned(form, documents) == [form.tokenizer.decode(form.tokenizer(whole)["input_ids"][:40])]
    for name in ("tokens", "starts", "written"):
        del row[name]
    (text,) = learned(*rows_of(model, row))
    assert whole.startswith(text) and text.endswith("2 and 3.")


def test_ids_of_another_tokenizer_are_told_from_the_text():
    row = VLLM("qwen3", "one turn").regenerated({"messages": CONVERSATIONS["one turn"]})
    with pytest.raises(SkippedRow, match="tokens of another target"):
        rows_of("qwen3", row | {"tokens": [token ^ 1 for token in row["tokens"]]})


@pytest.mark.parametrize("name", PLAIN)
def test_qwen3_without_thinking(name: str):
    """The generation prompt has an empty thought, which the model does not write."""
    form = form_of("qwen3", thinking=False)
    found = learned(form, form.documents(CONVERSATIONS[name]))
    assert found == [f"{text}<|im_end|>" for text in PLAIN[name]]


QUESTION = "What is 2 + 3?"
CHATML = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
PROMPTS = {  # the one of the first turn, whole
    "deepseek_r1": f"<｜begin▁of▁sentence｜><｜User｜>{QUESTION}<｜Assistant｜><think>\n",
    "gemma3": f"<bos><start_of_turn>user\n{QUESTION}<end_of_turn>\n<start_of_turn>model\n",
    "gpt_oss": "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\n"
    f"Knowledge cutoff: 2024-06\nCurrent date: {date.today()}\n\nReasoning: medium\n\n"
    "# Valid channels: analysis, commentary, final. Channel must be included for every message.<|end|>"
    f"<|start|>user<|message|>{QUESTION}<|end|><|start|>assistant",
    "llama3": "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n"
    "Today Date: 26 Jul 2024\n\n<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n"
    f"{QUESTION}<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "mistral": f"<s>[INST]{QUESTION}[/INST]",
    "qwen3": CHATML,
    "qwq": f"{CHATML}<think>\n",
    "smollm2": "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    + CHATML,
}


@pytest.mark.parametrize("model", MODELS)
def test_the_ids_are_those_of_the_conversation_written_by_hand(model: str):
    """The tokens before an answer's are those that the model is given where the head is used."""
    name = "thoughts in the text" if model in ("qwq", "deepseek_r1", "qwen3") else "one turn"
    form, (document,) = rows_of(model, {"messages": CONVERSATIONS[name]})
    before, written = (form.tokenizer(text)["input_ids"] for text in (PROMPTS[model], wrote(model, name)[0]))
    whole = [*before, *written]
    assert document.tokens[: len(whole)] == whole and before == form.prompt(CONVERSATIONS[name][:1])
    assert np.flatnonzero(document.loss_mask).tolist() == list(range(len(before), len(whole)))
    assert not form.tokenizer.decode(document.tokens[len(whole) :]).strip()
