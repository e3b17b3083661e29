"""ChatOpenAI against a server: answers, streams, structured output and a loop of tools, by both APIs. Runs in the environment
of scripts/clients_env.sh:

python langchain_client.py URL
"""

import sys
from typing import Literal

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

STOP = ["(", "."]  # a small model ends no answer; calls of `pick` contain neither


class Choice(BaseModel):
    kind: Literal["alpha", "beta"]


@tool
def pick(kind: Literal["alpha", "beta"]) -> str:
    """Pick one of both."""
    return f"{kind} was picked"


def check(url: str, responses: bool) -> None:
    seed = {"seed": 1} if not responses else {"extra_body": {"seed": 1, "stop": STOP}}
    stop = {} if responses else {"stop": STOP}
    model = ChatOpenAI(
        base_url=f"{url}/v1", api_key="none", model="tiny", use_responses_api=responses, max_tokens=200, **seed
    )
    whole = model.invoke("def add(self, other):", **stop)
    parts = [*model.stream("def add(self, other):", **stop)]
    assert whole.text and "".join(part.text for part in parts) == whole.text, (whole, parts)
    assert whole.usage_metadata["output_tokens"] > 0 and len(parts) > 1
    assert model.with_structured_output(Choice).invoke("a").kind in ("alpha", "beta")

    forced, free = (model.bind_tools([pick], strict=True, **more) for more in ({"tool_choice": "pick"}, {}))
    messages = [HumanMessage("Pick one, and say which.")]
    for _ in range(3):
        answer = forced.invoke(messages)
        (call,) = answer.tool_calls
        assert call["name"] == "pick" and call["args"]["kind"] in ("alpha", "beta")
        messages += [answer, pick.invoke(call)]
        assert isinstance(messages[-1], ToolMessage) and messages[-1].content.endswith("was picked")
    streamed, *rest = forced.stream(messages)
    for part in rest:
        streamed += part
    assert streamed.tool_calls[0]["args"]["kind"] in ("alpha", "beta")
    last = free.invoke(messages, **stop)
    assert isinstance(last, AIMessage) and last.text and not last.tool_calls, last
    print("responses" if responses else "chat", repr(last.text))


check(sys.argv[1], False)
check(sys.argv[1], True)
