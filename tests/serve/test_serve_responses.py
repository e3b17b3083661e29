"""The Responses API through the openai package: the answers of chat completions, told as items and events."""

import json
from typing import Annotated, get_args

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, Field, TypeAdapter

from foredraft.inference.serve.openai.protocol import ChatRequest, content_text
from foredraft.inference.serve.openai.responses import ResponsesAnswer
from foredraft.inference.serve.openai.responses_protocol import ResponsesRequest
from tests.support.processes import Served, on_cpu, served

# It shows all of a conversation; the prompt opens the reasoning if it is asked for.
TEMPLATE = """!{%- if tools %}{{ 'Answer with <tool_call>{"name": ..., "arguments": ...}</tool_call>' }}
{%- for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}
{%- for message in messages %}{{ message.role + ": " }}
{%- if message.reasoning_content %}{{ message.reasoning_content + "; " }}{% endif %}
{%- for call in message.tool_calls or [] %}{{ call.function.name + "(" }}
{%- for key, value in call.function.arguments.items() %}{{ key ~ "=" ~ value }}{% endfor %}{{ ")" }}
{%- endfor %}{{ message.content or "" }}{{ "\n" }}{% endfor %}{{ "assistant:" }}
{%- if enable_thinking is defined and enable_thinking %}<think>\n{% endif %}{# until </think> #}"""
CONTEXT = 2048  # tools are long prompts
SETTINGS = ["drafter=ngram", "drafter.tree=fixed", "max_tokens=300", "log_accepted=accepted.jsonl"]
SCHEMA = {"type": "object", "properties": {"kind": {"enum": ["alpha", "beta"]}}, "required": ["kind"]}
SCHEMA["additionalProperties"] = False
PICK = {"type": "function", "name": "pick", "description": "Pick one.", "parameters": SCHEMA, "strict": True}
CHAT_PICK = {"type": "function", "function": {name: value for name, value in PICK.items() if name != "type"}}
CALL = {"type": "function_call", "call_id": "call_1", "name": "pick", "arguments": "{}"}
QUESTION = {"role": "user", "content": "def add(self, other):"}
EVENT = TypeAdapter(Annotated[get_args(ResponseStreamEvent)[0], Field(discriminator="type")])


class Kind(BaseModel):
    kind: bool


def ask(client: openai.OpenAI, seed: int = 1, **facts) -> Response:
    """Return a response whose fields are all as the openai package has them: it does not check by itself."""
    extra = {"seed": seed, **facts.pop("extra_body", {})}
    raw = client.responses.with_raw_response.create(model="tiny", **{"input": [QUESTION]} | facts, extra_body=extra)
    return Response.model_validate_json(raw.text)


def stream(server: Served, **facts) -> list[dict]:
    """Return the events of a response, checked too."""
    asked = {"model": "tiny", "input": [QUESTION], "stream": True, "seed": 1} | facts
    status, _, body = server.post(json.dumps(asked).encode(), "/v1/responses")
    blocks = [block.splitlines() for block in body.decode().strip().split("\n\n")]
    events = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
    assert status == 200 and [name for name, _ in blocks] == [f"event: {event['type']}" for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        EVENT.validate_python(event)
    return events


def without_ids(response: dict) -> dict:
    items = [{key: item[key] for key in item if key not in ("id", "call_id")} for item in response["output"]]
    return {**response, "id": None, "created_at": None, "output": items}


def nearly(value):
    """Return what equals a response with log-probabilities of other last bits: a prompt that continues from the entries of
    an earlier one is rounded differently."""
    if isinstance(value, dict):
        return {key: nearly(part) for key, part in value.items()}
    if isinstance(value, list):
        return [*map(nearly, value)]
    return pytest.approx(value, abs=1e-4) if isinstance(value, float) else value


def same(server: Served, client: openai.OpenAI, **facts) -> list[dict]:
    """Check the events, of which the last one has the response that is given without a stream."""
    events, whole = stream(server, **facts), client.post("/responses", body=asked_whole(facts), cast_to=object)
    assert without_ids(events[-1]["response"]) == nearly(without_ids(whole))
    return events


def asked_whole(facts: dict) -> dict:
    return {"model": "tiny", "input": [QUESTION], "seed": 1} | facts


def test_a_response_is_the_answer_to_the_same_chat(client):
    facts = {"seed": 4, "temperature": 0.8}
    messages = [{"role": "system", "content": "Be brief."}, QUESTION]
    chat = client.chat.completions.create(model="tiny", messages=messages, max_completion_tokens=20, **facts)
    parts = [{"type": "input_text", "text": "def add("}, {"type": "input_text", "text": "self, other):"}]
    for given in (QUESTION["content"], [QUESTION], [{"type": "message", "role": "user", "content": parts}]):
        found = ask(client, 4, input=given, instructions="Be brief.", temperature=0.8, max_output_tokens=20)
        assert found.output_text == chat.choices[0].message.content and found.status == "incomplete"
        assert found.incomplete_details.reason == "max_output_tokens" and found.output[0].status == "incomplete"
        counts = found.usage.input_tokens, found.usage.output_tokens, found.usage.total_tokens
        assert counts == (chat.usage.prompt_tokens, 20, chat.usage.total_tokens)
    assert found.instructions == "Be brief." and found.temperature == 0.8 and found.store is False


def test_events_tell_how_a_response_grows(server, client):
    events = same(server, client, max_output_tokens=12, include=["message.output_text.logprobs"], top_logprobs=2)
    kinds = [event["type"].removeprefix("response.") for event in events]
    opened = ["created", "in_progress", "output_item.added", "content_part.added"]
    closed = ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert kinds[:4] == opened and kinds[-4:] == closed and {*kinds[4:-4]} == {"output_text.delta"}
    deltas, (part,) = events[4:-4], events[-1]["response"]["output"][0]["content"]
    assert "".join(event["delta"] for event in deltas) == part["text"] == events[-4]["text"] and len(deltas) > 3
    assert [one for event in deltas for one in event["logprobs"]] == part["logprobs"]
    assert len(part["logprobs"][0]["top_logprobs"]) == 2 and len(part["logprobs"]) == 12
    items = {event["item_id"] for event in events if "item_id" in event}
    assert items == {events[-1]["response"]["output"][0]["id"]}


def test_thoughts_are_an_item_before_the_answer(server, client):
    facts = {"max_output_tokens": 12, "reasoning": {"effort": "low", "summary": "auto"}}
    events = same(server, client, **facts)
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds.count("output_item.added") == 1 and kinds[-4:-2] == ["reasoning_text.done", "content_part.done"]
    (item,) = events[-1]["response"]["output"]
    deltas = [event["delta"] for event in events if event["type"] == "response.reasoning_text.delta"]
    assert item["type"] == "reasoning" and "".join(deltas) == item["content"][0]["text"]
    assert 0 < events[-1]["response"]["usage"]["output_tokens_details"]["reasoning_tokens"] <= 12


def test_the_openai_package_parses_and_streams_a_model_of_pydantic(client):
    asked = {"model": "tiny", "input": "a", "text_format": Kind, "extra_body": {"seed": 1}}
    parsed = client.responses.parse(**asked).output_parsed
    assert parsed.kind in (True, False)
    with client.responses.stream(**asked) as events:
        texts = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert Kind.model_validate_json("".join(texts)) == events.get_final_response().output_parsed == parsed


def test_an_agent_calls_a_tool_and_goes_on_with_its_result(server, client):
    """Send all items of the answers before, as an agent does. The prompts are those of the same chat."""
    facts = {"tools": [PICK], "tool_choice": {"type": "function", "name": "pick"}, "parallel_tool_calls": False}
    items, messages = [QUESTION], [QUESTION]
    for turn in range(3):
        events = same(server, client, input=items, **facts)
        kinds = [event["type"].removeprefix("response.") for event in events[2:-1]]
        arguments = "function_call_arguments"
        assert kinds == ["output_item.added", f"{arguments}.delta", f"{arguments}.done", "output_item.done"]
        (call,) = ask(client, input=items, **facts).output
        assert json.loads(call.arguments)["kind"] in ("alpha", "beta") and call.name == events[-3]["name"] == "pick"
        thought = {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "a"}],
        }
        result = {"type": "function_call_output", "call_id": call.call_id, "output": f"result {turn}"}
        items = [*items, thought, call.model_dump(), result]
        function = {"id": call.call_id, "type": "function", "function": {"name": "pick", "arguments": call.arguments}}
        messages += [{"role": "assistant", "content": None, "reasoning": "a", "tool_calls": [function]}]
        messages += [{"role": "tool", "tool_call_id": call.call_id, "content": f"result {turn}"}]
    answer = ask(client, input=items, tools=[PICK], max_output_tokens=9)
    settings = {"tools": [CHAT_PICK], "max_tokens": 9, "seed": 1}
    chat = client.chat.completions.create(model="tiny", messages=messages, **settings)
    assert answer.output_text == chat.choices[0].message.content
    assert answer.usage.input_tokens == chat.usage.prompt_tokens and answer.tools[0].name == "pick"


def test_the_tools_of_an_agent_become_functions(server, client):
    """Send what Codex sends: functions, a namespace of an MCP server, a custom tool, and tools that OpenAI executes."""
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /a+/"}
    patch = {"type": "custom", "name": "apply_patch", "description": "Edit files.", "format": grammar}
    inner = {"type": "namespace", "name": "mcp__idea__", "description": "IDE", "tools": [PICK]}
    tools = [PICK, inner, patch, {"type": "web_search", "external_web_access": False}, {"type": "tool_search"}]
    for name, namespace in (("pick", None), ("mcp__idea__pick", "mcp__idea__")):
        events = same(server, client, tools=tools, tool_choice={"type": "function", "name": name})
        (call,) = events[-1]["response"]["output"]
        assert (call["name"], call.get("namespace"), events[-3]["name"]) == ("pick", namespace, "pick")
    many = {"type": "namespace", "name": "many", "tools": [PICK | {"name": f"pick_{number}"} for number in range(200)]}
    assert len(ResponsesRequest(input="a", tools=[many]).chat().tools) == 200
    found = ResponsesRequest(input="a", tools=tools)
    assert [tool.function.name for tool in found.chat().tools] == ["pick", "mcp__idea__pick", "apply_patch"]
    asked = found.chat().tools[2].function
    assert "start: /a+/" in asked.description and [*asked.parameters["properties"]] == ["input"]
    request = ResponsesRequest(input="a", tools=tools, tool_choice={"type": "custom", "name": "apply_patch"})
    assert request.chat().tool_choice.function.name == "apply_patch"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "*** é"}', "*** é"),
        ('{"patch": "a"}', '{"patch": "a"}'),
        ('{"input": 1}', '{"input": 1}'),
        ("[", "["),
        ("[" * 99999,) * 2,
    ],
)
def test_a_custom_tool_gets_its_text(arguments, text):
    tool = {"type": "custom", "name": "apply_patch"}
    request = ResponsesRequest(input="a", tools=[{"type": "namespace", "name": "edit", "tools": [tool]}])
    answer = ResponsesAnswer.__new__(ResponsesAnswer)
    vars(answer).update(responses_request=request, output=[], number=0)
    call = {"id": "call_1", "function": {"name": "edit__apply_patch", "arguments": arguments}}
    events = [*answer.add_call(call)]
    for event in events:
        EVENT.validate_python(event)
    assert [event["type"] for event in events[1:3]] == [
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
    ]
    (item,) = answer.output
    assert (item["name"], item["namespace"], item["input"], events[1]["delta"]) == ("apply_patch", "edit", text, text)
    result = {"type": "custom_tool_call_output", "call_id": "call_1", "output": "Done."}
    called, returned = ResponsesRequest(input=[item, result]).chat().messages
    assert called.tool_calls[0]["function"] == {"name": "edit__apply_patch", "arguments": json.dumps({"input": text})}
    assert (returned.role, returned.content, returned.tool_call_id) == ("tool", "Done.", "call_1")


def test_items_of_one_answer_are_one_message(client):
    """Send reasoning, text and several calls; an answer after them is the next message."""
    calls = [{"type": "function_call", "call_id": key, "name": "pick", "arguments": "{}"} for key in "ab"]
    results = [
        {"type": "function_call_output", "call_id": "a", "output": "1"},
        {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "2"}]},
    ]
    text = {"type": "message", "id": "m", "status": "completed", "role": "assistant"}
    text["content"] = [{"type": "output_text", "text": "I pick.", "annotations": []}]
    thought = {
        "type": "reasoning",
        "id": "r",
        "summary": [{"type": "summary_text", "text": "hm"}],
        "encrypted_content": "x",
    }
    asked = [QUESTION, thought, text, *calls, *results, {"role": "assistant", "content": "Done."}, QUESTION]
    found = ask(client, input=asked, max_output_tokens=1)
    functions = [{"id": key, "type": "function", "function": {"name": "pick", "arguments": "{}"}} for key in "ab"]
    messages = [
        QUESTION,
        {"role": "assistant", "reasoning": "hm", "content": "I pick.", "tool_calls": functions},
        *({"role": "tool", "tool_call_id": key, "content": result} for key, result in (("a", "1"), ("b", "2"))),
        {"role": "assistant", "content": "Done."},
        QUESTION,
    ]
    chat = client.chat.completions.create(model="tiny", messages=messages, max_tokens=1)
    assert found.usage.input_tokens == chat.usage.prompt_tokens


def test_a_conversation_goes_on_after_tools_of_another_server():
    """Leave out the items of tools that are left out too."""
    found = {"type": "tool_search_output", "call_id": "1", "execution": "client", "tools": [PICK]}
    items = [QUESTION, {"type": "web_search_call", "id": "ws_1", "action": {"type": "search", "query": "a"}}]
    items += [{"type": "tool_search_call", "call_id": "1", "arguments": {}}, found, QUESTION]
    assert [message.role for message in ResponsesRequest(input=items).chat().messages] == ["user", "user"]


def test_a_response_may_repeat_what_utf_8_cannot_encode(server):
    """Send half a surrogate pair in a tool that the model does not learn of."""
    tool = PICK | {"description": "\ud83e"}
    asked = {"model": "tiny", "input": "a", "max_output_tokens": 1, "tools": [tool], "tool_choice": "none"}
    status, _, body = server.post(json.dumps(asked).encode(), "/v1/responses")
    assert status == 200 and json.loads(body)["tools"] == [tool]


def test_items_are_taken_as_clients_replay_them():
    """Send null fields, the reasoning of another server, refusals, and any result of a tool."""
    call = {"type": "function_call", "call_id": "1", "name": "pick", "arguments": None, "id": None, "status": None}
    outputs = [(None, ""), ({"é": 1}, '{"é": 1}'), ([1], "[1]"), ([{"type": "input_text", "text": "a"}], "a"), (3, "3")]
    items = [
        {"type": "function_call_output", "call_id": "0", "output": "early"},
        QUESTION,
        {"type": "reasoning", "id": "rs_1", "summary": None, "content": None, "encrypted_content": "x", "status": None},
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "No."}], "phase": None},
        call,
        *({"type": "function_call_output", "call_id": "1", "output": output} for output, _ in outputs),
        {"role": "user", "content": None},
    ]
    asked = ResponsesRequest(input=items, text={"format": None})
    found = asked.chat().messages
    assert [message.role for message in found] == ["tool", "user", "assistant", *["tool"] * 5, "user"]
    assert [content_text(message.role, message.content) or "" for message in found[2:]] == [
        "No.",
        *(text for _, text in outputs),
        "",
    ]
    assert found[2].tool_calls[0]["function"]["name"] == "pick" and not hasattr(found[2], "reasoning")


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_tools_that_are_not_allowed_are_left_out(mode):
    """Check both endpoints, and that a response repeats the choice and all tools."""
    tools = [PICK, PICK | {"name": "weigh"}]
    choice = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "weigh"}]}
    request = ResponsesRequest(input="a", tools=tools, tool_choice=choice)
    assert request.echo()["tool_choice"] == choice and len(request.echo()["tools"]) == 2
    named = [{"type": "function", "function": {"name": "weigh"}}]
    chat_tools = [{"type": "function", "function": {"name": name}} for name in ("pick", "weigh")]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}
    chat = ChatRequest(messages=[QUESTION], tools=chat_tools, tool_choice=choice)
    for found in (request.chat(), chat):
        assert [tool.function.name for tool in found.tools] == ["weigh"] and found.tool_choice == mode


@pytest.mark.parametrize(
    "settings, message, param",
    [
        (
            {"previous_response_id": "resp_1"},
            "previous_response_id is not supported here: responses are not stored",
            None,
        ),
        ({"conversation": "conv_1"}, "conversation is not supported", None),
        ({"background": True}, "background is not supported", None),
        ({"truncation": "auto"}, "truncation is not supported", None),
        ({"extra_body": {"n": 2}}, "n is not supported here: /v1/chat/completions", None),
        ({"extra_body": {"max_tokens": 2}}, "use max_output_tokens", None),
        ({"extra_body": {"guided_regex": "a"}}, "guided_regex is not supported here: use text.format; /v1/chat", None),
        ({"extra_body": {"typical_p": 0.5}}, "Unknown parameter: 'typical_p'", "typical_p"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "item 0 is an item_reference", "input"),
        (
            {"input": [QUESTION, {"type": "computer_call", "id": "cu_1"}]},
            "item 1 has type 'computer_call'",
            "input",
        ),
        (
            {"input": [{"type": ["message"], "role": "user", "content": "a"}]},
            "item 0 has type .*message.*, which is not supported",
            "input",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "parts of type input_image that are not text",
            ...,
        ),
        ({"input": []}, "at least 1 item", "input"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice required needs tools", None),
        ({"tools": [PICK], "tool_choice": {"type": "web_search"}}, "tool_choice", ...),
        ({"tools": [{"type": "function", "name": "a b"}]}, "match pattern", "tools.0.name"),
        ({"tools": [PICK, PICK]}, "two tools of one name", None),
        ({"tools": [{"type": "namespace", "name": "a b", "tools": [PICK]}]}, "tools.0.function.name: String", None),
        ({"reasoning": {"effort": "most"}}, "reasoning_effort: Input should be", None),
        ({"tools": [{"name": "pick"}]}, "type: Field required", "tools.0.type"),
        ({"tools": [{"type": "custom", "name": "a", "description": 5}]}, "description", "tools.0.description"),
        ({"tools": [{"type": "custom", "name": "a", "format": "text"}]}, "format", "tools.0.format"),
        ({"input": [CALL | {"namespace": 5}]}, "item 0 has namespace 5: send a text", "input"),
        ({"tool_choice": "required"}, "tool_choice required needs tools", None),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "a"}]}},
            "tool_choice names 'a', but tools contains none",
            None,
        ),
        ({"text": {"verbosity": "low"}}, "verbosity is not supported", None),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens"),
        ({"extra_body": {"min_tokens": 4}, "max_output_tokens": 3}, "more than max_tokens=3", None),
    ],
)
def test_what_needs_stored_state_or_is_not_done_is_refused_by_name(client, settings, message, param):
    for more in ({}, {"stream": True}):
        with pytest.raises(openai.BadRequestError, match=message) as caught:
            client.responses.create(**{"model": "tiny", "input": "a"} | more | settings)
        assert caught.value.type == "invalid_request_error" and param in (caught.value.param, ...)


def test_fields_that_change_nothing_are_taken(client, model):
    """Check also that `store: false` keeps a response out of the log, and that none of them is in it otherwise."""
    log = model.parent / "accepted.jsonl"
    harmless = {
        "truncation": "disabled",
        "background": False,
        "previous_response_id": "",
        "context_management": [],
        "include": ["reasoning.encrypted_content"],
        "metadata": {},
    }
    asked = {"max_output_tokens": 1, "user": "me", "service_tier": "auto", **harmless}
    counts = []
    for store in (True, False):
        found = ask(client, **asked, store=store, text={"format": {"type": "text"}, "verbosity": "medium"})
        assert found.store is False and found.error is None and found.output_text is not None
        counts.append(len(log.read_text().splitlines()))
    assert counts[0] == counts[1] > 0


def test_a_failure_is_the_last_event(model, tmp_path):
    """Use an engine that meets a bug with prompts that start as this template's do."""
    with served(tmp_path, *on_cpu(model), "drafter=none", program="tests/support/broken_server.py") as running:
        events = stream(running)
        failed = events[-1]["response"]
        assert [event["type"] for event in events[1:]] == ["response.in_progress", "response.failed"]
        assert failed["status"] == "failed" and failed["error"]["code"] == "server_error" and failed["usage"] is None
        with pytest.raises(openai.InternalServerError, match="decoding this request failed"):
            running.client().responses.create(model="tiny", input="a")
