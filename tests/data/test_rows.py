"""Rows as published data sets have them: whose words are whose, which answers are learned, and what a file format adds."""

import json
from pathlib import Path
from types import SimpleNamespace

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from foredraft.inference.serve.openai.prompts import PromptEncoder
from foredraft.inference.serve.openai.protocol import ChatRequest
from foredraft.scripts.preview import runs
from foredraft.train.data.columns import declared, unwrapped
from foredraft.train.data.encoding import Encoder
from foredraft.train.data.layouts import SkippedRow, tools
from foredraft.train.data.prompt_sets import question
from foredraft.train.data.sources import Row, Source
from tests.support import ROOT
from tests.support.chats import CHATML, SPECIAL, form_of, tokenizer

ASKED = {"role": "user", "content": "q"}
HI = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
SHAREGPT = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]
BRIEF = {"role": "system", "content": "Be brief."}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}


def said(row: dict) -> list[dict] | str:
    return Source("x").conversation(Row("", row))


def learned(row: dict, words=None) -> list[str]:
    """Return each stretch in the loss."""
    words = words or form_of("smollm2").tokenizer
    documents, _ = Encoder(words, Source("x")).documents(Row("", row))
    return [text for document in documents for flag, text in runs(words, document) if flag]


def answer(text: str, **more) -> dict:
    return {"role": "assistant", "content": text, **more}


def test_a_system_prompt_in_a_column_is_there_where_heads_are_measured():
    asked = [{"role": "user", "content": text} for text in ("a", "b")]
    for row, turns in (
        ({"messages": HI}, [[BRIEF, HI[0]]]),
        ({"turns": ["a", "b"]}, [[BRIEF, asked[0]], [asked[1]]]),
        ({"question": "a"}, [[BRIEF, asked[0]]]),
    ):
        assert question(Row("", row | {"system": "Be brief."}), "any").turns == turns


@pytest.mark.parametrize(
    ("row", "asked"),
    [
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, ["a"]),  # ShareGPT
        ({"problem": "a", "solution": "b", "answer": 7}, ["a"]),  # MATH
        ({"instruction": "a", "input": "b", "output": "c"}, ["a\n\nb"]),  # Alpaca
        ({"question": "a", "choices": ["b", "c"], "answer": 1}, ["a"]),  # MMLU
        ({"prompt": [BRIEF, HI[0]]}, ["Be brief.", "hi"]),  # TRL
        ({"turns": [], "messages": HI}, ["hi"]),
        ({"turns": "ab", "prompt": "c"}, ["ab"]),
        ({"conversations": HI, "question": "a"}, ["a"]),
    ],
)
def test_rows_as_benchmarks_have_them_are_one_prompt(row, asked):
    [messages] = question(Row("", row), "any").turns
    assert [message["content"] for message in messages] == asked


def test_a_list_of_prompts_holds_no_answer():
    """Read MT-Bench of the Hub, and an arena: the second prompt was learned as the answer to the first."""
    asked = [{"role": "user", "content": text} for text in ("a", "b")]
    assert said({"prompt": ["a", "b"], "reference": []}) == said({"question": ["a", "b"]}) == asked
    assert said({"prompt": ["a", "b"], "response": "c"}) == [*asked, answer("c")]
    assert said({"prompt": ["a", "b", "c"], "response": "d"})[1:2] == [
        answer("b")
    ]  # an answer is missing at its end alone
    assert said({"input": "a", "response": "b", "output": "c"})[-1] == answer("b")


def test_a_prompt_has_no_empty_answers():
    with pytest.raises(ValueError, match="an empty turn"):
        question(Row("", {"messages": [*HI[:1], answer(""), *HI[:1]]}), "any")


def test_a_system_prompt_among_the_messages_wins_unless_it_is_empty():
    assert said({"system": "Be long.", "messages": [BRIEF, *HI]}) == [BRIEF, *HI]
    for nothing in ("", "  ", None):
        empty = {"role": "system", "content": nothing}
        assert said({"system": "Be brief.", "messages": [empty, *HI]}) == [BRIEF, *HI]
        assert said({"messages": [empty, *HI]}) == HI


@pytest.mark.parametrize(
    ("row", "texts"),
    [
        ({"weight": 0}, ["good"]),
        ({"weight": 0.0}, ["good"]),
        ({"weight": -1}, ["good"]),
        ({"train": False}, ["good"]),
        ({"train_turn": False}, ["good"]),
        ({"training": False}, ["good"]),
        ({"loss": False}, ["good"]),
        ({"loss_scale": 0}, ["good"]),
        ({"loss_scale": 2.0}, ["bad", "good"]),
        ({"loss_mask": 0}, ["good"]),
        ({"mask": 0}, ["good"]),
        ({"weight": "0"}, ["good"]),
        ({"train": "False"}, ["good"]),
        ({"weight": "1.0", "train": "true"}, ["bad", "good"]),
        ({"trainable": False}, ["good"]),
        ({"weight": 0.5}, ["bad", "good"]),
        ({"weight": None, "loss": None}, ["bad", "good"]),
        ({"train": True}, ["bad", "good"]),
    ],
)
def test_an_answer_that_its_row_does_not_want_learned_is_context(row: dict, texts: list[str]):
    value = {"messages": [ASKED, answer("bad", **row), ASKED, answer("good")]}
    assert learned(value) == [f"{text}<|im_end|>" for text in texts]
    words = form_of("smollm2").tokenizer
    (document, *_), _ = Encoder(words, Source("x")).documents(Row("", value))
    assert "bad" in words.decode(document.tokens)


@pytest.mark.parametrize(
    "mask",
    [
        {"weights": [0, 0, 0, 1]},
        {"weights": [0, 1]},
        {"weights": "[0, 1]"},  # CSV
        {"mask": [False, True]},
        {"train": [1, 0, 1, 1]},
    ],
)
def test_a_row_can_say_of_all_its_answers_which_are_learned(mask: dict):
    assert learned({"messages": [ASKED, answer("bad"), ASKED, answer("good")]} | mask) == ["good<|im_end|>"]


NOT_LEARNED = [
    {"messages": HI, "weight": 0},
    {"messages": [HI[0], answer("hello", weight=0)]},
    {"prompt": "hi", "response": "hello", "train": False},
    {"prompt": HI[:1], "completion": HI[1:], "label": False},
    {"prompt": "hi", "completion": "hello", "label": False},
    {"prompt": "hi", "completion": "hello", "label": 0},
    {"messages": HI, "label": False},
    {"messages": HI, "kto_tag": False},
    {"messages": HI, "weight": "0.0"},
    {"messages": HI, "loss_mask": 0},
    {"chosen": HI, "rejected": HI, "train": False},
]


def test_blank_text_next_to_a_call_and_a_tool_that_prints_a_line_break_cost_no_row():
    row = {"messages": [ASKED, answer("\n\n", tool_calls=[CALL]), {"role": "tool", "content": "\n"}, answer("done")]}
    assert [message["content"] for message in said(row)] == [ASKED["content"], "\n\n", "\n", "done"]
    parts = [{"type": "text", "text": "\n"}]
    row = {"messages": [ASKED, answer(parts, tool_calls=[CALL]), {"role": "tool", "content": parts}, answer("done")]}
    assert [message["content"] for message in said(row)] == [ASKED["content"], "", "", "done"]
    assert (
        said({"messages": [ASKED, answer({}, tool_calls=[CALL]), {"role": "tool", "content": "x"}]})[1]["content"] == ""
    )


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": HI, "loss_mask": [0, 1, 1, 1]}, "loss_mask for neither each message nor each answer"),
        ({"prompt": "hi", "response": "hello", "mask": [0, 0, 1]}, "mask for neither"),
        ({"messages": [ASKED, answer("x", train_detail=[{"begin_offset": 0, "train": False}])]}, "only parts"),
        ({"text": "hello", "loss_mask": [0, 1]}, "mask of tokens"),
        ({"text": "hello", "loss_mask": "[0, 1]"}, "mask of tokens"),
        ({"text": "hello", "input_ids": [5, 6], "assistant_masks": [0, 1]}, "mask of tokens"),  # TRL's
        ({"text": "hello", "input_ids": [5, 6], "assistant_mask": [0, 1]}, "mask of tokens"),
        ({"text": "hello", "input_ids": [5, 6], "completion_mask": [0, 1]}, "mask of tokens"),
        ({"text": "hello", "weight": 0}, "says that it is not learned"),
        ({"message_id": "1", "parent_id": None, "text": "hi", "role": "prompter"}, "without its conversation"),
        ({"content": "hello", "reasoning_content": "so", "topic": "x"}, "without its conversation"),
        ({"messages": [ASKED, answer([{"type": "tool_use", "name": "f"}])]}, "neither text nor an image"),
        ({"messages": [ASKED, answer([{"type": "text", "text": "a"}, {"type": "tool_use"}])]}, "neither text nor"),
        ({"messages": HI, "system": [1]}, "neither text nor an image"),
        ([1], "not an object"),
        ({"id": 3}, "no conversation and no text"),
        ({"messages": []}, "without a turn"),
        ({"messages": [{"role": "critic", "content": "no"}]}, "the role 'critic', which is not known"),
        ({"messages": [{"content": "no"}]}, "without a role"),
        ({"messages": [{"role": "user", "content": " "}]}, "an empty turn"),
        ({"messages": [{"role": "user", "content": None}]}, "an empty turn"),
        ({"messages": [ASKED, answer("\n")]}, "an empty turn"),
        ({"messages": [ASKED, answer(""), ASKED, answer("hello")]}, "an empty turn"),
        ({"prompt": "hi", "response": ""}, "an empty turn"),
        ({"messages": [{"role": "user", "content": 7}]}, "not text"),
        ({"messages": [None, None]}, "neither text nor a message"),
        ({"messages": [answer(None, tool_calls=[{}])]}, "a tool call without a name"),
        ({"text": "  "}, "no text in it"),
        ({"text": "\ud800"}, "surrogate"),
        *((row, "no answer in it that is to be learned") for row in NOT_LEARNED),
    ],
)
def test_what_cannot_be_read_as_it_is_meant_is_refused_by_name(row: dict, reason: str):
    with pytest.raises(SkippedRow, match=reason):
        learned(row)


def test_a_label_that_is_a_class_leaves_answers_learned():
    assert learned({"messages": HI, "label": 0}) == learned({"prompt": "hi", "response": "hello", "label": 0})


def test_of_several_calls_that_are_not_learned_none_is():
    """Use Llama's template, which takes one call per message, so that they become several messages."""
    calls = [CALL | {"id": "a"}, CALL | {"id": "b"}]
    results = [{"role": "tool", "content": "1", "tool_call_id": call["id"]} for call in calls]
    row = {"messages": [ASKED, answer("", tool_calls=calls, weight=0), *results, answer("done")]}
    assert learned(row, form_of("llama3").tokenizer) == ["done<|eot_id|>"]
    del row["messages"][1]["weight"]
    assert len(learned(row, form_of("llama3").tokenizer)) == 3


def test_what_an_arrow_file_adds_to_its_rows_is_not_there(tmp_path: Path):
    """Ignore additions: one column has one type, so every object gets the fields of all others, and pandas adds its
    index."""
    asked = {"role": "user", "content": "q", "weight": None}
    calls = [{"function": {"name": name, "arguments": {key: 1}}} for name, key in (("f", "a"), ("g", "b"))]
    rows = [{"messages": [asked, answer("", tool_calls=[call])], "tools": [call]} for call in calls]
    table = pyarrow.Table.from_pylist([row | {"__index_level_0__": n} for n, row in enumerate(rows)])
    pyarrow.parquet.write_table(table, file := tmp_path / "rows.parquet")
    read = list(Source(str(file)).rows())
    found = [Source(str(file)).conversation(row)[1]["tool_calls"][0]["function"] for row in read]
    assert found == [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {"b": 1}}]
    assert [tools(row.value["tools"]) for row in read] == [[call] for call in calls]


@pytest.mark.parametrize("name", ["rows.parquet", "saved"])
def test_cells_without_a_fixed_type_are_read_from_the_json_that_datasets_stores(tmp_path: Path, name: str):
    """Check a content that is text or parts, and arguments and parameters that differ from row to row."""
    parts, given = [{"type": "text", "text": 'a "b"'}], [{"a": "1"}, {"a": None, "b": [2]}]
    calls = [{"type": "function", "function": {"name": "f", "arguments": arguments}} for arguments in given]
    turns = [
        [ASKED | {"content": content}, answer("", tool_calls=[call])] for content, call in zip([parts, "12"], calls)
    ]
    declared = [[{"type": "function", "function": {"name": "f", "parameters": each}}] for each in given]
    rows = [{"messages": messages, "tools": functions} for messages, functions in zip(turns, declared)]
    table = datasets.Dataset.from_list(rows, on_mixed_types="use_json")
    assert str(table.features).count("Json(") == 2
    (table.to_parquet if name == "rows.parquet" else table.save_to_disk)(str(tmp_path / name))
    read = list(Source(str(tmp_path / name)).rows())
    found = [Source("x").conversation(row) for row in read]
    assert [messages[0]["content"] for messages in found] == ['a "b"', "12"]
    assert [messages[1]["tool_calls"] for messages in found] == [[call] for call in calls]
    assert [tools(row.value["tools"]) for row in read] == declared


TEXT_PART, IMAGE_PART = {"type": "text", "text": "hi"}, {"type": "image_url"}


@pytest.mark.parametrize(
    "row",
    [
        {"messages": HI},
        {"messages": [{"role": "user", "content": [TEXT_PART]}, HI[1]]},
        {"messages": [{"role": "user", "content": [IMAGE_PART, TEXT_PART]}, HI[1]]},
        {"messages": json.dumps(HI)},
        {"conversations": SHAREGPT},
        {"prompt": "hi", "prompt_id": "1", "messages": HI},  # UltraChat
        {"id": "0", "data": ["hi", "hello"]},  # UltraChat, as first published
        {"prompt": "hi", "response": "hello"},
        {"question": "hi", "answer": "hello"},  # GSM8K
        {"problem": "hi", "solution": "hello", "lang": "python"},  # Magicoder
        {"instruction": "hi", "input": "", "output": "hello"},  # Alpaca
        {"prompt": HI[:1], "completion": HI[1:]},  # TRL
        {"prompt": "hi", "chosen": HI, "rejected": [HI[0], answer("no")]},
        {"prompt": json.dumps(HI[:1]), "completion": json.dumps(HI[1:])},
        {"chosen": json.dumps(HI), "rejected": json.dumps(HI[:1])},
        {
            "conversations": SHAREGPT[:1],
            "chosen": SHAREGPT[1],
            "rejected": {"from": "gpt", "value": "no"},
        },  # LLaMA-Factory
        {"prompt": "hi", "chosen": HI[1], "rejected": answer("no")},
        {"conversations": {"from": ["human", "gpt"], "value": ["hi", "hello"]}},  # an old feature of `datasets`
        {"conversation": [{"input": "hi", "output": "hello"}]},  # Capybara
        {"input": HI[:1], "output": "hello", "reasoning": "off"},  # Nemotron
        {"messages": [], "input": "hi", "output": "hello"},
        {"response": "", "instruction": "hi", "output": "hello"},
        {"problem": "hi", "solution": "hello", "answer": "o"},
        {"input": "hi", "output": "hello", "solution": "o"},  # OpenCodeReasoning, whose solution is the code alone
        {"messages": [json.dumps(message) for message in HI]},
    ],
)
def test_one_conversation_has_many_layouts_with_and_without_a_system_prompt(row: dict):
    for column in ("system", "system_prompt", "system_message"):
        for system in ("Be brief.", [{"type": "text", "text": "Be brief."}]):
            assert said(row | {column: system}) == [BRIEF, *HI]
        for nothing in ("", " ", None):
            assert said(row | {column: nothing}) == HI
    assert said(row) == HI


JSON_TEXTS = ('{"from": "a", "to": "b"}', '[{"from": "a"}]', "[1]", "[[")
ALTERNATIVES = (
    ["hello", "hey"],
    ["", "hello"],
    {"value": "hello", "aliases": ["hey"]},
    {"text": ["hello"], "start": [0]},
)
REASONED = answer("hello", reasoning_content="so")
ABOUT = {"role": "user", "content": "Sum up.\n\nA text."}
EARLIER = [{"role": "user", "content": "a"}, answer("b")]
REASONING = [  # of Anthropic, Mistral, the AI SDK and LangChain
    [{"type": "thinking", "thinking": "so", "signature": "x"}],
    [{"type": "thinking", "thinking": [{"type": "text", "text": "s"}, {"type": "text", "text": "o"}]}],
    [{"type": "reasoning", "text": "so"}, {"type": "redacted_thinking", "data": "x"}],
    [{"type": "reasoning", "reasoning": "so"}],
    [{"thinking": "so"}],  # without a type
]


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        # of alternative answers the first one
        *(({"question": "hi", name: value}, HI) for name in ("answer", "answers", "output") for value in ALTERNATIVES),
        # an answer that is JSON is text
        *(({"prompt": "hi", "response": text}, [HI[0], answer(text)]) for text in JSON_TEXTS),
        # what a question is about belongs to it
        ({"instruction": "Sum up.", "context": "A text.", "response": "So."}, [ABOUT, answer("So.")]),
        ({"question": "Sum up.", "input": "A text.", "response": "So."}, [ABOUT, answer("So.")]),
        ({"instruction": "hi", "context": " ", "input": None, "response": "hello"}, HI),
        # turns before a prompt
        ({"instruction": "hi", "output": "hello", "history": [["a", "b"]]}, [*EARLIER, *HI]),
        ({"instruction": "hi", "output": "hello", "history": json.dumps([["a", "b"]])}, [*EARLIER, *HI]),
        ({"instruction": "hi", "output": "hello", "history": EARLIER}, [*EARLIER, *HI]),
        ({"query": "hi", "response": "hello", "history": []}, HI),
        # reasoning among the parts of an answer
        *(
            ({"messages": [HI[0], answer([*parts, {"type": "text", "text": "hello"}])]}, [HI[0], REASONED])
            for parts in REASONING
        ),
    ],
)
def test_columns_that_belong_to_a_conversation(row: dict, messages: list[dict]):
    assert said(row) == messages


def test_a_tool_answers_with_any_json():
    for value, text in (({"a": 1}, '{"a": 1}'), ([{"a": "é"}], '[{"a": "é"}]'), (3, "3"), ([{"text": "x"}], "x")):
        result = {"role": "tool", "content": value, "tool_call_id": 12345678901234567890}
        shown = said({"messages": [ASKED, answer("", tool_calls=[CALL | {"id": 12345678901234567890}]), result]})
        assert shown[2] == {"role": "tool", "content": text, "tool_call_id": "12345678901234567890"}
        assert shown[1]["tool_calls"][0]["id"] == "12345678901234567890"


COMPLETION = {"choices": [{"message": HI[1], "finish_reason": "stop"}, {"message": answer("no")}]}


@pytest.mark.parametrize(
    "row",
    [
        {"input": {"messages": HI[:1]}, "preferred_output": HI[1:], "non_preferred_output": [answer("no")]},
        {"inputs": {"messages": HI[:1]}, "outputs": {"messages": HI[1:]}},  # LangSmith
        {"inputs": {"messages": HI[:1]}, "output": COMPLETION},  # Weave
        {"messages": HI[:1], "response": json.dumps(COMPLETION)},  # LiteLLM
        {"messages": HI[:1], **COMPLETION},
        {"body": {"messages": HI[:1]}, "response": {"status_code": 200, "body": COMPLETION}},
        {"input": HI[:1], "output": HI[1]},  # Langfuse
        {"chat": {"messages": HI, "history": {"messages": {}}}, "title": "t"},  # Open WebUI
        {"messages": HI, "response": "not an answer to these"},
        {"messages": HI[:1], "chosen": HI, "response": COMPLETION},
        {"messages": HI, "request": {"messages": [answer("an earlier form")]}},
    ],
)
def test_a_request_and_its_answer_in_objects_are_a_conversation(row: dict, tmp_path: Path):
    """Read preferences and batch files of OpenAI, and exports of loggers: the first choice, and the preferred answer."""
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    source = Source(str(tmp_path / "rows.jsonl"))
    assert [source.conversation(found) for found in source.rows()] == [HI]


def test_of_a_request_only_the_answer_is_added():
    for row in ({"messages": HI}, {"messages": [answer("Hello"), HI[0]]}, {"prompt": "a", "response": COMPLETION}):
        assert unwrapped(row) == row


def test_a_completion_that_was_cut_off_has_no_end():
    cut = COMPLETION["choices"][0] | {"finish_reason": "length"}
    found = said(unwrapped({"messages": HI[:1], "choices": [cut]}))
    assert found == [HI[0], HI[1] | {"finish_reason": "length"}]


def test_a_preferred_answer_may_follow_a_tools_result():
    asked = [ASKED, answer("", tool_calls=[CALL]), {"role": "tool", "content": "5"}]
    assert said({"messages": asked, "chosen": [answer("5")], "rejected": [answer("6")]}) == [*asked, answer("5")]


def test_a_request_without_an_answer_has_its_tools(tmp_path: Path):
    for name in ("tools", "tool_defs", "available_tools"):
        body = {"messages": HI[:1], name: [{"name": "f", "parameters": {}}], "model": None}
        (tmp_path / "rows.jsonl").write_text(json.dumps({"custom_id": "1", "url": "/v1", "body": body}) + "\n")
        [row] = Source(str(tmp_path / "rows.jsonl")).rows()
        assert question(row, "any").turns == [HI[:1]]
        assert declared(row.value) == [{"type": "function", "function": {"name": "f", "parameters": {}}}]


def test_tools_are_found_in_the_first_message_and_refused_if_they_are_none():
    function = {"name": "f", "parameters": {}}
    begins = {"role": "system", "content": "S", "tools": json.dumps([function])}
    assert declared({"messages": [begins, *HI]}) == [{"type": "function", "function": function}]
    for wrong in ("def f(): pass", {"f": {}}, [{"type": "web_search"}], ["f"]):
        with pytest.raises(SkippedRow, match="tools that are not functions with a name"):
            learned({"messages": HI, "tools": wrong})


@pytest.mark.parametrize(
    ("name", "role"),
    [
        *[(name, "assistant") for name in ("bing", "bard", "chatgpt", "gpt-4", "Assistant", "AI", "model", "claude")],
        *[(name, "user") for name in ("prompter", "Human", "USER")],
        *[
            (name, "tool")
            for name in ("tool_response", "function-response", "observation", "Function Response", "environment")
        ],
        ("developer", "system"),
    ],
)
def test_roles_have_many_names(name: str, role: str):
    assert said({"conversations": [{"from": name, "value": "x"}]}) == [{"role": role, "content": "x"}]


@pytest.mark.parametrize(
    "messages",
    [
        [{"from": "function_call", "value": '{"name": "f", "arguments": {"a": 1}}'}],
        [{"role": "tool_call", "name": "f", "arguments": {"a": 1}}],
        [{"role": "tool_calls", "content": "", "tool_calls": [CALL]}],
        [{"from": "tool-call", "value": '[{"name": "f", "arguments": "{\\"a\\": 1}"}]'}],
        [{"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"a": 1}'}}],
        [{"role": "assistant", "tool_calls": '[{"name": "f", "parameters": {"a": 1}}]'}],
        [{"role": "assistant", "tool_calls": [{"type": "tool_call", "name": "f", "args": {"a": 1}}]}],
        [{"type": "ai", "content": "", "tool_calls": [{"type": "tool_call", "name": "f", "args": {"a": 1}}]}],
    ],
)
def test_a_call_is_found_however_it_is_written(messages: list[dict]):
    """Try the forms of LLaMA-Factory, Glaive, LangChain and OpenAI (its first calls, too); a tool may return nothing."""
    found = said({"conversations": [ASKED, *messages, {"role": "tool", "content": ""}, answer("done")]})
    assert found == [ASKED, answer("", tool_calls=[CALL]), {"role": "tool", "content": ""}, answer("done")]


@pytest.mark.parametrize("more", [{}, {"loss": False}])
def test_an_answer_and_the_calls_that_follow_it_are_one_turn(more: dict):
    """Read ms-swift's layout, in which the target would end its turn between its reasoning and its call
    (NVIDIA-NeMo/Automodel#2325)."""
    call, tool = {"role": "tool_call", "content": json.dumps(CALL["function"])}, {"role": "tool", "content": "1"}
    thinks = answer("<think>so</think>Let me look.")
    found = said({"messages": [ASKED, thinks, call, call | more, tool, tool, call, tool, answer("done")]})
    first = thinks | {"tool_calls": [CALL, CALL]} | ({"weight": 0} if more else {})
    assert found == [ASKED, first, tool, tool, answer("", tool_calls=[CALL]), tool, answer("done")]


@pytest.mark.parametrize("weights", [[0, 1, 1, 1], [0, 0, 1, 1, 0, 1]])
def test_a_mask_counts_the_turns_that_the_row_has(weights: list[int]):
    """Weight each turn of an answer that ms-swift writes as three: it is learned if all of them are."""
    call = {"role": "tool_call", "content": json.dumps(CALL["function"])}
    turns, tool = [ASKED, answer("bad"), call, call], {"role": "tool", "content": "1"}
    found = said({"messages": [*turns, tool, answer("done")], "weights": weights})
    assert found == [ASKED, answer("bad", tool_calls=[CALL, CALL], weight=0), tool, answer("done")]
    thinks = call | {"reasoning_content": "second"}
    found = said({"messages": [ASKED, answer("x", reasoning_content="first"), thinks]})
    assert [message["reasoning_content"] for message in found[1:]] == ["first", "second"]


def test_answers_that_are_calls_and_tools_as_json_text():
    function = {"name": "f", "description": "F.", "parameters": {}}
    row = {"query": "q", "answers": json.dumps([CALL["function"]]), "tools": json.dumps([function])}  # xLAM
    assert said(row) == [ASKED, answer("", tool_calls=[CALL])]
    for column in (row["tools"], [json.dumps(function)], function, [{"type": "function", "function": function}]):
        assert tools(column) == [{"type": "function", "function": function}]
    assert tools("") is tools(None) is tools("[]") is tools([]) is None


@pytest.mark.parametrize("name", ["gemma4_07", "qwen3_5"])
@pytest.mark.parametrize("arguments", ['{"a": ', "[1]"])
def test_a_call_that_a_template_cannot_show_costs_its_row_alone(name: str, arguments: str):
    template = (ROOT / "tests" / "support" / "chat_templates" / f"{name}.jinja").read_text()
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [call]}]
    with pytest.raises(SkippedRow, match="the chat template refuses it"):
        Encoder(tokenizer(template), Source("x")).documents(Row("r", {"messages": turns}))


BARE = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}{{ end }}"
BARE += "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
ONLY_LAST = "{% if not add_generation_prompt %}<eos>{% endif %}"
MARKS = ["<s>", "<eos>", "<|user|>", "<|assistant|>"]
TURNS = [{"role": "user", "content": "a"}, answer("b"), {"role": "user", "content": "c"}, answer("d")]


def test_a_column_next_to_a_prompt_of_messages_is_part_of_it():
    row = {"question": [{"role": "user", "content": "Q?"}], "context": "C", "answer": "a"}
    asked, _ = Source("x").conversation(Row("", row))
    assert asked["content"] == "Q?\n\nC"


TAGGED = CHATML.replace("{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}")


@pytest.mark.parametrize(
    ("template", "marks", "texts"),
    [
        (BARE, MARKS, ["b<|user|>", "d<|user|>"]),  # GLM's: the next turn's mark
        (BARE, MARKS[:2], ["b<eos>", "d<eos>"]),  # nothing that could be one: the end token
        # An end token at the end of the chat alone is what every answer ends with, unless all have an end mark.
        (BARE.replace("{{ end }}", ONLY_LAST), MARKS[:2], ["b<eos>", "d<eos>"]),
        (
            BARE.replace("{{ m.content }}", "{{ m.content }}<|end|>\n").replace("{{ end }}", ONLY_LAST),
            [*MARKS, "<|end|>"],
            ["b<|end|>", "d<|end|>"],
        ),
        # The end mark is learned where {% generation %} leaves it out, and the header is not where it takes it in.
        (TAGGED, SPECIAL, ["b", "d"]),
        (
            CHATML.replace("<|im_start|>{{ m.role }}", "{% generation %}<|im_start|>{{ m.role }}").replace(
                "{{ m.content }}<|im_end|>\n", "{{ m.content }}<|im_end|>\n{% endgeneration %}"
            ),
            SPECIAL,
            ["b", "d"],
        ),
        # The marks also say where an answer starts if its generation prompt does not.
        (TAGGED.replace("<|im_start|>assistant", "<|im_start|>bot"), SPECIAL, ["b", "d"]),
    ],
)
def test_what_the_target_must_write_to_stop_is_learned_once(template: str, marks: list[str], texts: list[str]):
    words = tokenizer(template, eos=marks[1], special=marks)
    if marks is SPECIAL:
        texts = [f"{text}<|im_end|>" for text in texts]
    assert learned({"messages": TURNS}, words) == texts
    assert learned({"messages": TURNS, "finish_reasons": ["stop", "length"]}, words) == [texts[0], "d"]


CLOSED = (
    "{% for m in messages %}{% if m.role == 'user' %}<U>{{ m.content }}{% else %}<A></think>{{ m.content + eos_token }}"
)
CLOSED += (
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<A>{{ '<think>' if thinking else '</think>' }}{% endif %}"
)


@pytest.mark.parametrize(
    ("thoughts", "prompt", "text"),
    [("2+2", "<U>2+2?<A><think>", "2+2</think>4</s>"), ("", "<U>2+2?<A></think>", "4</s>")],
)
def test_a_closing_reasoning_mark_that_the_template_writes_is_there_once(thoughts: str, prompt: str, text: str):
    words = tokenizer(CLOSED, special=["<s>", "</s>", "<U>", "<A>", "<think>", "</think>"])
    row = {"messages": [{"role": "user", "content": "2+2?"}, answer("4", reasoning_content=thoughts)]}
    (document,), _ = Encoder(words, Source("x")).documents(Row("", row))
    assert [part for _, part in runs(words, document)] == [prompt, text]


STRIPPED = CHATML.replace("{{ m.content }}", "{{ (m.content.split('</think>') | last).lstrip() }}")


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        (answer("4", reasoning_content="2+2"), "<think>\n2+2\n</think>\n\n4<|im_end|>"),
        (answer("<think>2+2</think>4"), "<think>2+2</think>4<|im_end|>"),
        (answer("2+2</think>4"), "<think>2+2</think>4<|im_end|>"),
        (answer("4"), "4<|im_end|>"),
    ],
)
def test_reasoning_that_a_template_takes_out_of_answers_is_learned(messages: dict, text: str):
    """Use DeepSeek-R1's first template, whose generation prompt does not open the reasoning."""
    words = tokenizer(STRIPPED, special=SPECIAL)
    row = {"messages": [ASKED, messages, ASKED, messages]}
    assert learned(row, words) == [text, text]
    documents, _ = Encoder(words, Source("x")).documents(Row("", row))
    assert next(part for _, part in runs(words, documents[-1])).count("4") == ("think" in text)


@pytest.mark.parametrize("choice", ["", "{% if p.type == 'text' %}"])
def test_a_template_that_reads_lists_of_parts_shows_texts(choice: str):
    """Use LLaVA's and Idefics', which lose a text that is not a list, and so would the server's prompt."""
    parts = "{% for p in m.content %}" + choice + "{{ p.text }}" + ("{% endif %}" if choice else "") + "{% endfor %}"
    words = tokenizer(CHATML.replace("{{ m.content }}", parts), special=SPECIAL)
    assert learned({"messages": [ASKED, answer("a"), ASKED, answer("b")]}, words) == ["a<|im_end|>", "b<|im_end|>"]
    (document,), _ = Encoder(words, Source("x")).documents(Row("", {"messages": [ASKED, answer("a")]}))
    target = SimpleNamespace(text_tokenizer=words, name="t", context=None, vocab_size=1000)
    (prompt,) = PromptEncoder(target).chat(ChatRequest(messages=[ASKED]))
    assert prompt == document.tokens[: len(prompt)] and words.decode(prompt).count("q") == 1


@pytest.mark.parametrize("end", ["<|im_end|>", "</s>", "<|im_end|>\n"])
def test_an_end_mark_that_an_answer_has_in_its_text_is_learned_once(end: str):
    words = tokenizer(CHATML, special=SPECIAL)
    row = {"messages": [ASKED, answer("a" + end), ASKED, answer("b" + end)]}
    assert learned(row, words) == ["a<|im_end|>", "b<|im_end|>"]


@pytest.mark.parametrize("name", ["columns.py", "layouts.py", "answer_spans.py", "messages.py", "text.py"])
def test_documents_of_older_code_are_not_taken_from_the_cache(name: str, monkeypatch: pytest.MonkeyPatch):
    """Check that the cache's key includes the code that serving shares."""
    encoder, read = Encoder(tokenizer(CHATML), Source("x")), Path.read_bytes
    before = encoder.digest()
    monkeypatch.setattr(Path, "read_bytes", lambda file: read(file) + (b"#" if file.name == name else b""))
    assert encoder.digest() != before


def test_a_row_that_a_template_does_not_fit_does_not_end_the_others(tmp_path: Path):
    words = tokenizer(
        "{% if add_generation_prompt and messages[0].content == 'odd' %}X{% else %}" + CHATML + "{% endif %}"
    )
    rows = [{"prompt": prompt, "response": "r"} for prompt in ("odd", "a", "b")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    encoder = Encoder(words, source := Source(str(tmp_path / "rows.jsonl")))
    encoder.check()
    reasons = [row["reason"] for row in encoder.rows(source.shards())]
    assert "starts an answer otherwise" in reasons[0] and reasons[1:] == ["", ""]


@pytest.mark.parametrize("with_tools", [False, True])
def test_rows_with_tools_use_the_template_for_tools(with_tools: bool):
    words = tokenizer(
        {"default": CHATML, "tool_use": "{{ tools | tojson }}" + CHATML, "rag": "RAG" + CHATML}, special=SPECIAL
    )
    row = {"messages": HI} | ({"tools": [CALL["function"] | {"parameters": {}}]} if with_tools else {})
    encoder = Encoder(words, Source("x"))
    (document,), _ = encoder.documents(Row("", row))
    text = words.decode(document.tokens)
    assert text.startswith('[{"type": "function"' if with_tools else "<|im_start|>user")
    prompt = encoder.form.prompt(HI[:1], tools(row.get("tools")))
    assert document.tokens[: len(prompt)] == prompt
    (document,), _ = Encoder(words, Source("x"), template="rag").documents(Row("", row))
    assert words.decode(document.tokens).startswith("RAG")
    with pytest.raises(ValueError, match=r"has the chat templates rag: choose one with data.template=NAME"):
        Encoder(tokenizer({"rag": CHATML}), Source("x")).documents(Row("", row))


def test_a_row_sets_variables_of_the_chat_template():
    """Check TRL's column, as an object and as JSON, with a template for tools, and that a setting of the run wins."""
    words = tokenizer({"default": "{{ custom }}" + CHATML, "tool_use": "T{{ custom }}" + CHATML}, special=SPECIAL)
    for options in ({"custom": "Arr.", "python_tools": None}, '{"custom": "Arr."}'):
        row, encoder = {"messages": HI, "chat_template_kwargs": options}, Encoder(words, Source("x"))
        for given, begins in (([], "Arr.<"), ([CALL["function"] | {"parameters": {}}], "TArr.<"), ([], "Arr.<")):
            (document,), _ = encoder.documents(Row("", row | {"tools": given}))
            assert words.decode(document.tokens).startswith(begins)
        (document,), _ = encoder.documents(Row("", {"messages": HI}))
        assert words.decode(document.tokens).startswith("<|im_start|>")
    words = tokenizer(
        "{% if thinking is not defined or thinking %}ON{% else %}OFF{% endif %}" + CHATML, special=SPECIAL
    )
    for given, switch, begins in ((None, True, "ON"), (None, False, "OFF"), (False, True, "OFF"), (True, False, "ON")):
        row = {"messages": HI, "chat_template_kwargs": {"thinking": switch, "enable_thinking": switch}}
        (document,), _ = Encoder(words, Source("x"), thinking=given).documents(Row("", row))
        assert words.decode(document.tokens).startswith(begins)
