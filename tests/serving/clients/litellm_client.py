"""litellm against a server: chats, completions, streams, JSON of a schema, a loop of tools, and the Responses API. Runs in
its environment of scripts/clients_env.sh:

python litellm_client.py URL
"""

import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # the list of prices that it ships, not the one that it would fetch
import litellm

MESSAGES = [{"role": "user", "content": "def add(self, other):"}]
SCHEMA = {"type": "object", "properties": {"kind": {"enum": ["alpha", "beta"]}}, "required": ["kind"]}
SCHEMA["additionalProperties"] = False
PICK = {"type": "function", "function": {"name": "pick", "parameters": SCHEMA}}
FACTS = {"model": "openai/tiny", "api_base": f"{sys.argv[1]}/v1", "api_key": "none", "seed": 1}

whole = litellm.completion(**FACTS, messages=MESSAGES, max_tokens=20)
parts = [
    *litellm.completion(**FACTS, messages=MESSAGES, max_tokens=20, stream=True, stream_options={"include_usage": True})
]
text = whole.choices[0].message.content
assert text and "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == text
assert whole.usage.completion_tokens == parts[-1].usage.completion_tokens == 20

written = litellm.text_completion(**FACTS | {"model": "text-completion-openai/tiny"}, prompt="def add(", max_tokens=8)
assert written.choices[0].text and written.usage.completion_tokens == 8

wanted = {"type": "json_schema", "json_schema": {"name": "choice", "strict": True, "schema": SCHEMA}}
chosen = litellm.completion(**FACTS, messages=MESSAGES, response_format=wanted, max_tokens=100)
assert json.loads(chosen.choices[0].message.content)["kind"] in ("alpha", "beta")

messages, forced = [*MESSAGES], {"tools": [PICK], "tool_choice": "required", "parallel_tool_calls": False}
for _ in range(3):
    message = litellm.completion(**FACTS, messages=messages, **forced).choices[0].message
    (call,) = message.tool_calls
    assert json.loads(call.function.arguments)["kind"] in ("alpha", "beta")
    messages += [message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "picked"}]
last = litellm.completion(**FACTS, messages=messages, tools=[PICK], max_tokens=20).choices[0]
assert last.message.content and not last.message.tool_calls

# litellm leaves out a seed that is not in extra_body: OpenAI's Responses API has none.
again = FACTS | {"seed": None, "extra_body": {"seed": 1}, "input": "def add(self, other):", "max_output_tokens": 20}
response = litellm.responses(**again)
assert response.output[0].content[0].text == text and response.usage.output_tokens == 20
events = [*litellm.responses(**again, stream=True)]
assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == text
assert events[-1].response.output[0].content[0].text == text
print(repr(text), repr(last.message.content))
