"""Tools of the Responses API, all of them as functions, the only tools that models call.

Agents such as Codex send tools of many types in each request. A namespace (an MCP server) contains functions, which get its
name before theirs. A custom tool takes a text, so it becomes a function with one text. Tools of other types, such as
web_search, are left out: the model does not learn of them.
"""

import json
from typing import Any, Literal

from foredraft.inference.serve.openai.protocol import Function

INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
CALLED = ("function", "custom")  # types of tools that a client executes


def joined_name(namespace: str | None, name: str) -> str:
    """Return the name by which a model calls a tool. MCP's namespaces end with the separator."""
    return name if namespace is None else f"{namespace.removesuffix('__')}__{name}"


class ResponsesTool(Function):
    type: Literal["function", "custom"]
    namespace: str | None = None
    description: str | None = None
    format: dict[str, Any] | None = None

    @property
    def full_name(self) -> str:
        return joined_name(self.namespace, self.name)

    def as_function(self) -> dict[str, Any]:
        """Return it as a chat template gets it."""
        facts = self.model_dump(exclude={"type", "namespace", "format"}, exclude_unset=True) | {"name": self.full_name}
        if self.type == "custom":
            grammar = (self.format or {}).get("definition")
            told = [self.description, f"The input follows this grammar:\n{grammar}" if grammar else None]
            facts |= {"description": "\n\n".join(filter(None, told)), "parameters": INPUT}
        return facts

    def item(self, call: dict[str, Any]) -> tuple[dict[str, Any], str, str]:
        """Return the item of a call without its text, the text's field, and the text."""
        facts: dict[str, Any] = {"call_id": call["id"], "name": self.name}
        facts |= {} if self.namespace is None else {"namespace": self.namespace}
        text = call["function"]["arguments"]
        if self.type == "function":
            return {"type": "function_call", "status": "in_progress", **facts}, "arguments", text
        return {"type": "custom_tool_call", **facts}, "input", text_of(text)


def text_of(arguments: str) -> str:
    """Return the text of a custom tool from a model's call, or all of its arguments if they are others."""
    try:
        text = json.loads(arguments)["input"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return arguments
    return text if isinstance(text, str) else arguments


def offered(tools: Any) -> Any:
    """Return the tools of a request that a client executes, those of namespaces among the others."""
    found = []
    for tool in tools if isinstance(tools, list) else []:
        if not isinstance(tool, dict) or not isinstance(tool.get("type"), str) or tool["type"] in CALLED:
            found.append(tool)
        elif tool["type"] == "namespace":
            inner = offered(tool.get("tools") or [])
            found += [one | {"namespace": tool.get("name")} if isinstance(one, dict) else one for one in inner]
    return found if isinstance(tools, list) else tools


def as_call(item: dict[str, Any]) -> dict[str, Any]:
    """Convert an item of an earlier call to a call of a chat's message."""
    arguments = item.get("arguments") if item["type"] == "function_call" else json.dumps({"input": item["input"]})
    function = {"name": joined_name(item.get("namespace"), item["name"]), "arguments": arguments}
    return {"id": item["call_id"], "type": "function", "function": function}
