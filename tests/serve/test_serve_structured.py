"""JSON, schemas and tool calls through the openai package: what a grammar forces, and what is read out of a text."""

import json
import re
import sys
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from llguidance import LLMatcher, LLTokenizer
from pydantic import BaseModel

from foredraft.heads.target_model.messages import normalize_messages, rendered, template_needs
from foredraft.inference import Engine, Request
from foredraft.inference.drafters import NgramDrafter
from foredraft.inference.grammar import FORMATS, Grammars, as_supported
from foredraft.inference.serve.openai.choice import Choice, Piece
from foredraft.inference.serve.openai.protocol import ChatRequest, Tool
from foredraft.inference.serve.openai.reasoning import split_harmony
from foredraft.inference.serve.openai.tool_formats import (
    APERTUS,
    APRIEL,
    BARE,
    DEEPSEEK_V3,
    DEEPSEEK_V3_1,
    FUNCTION_GEMMA,
    FUNCTIONARY,
    GEMMA,
    GIGACHAT,
    GLM,
    GRANITE,
    HARMONY,
    HERMES,
    KIMI,
    LFM,
    LLAMA,
    MINICPM,
    MINIMAX,
    MISTRAL,
    MISTRAL_ARGS,
    MISTRAL_ID,
    OLMO,
    QWEN3_CODER,
    SEED_OSS,
    ToolFormat,
    after_reasoning,
    call_rules,
    format_of,
)
from foredraft.inference.serve.openai.tools import ToolReader, answer_grammar, call_format
from foredraft.inference.serve.service import Service
from foredraft.inference.slots import RequestOutput
from tests.support import ROOT
from tests.support.chats import tokenizer

TEMPLATES = ROOT / "tests" / "support" / "chat_templates"
STYLES = {
    "apertus": APERTUS,
    "apriel": APRIEL,
    "deepseek_r1": DEEPSEEK_V3,
    "deepseek_v3_1": DEEPSEEK_V3_1,
    "devstral": MISTRAL_ARGS,
    "functionary": FUNCTIONARY,
    "gemma3": None,
    "gemma4": GEMMA,
    "gemma4_07": GEMMA,
    "glm4_5": GLM,
    "gpt_oss": HARMONY,
    "granite3": GRANITE,
    "granite4": HERMES,
    "kimi_k2": KIMI,
    "llama3": LLAMA,
    "minimax_m2": MINIMAX,
    "mistral": MISTRAL,
    "mistral_small3_2": MISTRAL_ID,
    "qwen2_5": HERMES,
    "qwen3": HERMES,
    "qwen3_coder": QWEN3_CODER,
    "qwq": HERMES,
    "smollm2": None,
}
ASKED = {"model": "tiny", "messages": [{"role": "user", "content": "def add(self, other):"}]}
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["alpha", "beta"]}, "many": {"type": "array", "maxItems": 2}},
    "required": ["kind", "many"],
    "additionalProperties": False,
}
SCHEMA["properties"]["many"]["items"] = {"type": "integer", "minimum": 0, "maximum": 99}
FORMAT = {"type": "json_schema", "json_schema": {"name": "pair", "strict": True, "schema": SCHEMA}}
TOOLS = [
    {"type": "function", "function": {"name": "pair", "description": "<|endoftext|>", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "stop_it"}},
]
TEMPLATE = """{%- if tools %}{{ 'Answer with <tool_call>{"name": ..., "arguments": ...}</tool_call>' }}
{%- for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}
{%- for message in messages %}{{ message.role + ": " }}
{%- for call in message.tool_calls or [] %}{{ call.function.name + "(" }}
{%- for key in call.function.arguments %}{{ key }}{% endfor %}{{ ")" }}
{%- endfor %}{{ message.content or "" }}{{ "\n" }}{% endfor %}{{ "assistant:" }}"""


CONTEXT = 2048  # tools are long prompts
SETTINGS = ["drafter=draft:{model}", "max_tokens=300"]
SETTINGS += ["log_accepted=/dev/full"] if sys.platform.startswith("linux") else []  # a full disk stops no answer


def ended(client: openai.OpenAI, **settings) -> list:
    """Return choices that their grammar ended; others are cut by max_tokens."""
    answer = client.chat.completions.create(**ASKED, n=4, seed=1, **settings)
    found = [choice for choice in answer.choices if choice.finish_reason != "length"]
    assert found, [choice.message for choice in answer.choices]
    return found


BESIDE = [{"type": kind, "schema": SCHEMA} for kind in ("json_object", "json_schema")]  # as llama.cpp has it


@pytest.mark.parametrize("form", [FORMAT, *BESIDE], ids=["openai", "json_object", "json_schema"])
def test_an_answer_is_of_its_schema(client, form):
    for choice in ended(client, response_format=form):
        found = json.loads(choice.message.content)
        assert found["kind"] in ("alpha", "beta") and len(found["many"]) <= 2 and found.keys() == {"kind", "many"}


PATTERN, CHOICE = r"[ab]{3}/\d\\", ["yes", 'no "é"\n']
LARK, GBNF = 'start: "x" | "y/z"', 'root ::= "x" | end\nend ::= [a-c] "!"'
CONSTRAINTS = [  # by vLLM's names, its older ones as guidance still sends them, SGLang's and llama.cpp's
    ({"structured_outputs": {"regex": PATTERN, "json": None, "disable_any_whitespace": False}}, PATTERN),
    ({"structured_outputs": {"choice": CHOICE}}, 'yes|no "é"\n'),
    ({"structured_outputs": {"choice": ["\x7f\\x7f"]}}, r"\x7f\\x7f"),
    ({"structured_outputs": {"choice": [f"{n}" for n in range(5000)]}}, "[0-9]{1,4}"),
    ({"structured_outputs": {"regex": "[ab]\\\n"}, "response_format": {"type": "text"}}, "[ab]\n"),
    ({"structured_outputs": {"grammar": LARK}, "guided_grammar": LARK, "guided_decoding_backend": "guidance"}, "x|y/z"),
    ({"structured_outputs": {"grammar": '# one\n?start: part\n?part: "x" "y"'}}, "xy"),
    ({"structured_outputs": {"json": '{"enum": ["a", 7]}'}}, '"a"|7'),
    ({"structured_outputs": {"json": {"const": True}, "json_object": False}}, "true"),
    ({"guided_regex": r"a\/[0-9]", "min_tokens": 12}, "a/[0-9]"),
    ({"regex": "[0-9]\n[a]"}, "[0-9]\na"),
    ({"ebnf": GBNF, "regex": ""}, "x|[a-c]!"),
    ({"grammar": GBNF, "json_schema": None}, "x|[a-c]!"),
    ({"json_schema": {"const": 1}, "grammar": ""}, "1"),
    ({"response_format": {"type": "grammar", "grammar": GBNF}}, "x|[a-c]!"),
]


@pytest.mark.parametrize("constraint, pattern", CONSTRAINTS)
def test_a_constraint_holds_by_the_name_of_another_server(client, constraint, pattern):
    asked = {"model": "tiny", "prompt": "def", "seed": 1, "max_tokens": 20}
    chat = [choice.message.content for choice in ended(client, extra_body=constraint)]
    for text in (*chat, client.completions.create(**asked, extra_body=constraint).choices[0].text):
        assert re.fullmatch(pattern, text), text


@pytest.mark.parametrize("name", ["guided_json", "json_schema"])
def test_an_empty_schema_asks_for_json(name):
    asked = ChatRequest(messages=ASKED["messages"], **{name: {}})
    assert asked.response_format.type == "json_schema" and asked.response_format.json_schema.definition == {}


@pytest.mark.parametrize("grammar", [LARK, 'root ::= "x" | "y/z"'])
@pytest.mark.parametrize("closing", ["", "</think>"])
def test_a_grammar_may_stand_next_to_tools_and_follow_reasoning(target, grammar, closing):
    for tools in (None, TOOLS):
        asked = ChatRequest(messages=[ASKED["messages"][0]], tools=tools, grammar=grammar)
        rules = answer_grammar(asked, TEMPLATE, Grammars(target), closing).matcher
        call = '<tool_call>\n{"name": "stop_it", "arguments": {}}\n</tool_call>'
        for text, accepted in (("x", True), ("y/z", True), ("z", False), (call, tools is not None)):
            ids = target.text_tokenizer("z" + closing + text if closing else text).input_ids
            assert (rules.deep_copy().try_consume_tokens(ids) == len(ids)) == accepted, text


def test_the_openai_package_parses_a_model_of_pydantic(client):
    class Kind(BaseModel):
        kind: bool

    answer = client.chat.completions.parse(**ASKED, seed=1, response_format=Kind)
    assert answer.choices[0].message.parsed.kind in (True, False)


def test_a_full_disk_takes_no_answer_from_anybody(server, client):
    assert client.completions.create(model="tiny", prompt="def", max_tokens=1).usage.completion_tokens == 1
    assert any("cannot be written" in line["message"] for line in server.logged())


@pytest.mark.parametrize(
    "choice, names",
    [
        ("required", {"pair", "stop_it"}),
        ({"type": "required"}, {"pair", "stop_it"}),
        ({"type": "function", "function": {"name": "pair"}}, {"pair"}),
    ],
)
def test_a_forced_tool_is_called(client, choice, names):
    for one in ended(client, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False):
        (call,) = one.message.tool_calls
        assert one.finish_reason == "tool_calls" and one.message.content is None and call.function.name in names
        arguments = json.loads(call.function.arguments)
        assert call.function.name != "pair" or arguments["kind"] in ("alpha", "beta")


def test_a_schema_may_stand_beside_tools(client):
    """Let the model call them instead; if it must call, the schema does not apply."""
    for choice in ended(client, tools=TOOLS, response_format=FORMAT):
        assert choice.message.tool_calls or json.loads(choice.message.content).keys() == {"kind", "many"}
    forced = {"type": "function", "function": {"name": "pair"}}
    for choice in ended(client, tools=TOOLS, tool_choice=forced, response_format=FORMAT):
        assert choice.message.tool_calls[0].function.name == "pair"


@pytest.mark.parametrize("closing", ["", "</think>"])
def test_the_rules_of_both_take_both(target, closing):
    """Check also that they follow the reasoning that a prompt opens, whatever is in it."""
    asked = ChatRequest(messages=[ASKED["messages"][0]], tools=TOOLS, response_format=FORMAT)
    rules = answer_grammar(asked, TEMPLATE, Grammars(target), closing).matcher
    call = '<tool_call>\n{"name": "pair", "arguments": {"kind": "beta", "many": []}}\n</tool_call>'
    for text, taken in (
        (call, True),
        ('{"kind": "alpha", "many": [1]}', True),
        ("I think", False),
        ('{"no": 1}', False),
    ):
        ids = target.text_tokenizer('So {"no": 1}\n</think>\n\n' + text if closing else text).input_ids
        assert (rules.deep_copy().try_consume_tokens(ids) == len(ids)) == taken
    asked = ChatRequest(messages=[ASKED["messages"][0]], response_format=FORMAT)
    rules = answer_grammar(asked, TEMPLATE, Grammars(target), "</think>").matcher
    ids = target.text_tokenizer('So.</think>{"kind": "beta", "many": []}').input_ids
    assert rules.try_consume_tokens(ids) == len(ids) and rules.is_accepting()


@pytest.mark.parametrize("rules", ["start: answer\nanswer: /a|b/", "start: calls | answer\ncalls: /a/\nanswer: /b/"])
def test_reasoning_may_end_with_a_special_token(rules):
    matcher = LLMatcher(LLTokenizer("byte"), after_reasoning(rules, "[/THINK]", {"[/THINK]": 256}), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    assert (
        "<[256]>" in after_reasoning(rules, "[/THINK]", {"[/THINK]": 256}) and after_reasoning(rules, "", {}) == rules
    )


def test_a_call_is_streamed(client):
    facts = {**ASKED, "tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "pair"}}}
    seed = next(
        seed for seed in range(9) if client.chat.completions.create(**facts, seed=seed).choices[0].message.tool_calls
    )
    whole = client.chat.completions.create(**facts, seed=seed).choices[0].message.tool_calls[0].function
    chunks = [*client.chat.completions.create(**facts, seed=seed, stream=True)]
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert [(call.index, call.function.name, call.function.arguments) for call in calls] == [
        (0, whole.name, whole.arguments)
    ]
    assert not any(chunk.choices[0].delta.content for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "tool_calls" and not chunks[-1].choices[0].delta.tool_calls


def test_tools_are_told_to_the_template_unless_they_may_not_be_called(client):
    facts = {**ASKED, "max_tokens": 1}
    plain, none, auto = (
        client.chat.completions.create(**facts, **more).usage.prompt_tokens
        for more in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": TOOLS})
    )
    assert plain == none and auto > plain + 100


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"response_format": {"type": "json_schema"}}, "json_schema must be given"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "no"}}}}, "be compiled"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}}, "be compiled"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": ["a" * 70_000]}}}},
            "at most 65536",
        ),
        ({"response_format": {"type": "grammar"}}, "grammar must be given"),
        ({"response_format": FORMAT, "extra_body": {"regex": "a"}}, "cannot be combined with regex"),
        ({"extra_body": {"structured_outputs": {"regex": "("}}}, "be compiled"),
        (
            {"extra_body": {"structured_outputs": {"structural_tag": "x"}}},
            "contains .*structural_tag.* send one of json",
        ),
        ({"extra_body": {"structured_outputs": {"regex": "a"}, "guided_choice": ["a"]}}, "contains .*regex.*choice"),
        ({"extra_body": {"structured_outputs": {"choice": []}}}, "contains .*choice"),
        ({"extra_body": {"structured_outputs": {"regex": "a"}, "guided_regex": "b"}}, "guided_regex differs from"),
        ({"extra_body": {"structured_outputs": {"json": "[1]"}}}, "is not a JSON object"),
        ({"extra_body": {"structured_outputs": {"json": '[["a", 1]]'}}}, "is not a JSON object"),
        ({"extra_body": {"structured_outputs": "x"}}, "structured_outputs is 'x'"),
        ({"extra_body": {"grammar": "hello"}}, "neither Lark nor GBNF"),
        ({"extra_body": {"grammar": "root ::= " + "(" * 9999}}, "neither Lark nor GBNF"),
        ({"tool_choice": "required"}, "needs tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}, "tools": TOOLS}, "'other'"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "two tools of one name"),
        ({"tools": [{"type": "function", "function": {"name": 'a"b'}}]}, "tools.0.function.name"),
    ],
)
def test_what_cannot_be_followed_is_refused(client, settings, message):
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        client.chat.completions.create(**ASKED, **settings)
    assert "\n" not in caught.value.body["message"]


CALL = '{"name": "f", "arguments": {"a": "</tool_call> é"}}'
F, NOTHING, ONE = ("f", {"a": "</tool_call> é"}), ("f", {}), ("f", {"a": 1})
GIVEN = '{"a": 1}'
R1 = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
V3_1 = "<｜tool▁call▁begin｜>f<｜tool▁sep｜>"
K2 = "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
MARKED = '<|"|>},b:1 <tool_call|><|"|>'  # a text that contains what ends others
NESTED = {"a": [{"b": "},b:1 <tool_call|>"}, "c,d:1"], "e": {"f": None}}
NOT_JSON = ("a=1j", "a={1, 2}", "a=b'c'", "a={(1, 2): 3}", "a=1e999", "**{'a': 1}")
LINES = {"a": 'b (c-d)\n"e', "b": "f\n"}
PYTHONIC = {"a": "}é)", "b": [True, None], "c": {"d": None}}
TEXTS: list[tuple[ToolFormat, str, str, list]] = [
    (HERMES, f"<tool_call>\n{CALL}\n</tool_call>", "", [F]),
    (HERMES, f"I look.\n<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}", "I look.\n", [F, F]),
    (HERMES, f"<tool_call>{CALL}</tool_call>\nI will wait.", "I will wait.", [F]),
    (HERMES, f"Look.\n<tool_call>{CALL}</tool_call> and\n<tool_call>{CALL}</tool_call>\n", "Look.\n and", [F, F]),
    (HERMES, f'<tool_call>{CALL}</tool_call><tool_call>{{"name": "f", "argu', '<tool_call>{"name": "f", "argu', [F]),
    (HERMES, f'<tool_call>{{"name": "g"}}</tool_call>{CALL[:0]}', '<tool_call>{"name": "g"}</tool_call>', []),
    (
        HERMES,
        f'<tool_call>{{"name": "g"}}</tool_call><tool_call>{CALL}</tool_call>',
        '<tool_call>{"name": "g"}</tool_call>',
        [F],
    ),
    (HERMES, '<tool_call>{"name": "f"}</tool_call>', "", [NOTHING]),
    (
        HERMES,
        '<tool_call>{"name": "f", "args": {"a": 1}}</tool_call>',
        '<tool_call>{"name": "f", "args": {"a": 1}}</tool_call>',
        [],
    ),
    (HERMES, '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [NOTHING]),
    (HERMES, '<tool_call>{"name": "f", "arguments": ""}</tool_call>', "", [NOTHING]),
    (HERMES, '<tool_call>{"arguments": "{\\"a\\": 1}", "name": "f"}</tool_call>', "", [ONE]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "\n"}}</tool_call>', "", [("f", {"a": "\n"})]),
    (
        HERMES,
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        [],
    ),
    (HERMES, f"<tool_call>{CALL}\n{CALL}, {CALL}</tool_call>ok", "ok", [F, F, F]),
    (HERMES, f"<tool_call>\n[{CALL}, {CALL}]\n</tool_call>", "", [F, F]),
    (HERMES, f'<tool_call>{CALL}\n{{"name": "f", "argu', '{"name": "f", "argu', [F]),
    (HERMES, f"<tool_call>{CALL}}}\n</tool_call>", "", [F]),
    (HERMES, f'<tool_call>{{"type": "function", "function": {CALL}}}</tool_call>', "", [F]),
    (HERMES, f'<tool_call>{{"function": "f", "arguments": {GIVEN}}}</tool_call>', "", [ONE]),
    (HERMES, '<tool_call>{"name": "f", "arguments": []}</tool_call>', "", [NOTHING]),
    (HERMES, "a < b <tool <b>", "a < b <tool <b>", []),
    (HERMES, "x<tool_call>{broken</tool_call>", "x<tool_call>{broken</tool_call>", []),
    (HERMES, CALL.replace('"f"', '"g"'), CALL.replace('"f"', '"g"'), []),
    (HERMES, '<tool_call>{"name": ["f"], "arguments": {}}', '<tool_call>{"name": ["f"], "arguments": {}}', []),
    (HERMES, "<tool_call>" + "[" * 9000, "<tool_call>" + "[" * 9000, []),
    (HERMES, "<tool_call>" * 999, "<tool_call>" * 999, []),
    (LLAMA, ' {"name": "f", "parameters": {"a": 1}}', "", [ONE]),
    (LLAMA, '{"name": "f", "parameters": null}', "", [NOTHING]),
    (LLAMA, '<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "f", "parameters": {}}', "", [ONE, NOTHING]),
    (LLAMA, 'See.\n{"name": "f", "parameters": {"a": 1}}\nDone.', "See.\nDone.", [ONE]),
    (
        LLAMA,
        'See {"name": "f", "parameters": {}} and {\n "name": "f", "parameters": {}}',
        "See and",
        [NOTHING, NOTHING],
    ),
    (LLAMA, 'It is {"name": "f"}.', 'It is {"name": "f"}.', []),
    (LLAMA, 'See.\n{"name": "f"}', "See.", [NOTHING]),
    (LLAMA, '[{"name": "f", "parameters": {"a": 1}}, {"name": "f", "arguments": {}}]', "", [ONE, NOTHING]),
    (LLAMA, 'a [1] { b } {"a": 1}\n\n', 'a [1] { b } {"a": 1}\n\n', []),
    (LLAMA, '{"no": "call"} of mine', '{"no": "call"} of mine', []),
    (MISTRAL, f'[TOOL_CALLS] [{{"name": "f", "arguments": {GIVEN}, "id": "123456789"}}, {CALL}]', "", [ONE, F]),
    (MISTRAL_ARGS, f"I look.[TOOL_CALLS]f[ARGS]{GIVEN}[TOOL_CALLS]f[ARGS]{{}}", "I look.", [ONE, NOTHING]),
    (MISTRAL_ARGS, "[TOOL_CALLS]f[ARGS]{", "[TOOL_CALLS]f[ARGS]{", []),
    (MISTRAL_ID, f"[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{GIVEN}", "", [ONE]),
    (GRANITE, f"<|tool_call|>[{CALL}]", "", [F]),
    (QWEN3_CODER, "I look.\n<function=f>\n</function>\n</tool_call>", "I look.\n", [NOTHING]),
    (QWEN3_CODER, "<tool_call>\n<function=f></function></tool_call>\n<function=f></function>", "", [NOTHING, NOTHING]),
    (SEED_OSS, "Look.\n<seed:tool_call>\n<function=f>\n</function>\n</seed:tool_call>", "Look.\n", [NOTHING]),
    (DEEPSEEK_V3, f"{R1}{GIVEN}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>", "", [ONE]),
    (DEEPSEEK_V3_1, f"I look.{V3_1}{GIVEN}<｜tool▁call▁end｜>{V3_1}<｜tool▁call▁end｜>", "I look.", [ONE, NOTHING]),
    (KIMI, f"<|tool_calls_section_begin|>{K2}{GIVEN}<|tool_call_end|><|tool_calls_section_end|>ok", "ok", [ONE]),
    (KIMI, f"<|tool_calls_section_begin|>{K2.replace('functions.', ' ')}{GIVEN}<|tool_call_end|>", "", [ONE]),
    (HARMONY, f"<|channel|>commentary to=functions.f <|constrain|>json<|message|>{GIVEN}<|call|>", "", [ONE]),
    (GEMMA, f"I look.<|tool_call>call:f{{a:{MARKED}}}<tool_call|>", "I look.", [("f", {"a": "},b:1 <tool_call|>"})]),
    (GEMMA, "<|tool_call>call:f{}<tool_call|><|tool_call>call:f{a:1}<tool_call|>ok", "ok", [NOTHING, ONE]),
    (GEMMA, f'<|tool_call>call:f{{a:[{{b:{MARKED}}},"c,d:1"],e:{{f:null}}}}', "", [("f", NESTED)]),
    (GEMMA, '<|tool_call>call:f{a:<|"|>b', '<|tool_call>call:f{a:<|"|>b', []),
    (GEMMA, "<|tool_call>call:g{}<tool_call|>", "<|tool_call>call:g{}<tool_call|>", []),
    (FUNCTION_GEMMA, "<start_function_call>call:f{a:<escape>é<escape>}<end_function_call>", "", [("f", {"a": "é"})]),
    (LFM, "I look.<|tool_call_start|>[f(a=1), f()]<|tool_call_end|>Done.", "I look.Done.", [ONE, NOTHING]),
    (LFM, '<|tool_call_start|>[f(a="}é)", b=[true, None], c={"d": null})]', "", [("f", PYTHONIC)]),
    (LFM, "<|tool_call_start|>[f(1)]<|tool_call_end|>", "<|tool_call_start|>[f(1)]<|tool_call_end|>", []),
    (LFM, "<|tool_call_start|>[f(a=b), g()]", "<|tool_call_start|>[f(a=b), g()]", []),
    (LFM, "<|tool_call_start|>import os", "<|tool_call_start|>import os", []),
    (LFM, "<|tool_call_start|>[f(), g()]", "<|tool_call_start|>[f(), g()]", []),
    *((LFM, f"<|tool_call_start|>[f({given})]", f"<|tool_call_start|>[f({given})]", []) for given in NOT_JSON),
    (LFM, '<|tool_call_start|>[f(a="b (c-d)\n\\"e", b=\'f\n\')]<|tool_call_end|>', "", [("f", LINES)]),
    (OLMO, "<function_calls>\nf(a=1)\nf()\n</function_calls>", "", [ONE, NOTHING]),
    (GEMMA, "<|tool_call>call:f{a:None,b:[True,False]}<tool_call|>", "", [("f", {"a": None, "b": [True, False]})]),
    (APRIEL, f'I look.\n<tool_calls>[{{"name": "f", "arguments": {GIVEN}}}]</tool_calls>', "I look.\n", [ONE]),
    (APERTUS, f'I look.<|tools_prefix|>[{{"f": {GIVEN}}}, {{"f": {{}}}}]<|tools_suffix|>', "I look.", [ONE, NOTHING]),
    (FUNCTIONARY, f"I look.<function=f>{GIVEN}</function><function=f>{{}}</function>", "I look.", [ONE, NOTHING]),
    (GIGACHAT, f'<|function_call|>{{"name": "f", "arguments": {GIVEN}}}', "", [ONE]),
    (APERTUS, f'<|tools_prefix|>[{{"f": {GIVEN}}}]', "", [ONE]),  # the end token is not in the text
    (APERTUS, f'So: {{"f": {GIVEN}}}', f'So: {{"f": {GIVEN}}}', []),  # JSON without a mark is text
    (MINICPM, '<function name="f"><param name="a">1</param></function>', "", [("f", {"a": "1"})]),
    (
        MINICPM,
        '<function name="f"><param name="a"><![CDATA[<b>\n</param>]]></param><param name="b">2</param></function>',
        "",
        [("f", {"a": "<b>\n</param>", "b": "2"})],
    ),
    (BARE, CALL, "", [F]),
    (BARE, "", "", []),
]


def read(style: ToolFormat, text: str, size: int, parameters: dict | None = None) -> tuple[str, list]:
    """Read a text that grows by this number of characters; what was content stays the beginning of the content."""
    reader, known = ToolReader(style, {"f": parameters or {}}), ""
    for end in range(0, len(text), size):
        content, calls = reader.split(text[:end], False, len(known))
        assert content.startswith(known) and not calls
        known = content
    content, calls = reader.split(text, True, len(known))
    assert content.startswith(known) and len({call["id"] for call in calls}) == len(calls)
    return content, [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("style, text, content, calls", TEXTS)
def test_calls_are_read_out_of_a_text(style, text, content, calls, size):
    assert read(style, text, size) == (content, calls)


STYLES_WITH_NAMES = [
    HERMES,
    MISTRAL_ARGS,
    QWEN3_CODER,
    DEEPSEEK_V3,
    DEEPSEEK_V3_1,
    KIMI,
    GEMMA,
    FUNCTION_GEMMA,
    LFM,
    OLMO,
]


@pytest.mark.parametrize("style", STYLES_WITH_NAMES)
@pytest.mark.parametrize("name", ["user-profile/update.v2", "a" * 128])
def test_a_tool_may_have_any_name_of_the_model_context_protocol(style, name):
    Tool(type="function", function={"name": name})
    arguments = "" if style.parameters else "{}"
    call = style.opening.replace("NAME", name).replace("#", "0") + arguments + style.closing
    call = f"{name}()" if style.is_python else call
    _, calls = ToolReader(style, {name: {}}).split(style.section[0] + call + style.section[1], True)
    assert [one["function"]["name"] for one in calls] == [name]
    text = f"<|channel|>commentary to=functions.{name} <|message|>{{}}<|call|>"
    assert split_harmony(text, [name], True)[2] == [(name, "{}")]


TYPED = {
    "text": {"type": "string"},
    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "kind": {"enum": ["1", "b c"]},
    "number": {"type": "integer"},
    "flag": {"type": "boolean"},
    "many": {"type": "array", "items": {"$ref": "#/$defs/one"}},
    "any": {},
}
PARAMETERS = {
    "type": "object",
    "properties": TYPED,
    "required": ["text", "many"],
    "$defs": {"one": {"type": "integer"}},
}
VALUES = {"text": "if a < b:\n  12", "maybe": None, "kind": "1", "number": 7, "flag": True, "many": [1, 2], "any": "3"}
WRITTEN = {key: value if isinstance(value, str) else json.dumps(value) for key, value in VALUES.items()}
TAGS = {  # the format: a call of f with these parameters, and one without
    "qwen3_coder": ("<tool_call>\n<function=f>\n{}</function>\n</tool_call>", "<parameter={}>\n{}\n</parameter>\n"),
    "glm4_5": ("<tool_call>f\n{}</tool_call>", "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n"),
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="f">\n{}</invoke>\n</minimax:tool_call>',
        '<parameter name="{}">{}</parameter>\n',
    ),
}


@pytest.mark.parametrize("model", TAGS)
def test_arguments_in_tags_have_the_types_of_their_schema(model):
    style, (call, one) = format_of((TEMPLATES / f"{model}.jinja").read_text()), TAGS[model]
    whole = call.format("".join(one.format(*item) for item in WRITTEN.items()))
    for text, content, calls in (
        (f"I look.\n{whole}\nDone.", "I look.\n\nDone.", [("f", VALUES)]),
        (whole.replace(">True<", ">true<") + call.format(""), "", [("f", VALUES), NOTHING]),
        (whole[: -len("</tool_call>") - 12], whole[: -len("</tool_call>") - 12], []),
    ):
        assert read(style, text, 3, PARAMETERS) == (content, calls)


@pytest.mark.parametrize(
    "written, value",
    [
        ("""["it's", {'a': None}]""", ["it's", {"a": None}]),
        ("[{1, 2}]", "[{1, 2}]"),
        ("(" * 9999, "(" * 9999),
        ("1j", "1j"),
        ("1e999", "1e999"),
        (r'["\ud83e\uddea"]', ["\U0001f9ea"]),
        (r"['\ud83e\uddea']", ["\U0001f9ea"]),
    ],
)
def test_a_list_may_be_written_in_python(written, value):
    text = f"<tool_call>\n<function=f>\n<parameter=a>\n{written}\n</parameter>\n</function>\n</tool_call>"
    parameters = {"type": "object", "properties": {"a": {"type": "array"}}}
    assert read(QWEN3_CODER, text, 1000, parameters) == ("", [("f", {"a": value})])


OPEN = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}
TWO, XML = "<tool_call>f</tool_call><tool_call>f\n</tool_call>", '<a>\n<param name="a">1</param>\n</a>'
END, MORE = "\n</function>\n</tool_call>", "<tool_call>\n<function=f>\n<parameter=b>\ny\n</parameter>"


@pytest.mark.parametrize(
    "style, text, calls",
    [
        (QWEN3_CODER, f"{MORE}{END}\n<function=f>\n<parameter=b>\nx  {END}", [{"b": "y"}, {"b": "x"}]),
        (QWEN3_CODER, f"<function=f>\n<parameter=b>\n{END}\n", [{"b": ""}]),
        (QWEN3_CODER, f"<function=f>\n<parameter=b>\nx{END}\nz{END}", [{"b": f"x{END}\nz"}]),
        (QWEN3_CODER, f"<function=f>\n<parameter=b>\nx{END}\nz\n</parameter>{END}", [{"b": f"x{END}\nz"}]),
        (QWEN3_CODER, f"<function=f>\n<parameter=b>\nx{END}\n{MORE}{END}", [{"b": f"x{END}\n{MORE[:-13]}"}]),
        (
            QWEN3_CODER,
            f"<function=f>\n<parameter=b>\nx\n<parameter=a>\n1\n</parameter>{END}",
            [{"b": "x\n<parameter=a>\n1"}],
        ),
        (QWEN3_CODER, f"<function=f>\n<parameter=b>\nx\n<parameter=c>\n</parameter>{END}", [{"b": "x\n<parameter=c>"}]),
        (GLM, "<tool_call>f\n<arg_key>b</arg_key>\n<arg_value>x</tool_call>", [{"b": "x"}]),
        (GLM, f"<tool_call>f\n<arg_key>b</arg_key>\n<arg_value>{TWO}</arg_value>\n</tool_call>", [{"b": TWO}]),
        (MINICPM, f'<function name="f"><param name="b"><![CDATA[{XML}]]></param></function>', [{"b": XML}]),
        (MINIMAX, '<invoke name="f">\n<parameter name="b">x\n</invoke>\n</minimax:tool_call>', [{"b": "x"}]),
    ],
)
def test_the_last_value_may_lack_its_end(style, text, calls):
    """Models leave it out in long conversations. What stands within a value that ends is part of it, whatever it is."""
    assert read(style, text, 1000, OPEN) == ("", [("f", given) for given in calls])


@pytest.mark.parametrize("value", ["x\n<parameter=a>\n1" + END, "x" + "\n" * 60_000 + "y"])  # the latter took a minute
def test_a_call_whose_values_have_no_ends_is_content(value):
    text = "<function=f>\n<parameter=b>\n" + value
    assert read(QWEN3_CODER, text, len(text), OPEN) == (text, [])


@pytest.mark.parametrize(
    "template, style",
    [
        (
            'within <tool_call></tool_call> XML tags:\\n<tool_call>\\n{\\"name\\": <name>, \\"arguments\\": <args>}',
            HERMES,
        ),
        ('in the format {"name": function name, "parameters": dictionary of argument name and its value}', LLAMA),
        (None, None),
        ("List of tools: <|tool_list_start|>[ and <|tool_call_start|>[", LFM),
        ("<functions></functions> ... <function_calls> ... <|im_start|>environment", OLMO),
        ("<start_function_call>call:f{a:<escape>b<escape>}", FUNCTION_GEMMA),
        ("plain <tool_call>", None),
        ("<|function_call|> + {'name': ...}", GIGACHAT),
        ('<function name="f"><param name="a">', MINICPM),
        ("<seed:tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>", SEED_OSS),
        *((name, style) for name, style in STYLES.items()),
    ],
)
def test_formats_are_known_by_their_templates(template, style):
    file = TEMPLATES / f"{template}.jinja"
    assert format_of(file.read_text() if template in STYLES else template) == style


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize(
    "name", [name for name, style in STYLES.items() if style not in (None, HARMONY, MISTRAL, APRIEL, GEMMA)]
)
def test_a_forced_call_is_what_the_template_writes(name, many):
    """Check that the grammar accepts the template's own text of calls, which is read as the same calls. (gpt-oss has a
    second order of its header, and the ids in Mistral-Nemo's and Apriel's lists are not for the model to write.)"""
    template, style = (TEMPLATES / f"{name}.jinja").read_text(), STYLES[name]
    many = many and not template_needs(template).one_call
    plain = {key: value for key, value in VALUES.items() if key not in ("maybe", "flag")}  # some are written in Python
    calls = [{"id": "123456789", "function": {"name": "f", "arguments": plain}}] * (1 + many)
    asked = {"role": "user", "content": "q"}
    messages = [asked, {"role": "assistant", "tool_calls": calls}, *[{"role": "tool", "content": "r"}] * len(calls)]
    shown = rendered(normalize_messages(messages, template), template)
    start = shown.index((style.section[0] or style.opening).split("NAME")[0].rstrip())
    tool = Tool(type="function", function={"name": "f", "parameters": PARAMETERS})
    matcher, accepted = LLMatcher(LLTokenizer("byte"), call_rules([tool], style, many, {}), log_level=0), b""
    assert not matcher.is_error(), matcher.get_error()
    text = shown[start:].encode()
    for at, byte in enumerate(text):
        accepted = text[:at] if matcher.is_accepting() else accepted
        if not matcher.try_consume_tokens([byte]):
            break
    assert read(style, accepted.decode(), 9, PARAMETERS) == ("", [("f", plain)] * len(calls))


def test_calls_that_a_template_writes_between_marks_are_read():
    calls = [{"id": "1", "function": {"name": "f", "arguments": VALUES}}] * 2
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": calls}]
    template = (TEMPLATES / "gemma4.jinja").read_text()
    shown = rendered(normalize_messages(messages, template), template)
    shown = shown[shown.index("<|tool_call>") :].removesuffix("<|tool_response>")  # special, not text
    assert read(GEMMA, shown, 5) == ("", [("f", VALUES)] * 2)


def test_calls_are_forced_as_json_where_the_format_has_no_grammar():
    tools = [{"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}]
    template = (TEMPLATES / "gemma4.jinja").read_text()
    for choice, style in (("required", BARE), ("auto", GEMMA)):
        assert call_format(ChatRequest(**ASKED, tools=tools, tool_choice=choice), template) == style


# As zod, pydantic and the authors of MCP servers write them.
LOOSE = {
    "mail": {"type": "string", "format": "email", "pattern": r"^(?!\.)\w+@[\w.]+$"},
    "price": {"anyOf": [{"type": "number"}, {"type": "string", "pattern": r"^(?!^[-+.]*$)\d*\.?\d*$"}]},
    "file": {"type": "object", "properties": {"path": {"type": "string", "format": "path"}}},
    "facts": {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "string"}},
    "pattern": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
    "format": {"enum": ["a", {"format": "path"}]},
    "enum": {"type": "string", "format": "path"},
}
LOOSE = {"type": "object", "properties": LOOSE, "required": [*LOOSE]}


@pytest.mark.parametrize("style", [HERMES, QWEN3_CODER])
def test_a_forced_call_needs_no_schema_that_a_grammar_can_follow(target, style):
    """Leave to the model what llguidance lacks, as OpenAI's API does unless the tool is strict."""
    grammars = Grammars(target)

    def rules(**facts) -> str:
        function = {"name": "f", "parameters": LOOSE, **facts}
        return call_rules([Tool(type="function", function=function)], style, False, grammars.special)

    matcher = grammars.lark(rules()).matcher
    if style is HERMES:
        given = {
            "mail": "a@b.c",
            "price": ".",
            "file": {},
            "facts": {},
            "pattern": ["a", "a"],
            "format": {"format": "path"},
            "enum": "",
        }
        text = f'<tool_call>\n{{"name": "f", "arguments": {json.dumps(given)}}}\n</tool_call>'
        ids = target.text_tokenizer(text).input_ids
        assert matcher.try_consume_tokens(ids) == len(ids)
    with pytest.raises(ValueError, match="be compiled"):
        grammars.lark(rules(strict=True))


@pytest.mark.parametrize("style", [HERMES, QWEN3_CODER])
@pytest.mark.parametrize(
    "definition",
    [
        {"type": "any"},
        {"type": "OBJECT", "properties": []},
        {"type": ["text", "null"]},
        {"type": {"type": "string"}},
        {"anyOf": [None, {"type": [{"type": "string"}]}]},
        [],
        None,
    ],
)
def test_a_forced_call_needs_no_schema_without_mistakes(target, style, definition):
    grammars = Grammars(target)
    schema = {"type": "OBJECT", "properties": {"a": definition}, "required": ["a"]}
    tool = Tool(type="function", function={"name": "f", "parameters": schema})
    assert grammars.lark(call_rules([tool], style, False, grammars.special)).matcher.compute_bitmask()


def test_a_schema_may_have_nulls_and_the_empty_lists_of_php(target):
    """Check that both are left out, in a response_format too, and that a tool without parameters may have a list of them."""
    nulls = {"type": "object", "properties": {"a": None, "b": {"type": "string", "enum": None}}, "required": None}
    default = {"type": {"format": [None]}}  # a value, not a schema
    schema = {
        **nulls,
        "$defs": [],
        "patternProperties": [],
        "additionalProperties": [],
        "const": None,
        "default": default,
    }
    left = {"type": "object", "properties": {"a": {}, "b": {"type": "string"}}, "const": None, "default": default}
    assert as_supported(schema) == as_supported(schema, lenient=True) == left
    del schema["const"]
    assert Grammars(target).json_schema({"anyOf": [schema, {"properties": []}]}).matcher.compute_bitmask()
    assert Tool(type="function", function={"name": "f", "parameters": []}).function.parameters == {}


def test_a_schema_may_name_formats_that_nobody_knows(target):
    """JSON Schema lets a program ignore them; what it must follow is still refused."""
    grammars = Grammars(target)
    given = {"format": "path"}
    for schema, text in (({"type": "string"} | given, '"/a b"'), ({"const": given}, json.dumps(given))):
        ids = target.text_tokenizer(text).input_ids
        assert grammars.json_schema(schema).matcher.try_consume_tokens(ids) == len(ids)
    for schema in (LOOSE, {"type": "array", "uniqueItems": True}):
        with pytest.raises(ValueError, match="be compiled"):
            grammars.json_schema(schema)


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_a_schema_may_name_formats_that_are_followed(target, form):
    ids = target.text_tokenizer('"!"').input_ids
    assert Grammars(target).json_schema({"type": "string", "format": form}).matcher.try_consume_tokens(ids) < len(ids)


def test_a_pattern_is_followed_unless_a_grammar_lacks_a_part_of_it():
    lacking = [r"^(?!a)b", r"(?<=a)b", r"a\bb", r"(a)\1", r"(?<x>a)\k<x>", r"\\\b"]
    followed = [r"^C:\\bin$", r"^f\(?=x$", "a+"]
    for pattern in lacking + followed:
        schema = {"type": "string", "pattern": pattern}
        assert as_supported(schema) == schema
        assert as_supported(schema, lenient=True) == (schema if pattern in followed else {"type": "string"})


def test_arguments_have_the_letters_that_the_model_wrote():
    """Check also half of a surrogate pair, which no client could send back."""
    text = '<tool_call>\n{"name": "f", "arguments": {"a": "M\\u00fcnchen \\ud83e\\uddea é \\ud83e"}}\n</tool_call>'
    _, (call,) = ToolReader(HERMES, {"f": {}}).split(text, True)
    assert call["function"]["arguments"] == '{"a": "München 🧪 é \ufffd"}'


def test_special_tokens_are_not_spelled_in_a_forced_call():
    rules = call_rules(
        [Tool(type="function", function={"name": "f"})], MISTRAL_ARGS, True, {"[TOOL_CALLS]": 5, "[ARGS]": 6}
    )
    assert 'call_0: <[5]> "f" <[6]> arguments_0' in rules
    rules = call_rules([Tool(type="function", function={"name": "f"})], HARMONY, True, {"<|call|>": None})
    assert "<|call|>" not in rules


def choice_of(text: str, template: str, finish_reason: str = "stop", prompt: str = "q", **facts) -> Piece:
    """Return the answer that a target wrote in these tokens, some of which are special."""
    marks = ["<s>", "</s>", "[TOOL_CALLS]", "[ARGS]", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|start|>"]
    marks += ["[THINK]", "[/THINK]", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>', "<turn|>"]
    file = TEMPLATES / f"{template}.jinja"
    words = tokenizer(file.read_text() if file.is_file() else template, special=marks)
    tool = {"type": "function", "function": {"name": "f"}}
    asked = ChatRequest(**{"messages": [{"role": "user", "content": "q"}], "tools": [tool], **facts})
    service: Any = SimpleNamespace(target=SimpleNamespace(text_tokenizer=words))
    reasoning = Service.pending_marks(service, asked, words(prompt).input_ids)
    request = Request(words(prompt).input_ids, eos_token_ids=frozenset([words.eos_token_id]), reasoning=reasoning)
    choice = Choice(0, SimpleNamespace(request=request), asked, words)
    choice.push(RequestOutput(request, words(text).input_ids, None, 1, finish_reason))
    return choice.whole


def test_the_steps_of_a_text_that_another_drafter_went_on_with_add_up_to_it(target):
    asked = ChatRequest(messages=[{"role": "user", "content": "q"}])
    engine, request = Engine(target, NgramDrafter()), Request([5, 6, 7, 5, 6, 7], max_new_tokens=20)
    choice = Choice(0, SimpleNamespace(request=request), asked, target.text_tokenizer)
    engine.add(request)
    while engine.has_work:
        for output in engine.step():
            choice.push(output)
        if len(choice.whole.ids) in (4, 5):
            engine.swap(NgramDrafter())
    assert len(choice.drafted) == len(choice.accepted)
    assert len(choice.whole.ids) == 20 <= 1 + sum(count + 1 for count in choice.accepted)


def named(choice: Piece) -> list[str]:
    return [call["function"]["name"] for call in choice.calls]


@pytest.mark.parametrize(
    "name, end, split",
    [
        ("qwen3", "", False),
        ("qwen3", "<think>\n\n</think>\n\n", False),
        ("deepseek_r1", "<think>\n", True),
        ("qwq", "<think>\n", True),
        ("llama3", "<think>\n", False),  # which does not reason
    ],
)
def test_a_template_says_how_thoughts_begin(name, end, split):
    choice = choice_of("a</think>b", name, prompt="q" + end, tools=None)
    assert (choice.reasoning, choice.text) == (("a", "b") if split else ("", "a</think>b"))


@pytest.mark.parametrize(
    "template, opening, closing",
    [
        ("gemma4", "<|channel>thought\n", "<channel|>"),
        ("{# [THINK] [/THINK] #}", "[THINK]", "[/THINK]"),
        ("{# <seed:think> </seed:think> #}", "<seed:think>", "</seed:think>"),
    ],
)
def test_reasoning_between_other_marks_is_read(template, opening, closing):
    """Check marks that are special tokens and marks that are text, and a prompt that opens the reasoning or closes it."""
    for text, prompt in ((opening + "a", "q"), ("a", "q" + opening)):
        choice = choice_of(f"{text}{closing}b</s>", template, prompt=prompt, tools=None)
        assert (choice.reasoning, choice.text) == ("a", "b")
    choice = choice_of("b</s>", template, prompt=f"q{opening}{closing}", tools=None)
    assert (choice.reasoning, choice.text) == ("", "b")


def test_a_grammar_allows_reasoning_that_the_prompt_opens():
    facts = {"tools": None, "response_format": {"type": "json_object"}}
    choice = choice_of("a</think>\n{}", "qwq", prompt="q<think>\n", **facts)
    assert (choice.reasoning, choice.text) == ("a", "{}")
    choice = choice_of('{"a": "</think>"}', "qwen3", **facts)
    assert (choice.reasoning, choice.text) == ("", '{"a": "</think>"}')


def test_a_call_in_reasoning_that_never_ends_is_a_call():
    """Check that one that the reasoning only mentions is none."""
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    choice = choice_of(f"I look.\n{call}</s>", "qwen3", prompt="q<think>\n")
    assert (choice.text, named(choice), choice.finish_reason) == ("", ["f"], "tool_calls")
    for text, reason, content in (
        (f"{call}</think>b</s>", "stop", "b"),
        (f"{call}</think></s>", "stop", ""),
        (call, "length", ""),
    ):
        choice = choice_of(text, "qwen3", reason, prompt="q<think>\n")
        assert (choice.reasoning, choice.text, named(choice)) == (call, content, [])


def test_calls_between_special_tokens_are_read_and_other_special_tokens_are_no_text():
    choice = choice_of('I look.[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]f[ARGS]{}</s>', "devstral")
    assert (choice.text, named(choice), choice.finish_reason) == ("I look.", ["f", "f"], "tool_calls")
    text = '<|channel>thought\nI call.<channel|>I look.<|tool_call>call:f{a:<|"|>b<|"|>}<tool_call|><turn|></s>'
    choice = choice_of(text, "gemma4")
    assert (choice.reasoning.strip(), choice.text, choice.finish_reason) == ("I call.", "I look.", "tool_calls")
    assert choice.calls[0]["function"] == {"name": "f", "arguments": '{"a": "b"}'}
    choice = choice_of("Hello.</s>", "devstral", tool_choice="none")
    assert (choice.text, choice.calls, choice.finish_reason) == ("Hello.", [], "stop")


def test_without_parallel_calls_a_free_answer_has_one():
    text = "[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]f[ARGS]{}</s>"
    assert named(choice_of(text, "devstral", parallel_tool_calls=False)) == ["f"]


def test_an_answer_that_is_cut_ends_by_its_length_whatever_was_called_before():
    choice = choice_of('[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]f[ARGS]{"a', "devstral", "length")
    assert (named(choice), choice.finish_reason) == (["f"], "length")
    choice = choice_of('<|channel|>commentary to=functions.f <|message|>{"a', "gpt_oss", "length")
    assert (choice.text, choice.calls, choice.finish_reason) == ('{"a', [], "length")


@pytest.mark.parametrize(
    "template, text, arguments",
    [
        ("qwen3", '<tool_call>\n{"name": "f", "arguments": {"a": [1, ', '{"a": [1, '),
        ("llama3", '{"name": "f", "parameters": {"a": "b', '{"a": "b'),
        ("gemma3", '{"name": "f", "arguments": {"a": 1}', '{"a": 1}'),  # without a known format
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a', '{"a'),
        ("devstral", "[TOOL_CALLS]f[ARGS]", ""),
        ("apertus", '<|tools_prefix|>[{"f": {"a": tr', '{"a": tr'),
        ("gpt_oss", '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": ', '{"a": '),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\nb\n</parameter>\n<parameter=c>\nd", '{"a": "b"'),
        ("glm4_5", "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>b", "{"),
        ("qwen3", '<tool_call>\n{"name": "f', None),
        ("qwen3", "<tool_", None),
    ],
)
def test_a_forced_call_that_is_cut_is_its_start_and_no_text(template, text, arguments):
    choice = choice_of(text, template, "length", tool_choice="required")
    assert (choice.text, choice.finish_reason) == ("", "length")
    assert [call["function"]["arguments"] for call in choice.calls] == ([] if arguments is None else [arguments])
    whole = choice_of(text, template, "length")  # a call that the model chose, and did not end, is text
    assert whole.calls == [] and whole.text


def test_of_forced_calls_the_last_one_is_cut():
    text = (
        '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n<tool_call>\n{"name": "f", "arguments": {"a'
    )
    choice = choice_of(text, "qwen3", "length", tool_choice="required")
    assert [call["function"]["arguments"] for call in choice.calls] == ['{"a": 1}', '{"a'] and choice.text == ""
    choice = choice_of(text, "qwen3", "length", tool_choice="required", parallel_tool_calls=False)
    assert [call["function"]["arguments"] for call in choice.calls] == ['{"a": 1}']


def test_a_forced_call_that_is_cut_arrives_alike_streamed_and_whole(client):
    named = {"type": "function", "function": {"name": "pair"}}
    facts = {**ASKED, "tools": TOOLS, "tool_choice": named, "max_tokens": 60, "temperature": 0, "stream": False}
    (whole,) = client.chat.completions.create(**facts).choices
    (call,) = whole.message.tool_calls
    assert (whole.finish_reason, whole.message.content, call.function.name) == ("length", None, "pair")
    with pytest.raises(ValueError):
        json.loads(call.function.arguments)
    chunks = [*client.chat.completions.create(**facts | {"stream": True})]
    calls = [part.function for chunk in chunks for part in chunk.choices[0].delta.tool_calls or []]
    assert [(part.name, part.arguments) for part in calls] == [("pair", call.function.arguments)]
    assert (
        not any(chunk.choices[0].delta.content for chunk in chunks) and chunks[-1].choices[0].finish_reason == "length"
    )
    tool = {"type": "function", **TOOLS[0]["function"]}
    answer = client.responses.create(
        model="tiny", input="def add(self, other):", tools=[tool], tool_choice="required", max_output_tokens=60
    )
    assert (answer.status, [(item.type, item.status) for item in answer.output]) == (
        "incomplete",
        [("function_call", "incomplete")],
    )


@pytest.mark.parametrize("recipient", ["functions.f", "f"])  # it leaves the namespace out in long conversations
@pytest.mark.parametrize("facts, calls", [({}, ["f"]), ({"tool_choice": "none"}, []), ({"tools": None}, [])])
def test_a_call_of_gpt_oss_is_one_of_the_tools_that_may_be_called(facts, calls, recipient):
    choice = choice_of(f"<|channel|>commentary to={recipient} <|message|>{{}}<|call|>", "gpt_oss", **facts)
    assert named(choice) == calls and choice.text == ("" if calls else "{}")
