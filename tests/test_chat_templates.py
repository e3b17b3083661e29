"""The chat templates of real models: what is in the loss is exactly what the model wrote, found here by hand.

The conversations are ours. What an answer wrote is all that the model emits after its generation prompt: thoughts, the answer
or a tool call, and the token that ends its turn.
"""

from pathlib import Path
from typing import NamedTuple

import pytest

from foredraft.train.data.chat_template import ChatFormat
from tests.support.chats import tokenizer

TEMPLATES = Path(__file__).parent / "support" / "chat_templates"


class Model(NamedTuple):
    bos: str
    end: str  # of a turn
    special: list[str]


MODELS = {
    "deepseek_r1": Model(
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        ["<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"],
    ),
    "gemma3": Model("<bos>", "<end_of_turn>", ["<start_of_turn>"]),
    "gpt_oss": Model(
        "<|startoftext|>", "<|return|>", ["<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|call|>"]
    ),
    "llama3": Model("<|begin_of_text|>", "<|eot_id|>", ["<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>"]),
    "mistral": Model("<s>", "</s>", ["[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"]),
    "qwen3": Model(
        "<|endoftext|>", "<|im_end|>", ["<|im_start|>", "<think>", "</think>", "<tool_call>", "</tool_call>"]
    ),
    "qwq": Model("<|endoftext|>", "<|im_end|>", ["<|im_start|>", "<think>", "</think>", "<tool_call>", "</tool_call>"]),
    "smollm2": Model("<|im_start|>", "<|im_end|>", []),
}


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def assistant(text: str, **more) -> dict:
    return {"role": "assistant", "content": text, **more}


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
        "a tool": [QWEN_CALL, "It is 5."],
    },
    "qwq": {
        "thoughts": ["2 and 3.\n</think>\n\nIt is 5."],  # the generation prompt begins the thoughts
        "thoughts, two turns": [f"{thought}\n</think>\n\n{answer}" for thought, answer in TWO_THOUGHTS],
        "thoughts in the text": ["2 and 3.\n</think>\n\nIt is 5."],
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
    },
}
EMPTY_THOUGHT = "an answer without thoughts teaches an empty thought"
REFUSED = "refused: the template begins the answer otherwise than the generation prompt"
FAILS = {
    ("qwen3", "one turn"): EMPTY_THOUGHT,
    ("qwen3", "a system prompt"): EMPTY_THOUGHT,
    ("qwen3", "two turns"): EMPTY_THOUGHT,
    ("qwen3", "a tool"): EMPTY_THOUGHT,
    ("qwq", "thoughts"): REFUSED,
    ("qwq", "thoughts, two turns"): REFUSED,
    ("deepseek_r1", "thoughts"): REFUSED,
    ("deepseek_r1", "thoughts, two turns"): REFUSED,
    ("deepseek_r1", "thoughts in the text"): REFUSED,
    ("mistral", "a system prompt"): "refused: the template shows the system prompt only with the last question",
}


def cases() -> list:
    return [
        pytest.param(model, name, id=f"{model}-{name}", marks=marks(model, name))
        for model, wrote in WROTE.items()
        for name in wrote
    ]


def marks(model: str, name: str) -> list:
    reason = FAILS.get((model, name))
    return [] if reason is None else [pytest.mark.xfail(strict=True, reason=reason)]


def form_of(model: str, **settings) -> ChatFormat:
    bos, end, special = MODELS[model]
    template = (TEMPLATES / f"{model}.jinja").read_text()
    return ChatFormat(tokenizer(template, bos, end, [bos, end, *special]), **settings)


def learned(form: ChatFormat, messages: list[dict]) -> list[str]:
    """Each stretch of tokens in the loss, as text."""
    found = []
    for tokens, mask in form.documents(messages):
        before = False
        for token, flag in zip(tokens, mask, strict=True):
            if flag and not before:
                found.append([])
            if flag:
                found[-1].append(token)
            before = flag
    return [form.tokenizer.decode(tokens) for tokens in found]


@pytest.mark.parametrize(("model", "name"), cases())
def test_what_is_learned_is_what_the_model_wrote(model: str, name: str):
    end = MODELS[model].end
    wrote = [text if text.endswith("<|call|>") else text + end for text in WROTE[model][name]]
    assert learned(form_of(model), CONVERSATIONS[name]) == wrote


@pytest.mark.parametrize("name", PLAIN)
def test_qwen3_without_thinking(name: str):
    """The generation prompt has an empty thought, which the model does not write."""
    found = learned(form_of("qwen3", thinking=False), CONVERSATIONS[name])
    assert found == [f"{text}<|im_end|>" for text in PLAIN[name]]


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(model, marks=[pytest.mark.xfail(strict=True, reason=REFUSED)] if model == "deepseek_r1" else [])
        for model in MODELS
    ],
)
def test_what_is_learned_follows_the_generation_prompt(model: str):
    """The tokens before an answer's are those that the model is given where the head is used."""
    form = form_of(model)
    messages = CONVERSATIONS["thoughts in the text" if model in ("qwq", "deepseek_r1") else "one turn"]
    tokens, mask = form.documents(messages)[0]
    assert tokens[: list(mask).index(True)] == form.prompt(messages[:1])
