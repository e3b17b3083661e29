"""openai-agents against a server, by the Responses API (its default) and by chat completions: an agent calls a tool and
answers with its result, also in a stream, and another one gives an object. Runs in the environment of scripts/clients_env.sh:

python agents_client.py URL
"""

import asyncio
import sys
from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    Runner,
    function_tool,
    set_default_openai_api,
    set_default_openai_client,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

picked: list[str] = []


class Choice(BaseModel):
    kind: Literal["alpha", "beta"]


@function_tool
def pick(kind: Literal["alpha", "beta"]) -> str:
    """Pick one of both."""
    picked.append(kind)
    return f"{kind} was picked"


def kinds(result) -> list[str]:
    return [item.type for item in result.new_items]


async def check() -> None:
    # A small model ends no answer; calls of `pick` contain neither of these.
    more = {"seed": 1, "stop": ["(", "."]}
    settings = ModelSettings(tool_choice="required", parallel_tool_calls=False, max_tokens=300, extra_body=more)
    agent = Agent("picker", "Pick one, and say which.", tools=[pick], model="tiny", model_settings=settings)
    result = await Runner.run(agent, "Go on.")
    assert kinds(result) == ["tool_call_item", "tool_call_output_item", "message_output_item"], kinds(result)
    assert picked.pop() in ("alpha", "beta") and isinstance(result.final_output, str) and result.final_output
    assert result.context_wrapper.usage.requests == 2 and result.context_wrapper.usage.output_tokens > 0

    again = await Runner.run(agent, [*result.to_input_list(), {"role": "user", "content": "Once more."}])
    assert kinds(again) == kinds(result) and picked.pop()

    streamed = Runner.run_streamed(agent, "Go on.")
    deltas = ""
    async for event in streamed.stream_events():
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
            deltas += event.data.delta
    assert deltas == streamed.final_output == result.final_output and kinds(streamed) == kinds(result) and picked.pop()

    typed = Agent("chooser", model="tiny", output_type=Choice, model_settings=ModelSettings(extra_body={"seed": 1}))
    assert (await Runner.run(typed, "a")).final_output.kind in ("alpha", "beta")
    print(repr(result.final_output))


async def main() -> None:
    set_default_openai_client(AsyncOpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none"))
    set_tracing_disabled(True)
    for api in ("responses", "chat_completions"):
        set_default_openai_api(api)
        await check()


asyncio.run(main())
