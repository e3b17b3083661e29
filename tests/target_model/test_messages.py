"""Messages of earlier turns, as clients replay them and data sets hold them, made into what a chat template takes."""

import re

import pytest

from foredraft.heads.target_model.messages import (
    in_turns,
    normalize_messages,
    normalize_tools,
    rendered,
    template_needs,
)
from foredraft.inference.serve.openai.protocol import content_text
from foredraft.inference.serve.openai.tools import new_call
from tests.support import ROOT

TEMPLATES = ROOT / "tests" / "support" / "chat_templates"
QUESTION = {"role": "user", "content": "q"}


def template(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text()


def call(name: str = "f", arguments="{}", **more) -> dict:
    return {"id": "call_0123456789", "type": "function", "function": {"name": name, "arguments": arguments}, **more}


def answer(*calls: dict, **more) -> dict:
    return {"role": "assistant", "content": "", "tool_calls": list(calls), **more}


def result(content: str = "3", **more) -> dict:
    return {"role": "tool", "content": content, "tool_call_id": "call_0123456789", **more}


NOTHING = dict.fromkeys(("audio", "function_call", "tool_calls"))  # of message.model_dump() of the openai package


@pytest.mark.parametrize(
    "message, content",
    [
        ({"content": "yes", "tool_calls": []}, "yes"),
        ({"content": "yes", "refusal": None, **NOTHING}, "yes"),
        ({"content": None, "refusal": "I cannot."}, "I cannot."),
    ],
)
def test_what_a_message_has_not_is_left_out_and_a_refusal_is_its_answer(message, content):
    messages = normalize_messages([QUESTION, {"role": "assistant", **message}], template("llama3"))
    assert messages[1] == {"role": "assistant", "content": content}


ARGUMENTS = [*((nothing, {}) for nothing in ("", " \n", None, "null", "{}", {})), ('{"a": ', '{"a": ')]


@pytest.mark.parametrize("arguments, shown", [*ARGUMENTS, ('{"a": 1}', {"a": 1}), ({"a": 1}, {"a": 1})])
def test_arguments_are_an_object_and_text_if_they_are_broken(arguments, shown):
    (message,) = normalize_messages([answer(call(arguments=arguments))], template("qwen3"))
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": shown}


@pytest.mark.parametrize(
    "calls", ["f()", {"name": "f"}, [None], [{}], [{"function": {"name": None}}], [{"function": "f"}]]
)
def test_what_is_no_call_is_refused(calls):
    with pytest.raises(ValueError, match="tool_calls"):
        normalize_messages([{"role": "assistant", "tool_calls": calls}], template("qwen3"))


@pytest.mark.parametrize("name, content", [("qwen3", ""), ("smollm2", ""), ("deepseek_r1", None)])
@pytest.mark.parametrize("given", [{}, {"content": None}, {"content": ""}])
def test_calls_without_content_have_what_the_template_takes_for_nothing(name, content, given):
    (message,) = normalize_messages([{"role": "assistant", "tool_calls": [call()], **given}], template(name))
    assert message["content"] == content


@pytest.mark.parametrize("ids", [("call_0123456789", "call_0123456780"), (None, None), ("123456789", "abcDEF789")])
def test_ids_are_nine_letters_and_digits_where_the_template_wants_that(ids):
    """Check that a call and its result have the same id, and each call another."""
    calls, results = [call(id=one) for one in ids], [result(tool_call_id=one) for one in ids]
    messages = normalize_messages([QUESTION, answer(*calls), *results], template("mistral"))
    found = [one["id"] for one in messages[1]["tool_calls"]]
    assert all(re.fullmatch("[a-zA-Z0-9]{9}", one) for one in found) and len(set(found)) == 2
    assert [message["tool_call_id"] for message in messages[2:]] == found
    assert ids[0] != "123456789" or found == [*ids]
    assert re.fullmatch("[a-zA-Z0-9]{9}", new_call("f", "{}")["id"])  # ours suit every template
    (untouched, _, _) = normalize_messages([answer(*calls), *results], template("qwen3"))
    assert [one.get("id") for one in untouched["tool_calls"]] == [*ids]


def test_several_calls_of_one_message_are_spread_where_the_template_takes_one():
    asked = [QUESTION, answer(call("f", id="a"), call("g", id="b"), content="I look."), result("2", tool_call_id="b")]
    asked.append(result("1", tool_call_id="a"))
    messages = normalize_messages(asked, template("llama3"))[1:]
    assert [message["content"] for message in messages] == ["I look.", "1", "", "2"]
    assert [one["function"]["name"] for message in messages for one in message.get("tool_calls", [])] == ["f", "g"]
    assert len(normalize_messages(asked, template("qwen3"))) == 4
    asked[2:] = [{"role": "tool", "content": "1"}, {"role": "tool", "content": "1"}]  # without ids they come in order
    assert [message["content"] for message in normalize_messages(asked, template("llama3"))[2:]] == ["1", "", "1"]


def test_thoughts_and_content_beside_calls_are_one_text_where_the_template_takes_one():
    asked = [QUESTION, answer(call(), content="I look.", reasoning="Look it up.")]
    message = normalize_messages(asked, template("gpt_oss"))[1]
    assert message["reasoning"] == "Look it up.\n\nI look." and message["content"] == ""
    assert normalize_messages(asked, template("qwen3"))[1]["content"] == "I look."


@pytest.mark.parametrize("name", ["gpt_oss", "qwen3", "mistral"])
def test_a_tool_without_description_and_parameters_is_shown(name):
    """Check that it is unchanged if the template accepts that."""
    bare = [{"type": "function", "function": {"name": "look_up", "description": None}}]
    tools = normalize_tools(bare, template(name))
    assert "look_up" in rendered([QUESTION], template(name), tools)
    assert name == "gpt_oss" or tools == [{"type": "function", "function": {"name": "look_up"}}]


def test_a_template_that_concatenates_arguments_is_given_text():
    shown = "{{ c.function.name + c.function.arguments }}"
    text = f"{{% for m in messages %}}{{% for c in m.tool_calls %}}{shown}{{% endfor %}}{{% endfor %}}"
    printed = text.replace(" + ", " }}{{ ")  # which writes Python where it is given an object
    for written in (text, printed):
        assert template_needs(written).text_arguments
        (message,) = normalize_messages([answer(call(arguments={"a": "é"}))], written)
        assert message["tool_calls"][0]["function"]["arguments"] == '{"a": "é"}'


@pytest.mark.parametrize("name", ["qwen3", "mistral", "llama3", "gpt_oss"])
def test_results_come_in_the_order_of_their_calls(name):
    asked = [QUESTION, answer(call("f", id="a"), call("g", id="b")), result("2", tool_call_id="b")]
    asked.append(result("1", tool_call_id="a"))
    messages = normalize_messages(asked, template(name))
    assert [message["content"] for message in messages if message["role"] == "tool"] == ["1", "2"]
    asked[-1]["tool_call_id"] = ["unknown"]
    assert next(one["content"] for one in normalize_messages(asked, template(name)) if one["role"] == "tool") == "2"


@pytest.mark.parametrize("name", ["qwen3", "mistral", "gpt_oss"])
def test_a_function_call_of_older_clients_is_a_tool_call(name):
    old = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"a": 1}'}}
    asked = [QUESTION, old, {"role": "function", "name": "f", "content": "3"}]
    new = [QUESTION, {"role": "assistant", "tool_calls": [call(arguments='{"a": 1}', id=None)]}]
    new.append({"role": "tool", "name": "f", "content": "3"})
    assert normalize_messages(asked, template(name)) == normalize_messages(new, template(name))
    assert '"a": 1' in rendered(normalize_messages(asked, template(name)), template(name))


@pytest.mark.parametrize("name", [path.stem for path in sorted(TEMPLATES.glob("*.jinja"))])
@pytest.mark.parametrize("roles", [("system", "system"), ("system", "developer"), ("user", "system")])
def test_every_system_message_is_shown(name, roles):
    """Check also that a template that shows later ones gets them in their places."""
    first, later = ({"role": role, "content": content} for role, content in zip(roles, ("s_a", "s_b"), strict=True))
    asked = [
        first,
        *([] if roles[0] == "user" else [QUESTION]),
        {"role": "assistant", "content": "yes"},
        later,
        QUESTION,
    ]
    messages = normalize_messages(asked, template(name))
    assert template_needs(template(name)).one_system or messages == asked
    roles = {} if "developer" in template(name) else {"developer": "system"}  # as the server does
    text = rendered([{**one, "role": roles.get(one["role"], one["role"])} for one in messages], template(name))
    assert "s_a" in text and "s_b" in text


def test_calls_of_one_id_have_their_results():
    """Check Kimi-K2, whose results name their calls: servers give several calls one id, in one answer or in several."""
    asked = [QUESTION, answer(call("f"), call("f")), result("1"), result("2"), answer(call("f")), result("3")]
    messages = normalize_messages(asked, template("kimi_k2"))
    ids = [message["tool_call_id"] for message in messages if message["role"] == "tool"]
    assert ids == ["functions.f:0", "functions.f:1", "functions.f:2"]


SYSTEM, HELLO = {"role": "system", "content": "s_a"}, {"role": "assistant", "content": "c_a"}
LATER = {"role": "user", "content": "q_b"}
# Mistral Small 3.2 shows a system message without any other. Gemma 3 counts a call as a turn, and refuses results.
UNCHANGED = {"mistral_small3_2": [SYSTEM], "gemma3": [QUESTION, answer(call()), LATER]}


@pytest.mark.parametrize("name", ["mistral", "mistral_small3_2", "gemma3", "qwen3"])
@pytest.mark.parametrize(
    "asked, roles",
    [
        ([SYSTEM, QUESTION, LATER], "su"),
        ([HELLO, LATER], "uau"),
        ([QUESTION, HELLO, HELLO, LATER], "uau"),
        ([QUESTION, answer(call()), result(), LATER], "uatau"),  # the user stopped the tool, and asks again
        ([QUESTION, answer(call()), LATER], "uaau"),
        ([QUESTION, answer(call()), result(), HELLO, LATER], "uatau"),
        ([{"role": "user", "content": ""}, LATER], "u"),
        ([SYSTEM], "su"),
    ],
)
def test_a_template_that_requires_turns_gets_them(name, asked, roles):
    normalized = normalize_messages(asked, template(name))
    messages = in_turns(normalized, template(name))
    text = rendered(messages, template(name))
    if name == "gemma3" and result() in asked:
        assert messages == normalized and not text
    elif name == "qwen3" or asked == UNCHANGED.get(name):
        assert messages == normalized and all(message["content"] in text for message in asked) and text
    else:
        assert "".join(message["role"][0] for message in messages) == roles
        assert all(message["content"] in text for message in asked) and text
        assert not messages[0]["content"].startswith("\n")


def test_ids_that_are_empty_are_none():
    asked = [QUESTION, answer(call("f", id=""), call("g", id="")), result(tool_call_id=""), result(tool_call_id="")]
    messages = normalize_messages(asked, template("mistral"))
    ids = [one["id"] for one in messages[1]["tool_calls"]]
    assert len({*ids}) == 2 and [message["tool_call_id"] for message in messages[2:]] == ids


@pytest.mark.parametrize(
    "role, content, text",
    [
        ("user", None, None),
        ("assistant", [], ""),
        ("user", ["a", {"type": "input_text", "text": "b"}, {"type": "text", "text": "c", "cache_control": {}}], "abc"),
        ("assistant", [{"type": "output_text", "text": "a"}, {"type": "refusal", "refusal": "no"}], "ano"),
        ("tool", {"type": "text", "text": "3"}, "3"),
        ("tool", {"é": [1]}, '{"é": [1]}'),
        ("function", [{"a": 1}, None], '[{"a": 1}, null]'),
        ("tool", ["A map: ", {"type": "input_image", "image_url": "data:"}], "A map: [input_image omitted: not text]"),
        ("tool", [{"type": "dir"}, {"type": "file", "name": "a"}], '[{"type": "dir"}, {"type": "file", "name": "a"}]'),
        ("tool", {"type": ["text"]}, '{"type": ["text"]}'),
        (
            "tool",
            [{"type": "text", "text": "a "}, {"type": "resource", "resource": {"text": "é"}}],
            'a {"type": "resource", "resource": {"text": "é"}}',
        ),
        *(
            ("tool", ["A: ", {"type": kind, **data}], f"A: [{kind} omitted: not text]")
            for kind, data in (
                ("image", {"url": "data:"}),
                ("image", {"base64": "A"}),
                ("audio", {"audio_url": "A"}),
                ("input_image", {"detail": "low"}),
                ("media", {"data": "A"}),
                ("file", {"url": "data:", "name": "a"}),
                ("file", {"blob": "A", "name": "a"}),
                ("resource", {"resource": {"blob": "A"}}),
            )
        ),
    ],
)
def test_a_content_is_the_text_of_its_parts(role, content, text):
    assert content_text(role, content) == text


@pytest.mark.parametrize(
    "role, content",
    [("user", {"a": 1}), ("user", [None]), ("user", [{"type": "image_url"}]), ("user", [{"type": ["text"]}])],
)
def test_parts_that_are_not_text_are_refused(role, content):
    with pytest.raises(ValueError, match="only text is supported"):
        content_text(role, content)
