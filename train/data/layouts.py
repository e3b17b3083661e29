"""What a list of turns says: a conversation, in one of the layouts that data sets have, or why it is none.

A conversation is a list of {"role", "content"} with roles system, user, assistant, tool; an answer may also have
`reasoning_content` (its reasoning), `tool_calls` (OpenAI's, with arguments as an object) and `finish_reason`. It is found in
ShareGPT's, UltraChat's and OpenAI's layouts, and in pairs of a prompt and a response. For a target that takes images, a turn
with images has a list of parts as its content, {"type": "text", "text"} and {"type": "image", "image"}, where `image` is a
place as heads.target_model.images.open_image takes it.
"""

import ast
import base64
import io
import json
import re
import warnings
from itertools import chain
from typing import Any

from foredraft.heads.target_model.messages import take_reasoning

Message = dict[str, Any]

CALLS = ("function_call", "tool_call", "tool_calls")  # roles of an answer that is a call, written as JSON
NAMES = {
    "system": "system developer",
    "user": "user human prompter",
    "assistant": "assistant gpt gpt4 gpt_4 chatgpt bing bard claude gemini model bot chatbot ai " + " ".join(CALLS),
    "tool": "tool observation environment function ipython tool_response tool_result tool_results tool_output "
    "function_response function_result function_observation",
}
ROLES = {name: role for role, names in NAMES.items() for name in names.split()}
# Whether a message is learned, as OpenAI, axolotl, tinker, AgentInstruct and ms-swift name it: 0 or false if it is not.
LEARNED = ("weight", "train", "train_turn", "training", "trainable", "loss", "loss_scale", "loss_mask", "mask")

# A model's reasoning, as engines, templates and data sets call them (DeepSeek and Qwen, vLLM, gpt-oss).
THOUGHTS = ("reasoning_content", "reasoning", "thinking", "thoughts")
ARGUMENTS = ("arguments", "parameters", "args")  # of a call: OpenAI's, Llama's and LangChain's
LANGCHAIN = ("human", "ai", "system", "tool")  # its types of messages
IMAGES = ("image", "image_url", "input_image")
# A question and its answer in one item of a list of turns.
PAIRS = (
    ("input", "output"),
    ("human", "assistant"),
    ("user", "assistant"),
    ("question", "answer"),
    ("prompt", "response"),
)
LONGEST_PATH = 4096  # characters; what is longer are the bytes of an image
LIST = re.compile(r"\s*\[\s*[\[{'\"]")  # of objects, lists or texts
IN_TEXT = re.compile(r"\s*(?:<think>)?(.*?)</think>(.*)", re.DOTALL)  # a generation prompt may hold the first tag


class SkippedRow(ValueError):
    """Carry why a row is not used: a reason to count by."""


def listed(value: Any) -> Any:
    """Return messages that are written as JSON or Python, or that `datasets` holds by column, and one by itself, as a list of
    messages; other values unchanged."""
    found = parsed_list(value) if isinstance(value, str) and value.lstrip().startswith("[") else value
    if isinstance(found, dict) and found and all(isinstance(cells, list) for cells in found.values()):
        found = [dict(zip(found, cells, strict=False)) for cells in zip(*found.values(), strict=False)]
    found = [found] if isinstance(found, dict) else found
    found = [parsed(item) for item in found] if isinstance(found, list) else found
    known = isinstance(found, list) and all(isinstance(item, dict) and role_of(item) in ROLES for item in found)
    return found if known and found else value


def role_of(item: dict) -> str | None:
    """Return the name that a message gives its role, as it stands in ROLES if it is known; None if it has none."""
    named = next((item[name] for name in ("role", "from") if isinstance(item.get(name), str)), None)
    named = item["type"] if named is None and "content" in item and item.get("type") in LANGCHAIN else named
    return None if named is None else re.sub(r"[\s-]+", "_", named.strip().lower())


def has_system(messages: list[Message]) -> bool:
    return bool(messages) and messages[0]["role"] == "system"


def turns(items: list, all_user: bool = False, images: list | None = None) -> list[Message]:
    """Return a row's turns. all_user: plain strings are all the user's; else they alternate, the user first. images: those
    that the row has next to its turns, for turns that only mark their place, or else for the first question (TRL); None
    leaves images out."""
    if not items:
        raise SkippedRow("a conversation without a turn")
    messages: list[Message] = []
    count = len(images or [])
    for number, item in enumerate(chain.from_iterable(map(unpaired, items))):
        if isinstance(item, str):
            item = {"role": "user" if all_user or number % 2 == 0 else "assistant", "content": item}
        if not isinstance(item, dict):
            raise SkippedRow("a turn that is neither text nor a message")
        named = role_of(item)
        role = ROLES.get(named) if named is not None else None
        if role is None:
            raise SkippedRow(
                f"the role {named[:40]!r}, which is not known" if named is not None else "a turn without a role"
            )
        text = next((item[name] for name in ("content", "value", "text") if item.get(name) is not None), None)
        if role == "system" and is_blank(text):
            continue
        message: Message = {"role": role}
        if role == "assistant":
            in_parts, text = take_reasoning(text)
            by_name = (item[name] for name in THOUGHTS if isinstance(item.get(name), str))
            # Nemotron has `reasoning` as a switch.
            reasoning = next((text for text in by_name if text.lower() not in ("on", "off")), "") or in_parts
            message |= {"reasoning_content": unicode(reasoning)} if reasoning.strip() else {}
            calls = item.get("tool_calls") or item.get("function_call")
            calls = text or calls or item if named in CALLS else calls
            message |= {"tool_calls": tool_calls(calls)} if calls else {}
            text = None if named in CALLS else text
            message |= {"weight": 0} if not_learned(item, LEARNED) else {}
            message |= {"finish_reason": "length"} if item.get("finish_reason") == "length" else {}
            if item.get("train_detail"):  # axolotl's
                raise SkippedRow("an answer of which only parts are learned (train_detail)")
        elif role == "tool":
            names = ("tool_call_id", "name")
            message |= {name: str(item[name]) for name in names if isinstance(item.get(name), str | int)}
            text = text if text is None or is_text(text) else json.dumps(text, ensure_ascii=False)
        # An answer may be only reasoning that was cut off, or a call, and is not needed by regeneration. A tool may print a
        # line break.
        pictured = None if images is None or role != "user" else parts(text, images)
        nothing = is_blank(text) and role in ("tool", "assistant")
        kept = text if isinstance(text, str) else ""
        message["content"] = pictured or (unicode(kept) if nothing else content(text))
        # Reasoning before a call comes after the text before it, so that is another answer.
        if named in CALLS and messages and messages[-1]["role"] == "assistant" and "reasoning_content" not in message:
            message["continues"] = True
        messages.append(message)
    shown = [part for message in messages if isinstance(message["content"], list) for part in message["content"]]
    # Another image may be inside of a part.
    if images and 0 < count - len(images) == sum(part["type"] == "image" for part in shown):
        raise SkippedRow("more images than places for them")
    asked = next((message for message in messages if message["role"] == "user"), None)
    if images and asked and all(isinstance(message["content"], str) for message in messages):
        text = [{"type": "text", "text": asked["content"]}]
        asked["content"] = [{"type": "image", "image": place({}, images)} for _ in range(count)] + text
    return messages


def whole_answers(messages: list[Message]) -> list[Message]:
    """Return the messages with a text and the calls that follow it as one answer: ms-swift writes them as several turns."""
    found: list[Message] = []
    for message in messages:
        if message.pop("continues", False):
            text = found.pop()
            calls = [*text.get("tool_calls", []), *message["tool_calls"]]
            message = text | message | {"content": text["content"], "tool_calls": calls}
        found.append(message)
    return found


def is_blank(text: Any) -> bool:
    if isinstance(text, list):
        return all(
            isinstance(part, dict) and part.get("type") == "text" and is_blank(part.get("text")) for part in text
        )
    return not (text.strip() if isinstance(text, str) else text)


def check_answers(messages: list[Message]) -> None:
    """Raise SkippedRow if an answer has neither text nor reasoning nor calls."""
    for message in messages:
        if message["role"] == "assistant" and not message.keys() & {"reasoning_content", "tool_calls"}:
            content(message["content"])


def unpaired(item: Any) -> list[Any]:
    """Return the two turns of an item that holds a question and its answer (Capybara), or the item."""
    if isinstance(item, dict) and not item.keys() & {"role", "from"}:
        for asked, answer in PAIRS:
            if asked in item and answer in item:
                return [{"role": "user", "content": item[asked]}, {"role": "assistant", "content": item[answer]}]
    return [item]


def not_learned(item: dict, names: tuple[str, ...]) -> bool:
    """Return whether a message or a row is marked as not learned. CSV and some JSON have numbers and truth values as text."""
    found = [parsed(value.lower()) if isinstance(value := item.get(name), str) else value for name in names]
    return any(isinstance(value, bool | int | float) and value <= 0 for value in found)


def split_reasoning(message: Message) -> Message:
    """Separate reasoning in an answer's content, <think>so</think>, from its text."""
    found = IN_TEXT.fullmatch(message["content"] or "")
    if found is None or "reasoning_content" in message:
        return message
    thoughts, text = found[1].strip("\n"), found[2].lstrip("\n")
    return message | {"content": text} | ({"reasoning_content": thoughts} if thoughts.strip() else {})


def tool_calls(calls: Any) -> list[dict]:
    """Return OpenAI's tool calls, with arguments as templates want them: an object, which data sets write as JSON."""
    found, calls = [], parsed(calls)
    for call in calls if isinstance(calls, list) else [calls]:
        call = parsed(call)
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise SkippedRow("a tool call without a name")
        arguments: Any = next((function[name] for name in ARGUMENTS if function.get(name)), {})
        identity = {"id": str(call["id"])} if isinstance(call.get("id"), str | int) else {}
        function = {"name": function["name"], "arguments": parsed(arguments)}
        found.append({"type": "function", **identity, "function": function})
    return found


def tools(column: Any) -> list[dict] | None:
    """Return the functions that a row's `tools` column declares, in OpenAI's layout; None if there are none. Raise SkippedRow
    for what is not a list of functions."""
    column = parsed_list(column)
    if not column:
        return None
    found = [parsed(tool) for tool in (column if isinstance(column, list) else [column])]
    functions = [tool.get("function", tool) if isinstance(tool, dict) else None for tool in found]
    if not all(isinstance(function, dict) and isinstance(function.get("name"), str) for function in functions):
        raise SkippedRow("tools that are not functions with a name")
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in found]


def parsed(value: Any) -> Any:
    """Parse JSON that a data set holds as text; other text stays text."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def parsed_list(value: Any) -> Any:
    """Parse a list that a data set holds as JSON, or as Python writes it: pandas does so in CSV. Other text stays text, and
    so do lists of what JSON does not have, such as bytes and sets."""
    found = parsed(value)
    if not (isinstance(found, str) and LIST.match(found)):
        return found
    try:
        with warnings.catch_warnings(action="ignore"):  # of escapes that Python does not have
            return json.loads(json.dumps(ast.literal_eval(found.strip())))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return found


def parts(value: Any, images: list) -> list[dict] | None:
    """Return the parts of a turn with images, of OpenAI's and transformers' spellings, or of a text with LLaVA's <image>;
    None for a turn without images. Take from `images` what the parts do not hold themselves."""
    if isinstance(value, str) and images and "<image>" in value:
        texts = [{"type": "text", "text": text} for text in value.split("<image>")]
        value = [part for text in texts for part in ({"type": "image"}, text)][1:]
    if not isinstance(value, list) or not any(isinstance(part, dict) and part.get("type") in IMAGES for part in value):
        return None
    found: list[dict] = []
    for part in value:
        if isinstance(part, dict) and part.get("type") in IMAGES:
            found.append({"type": "image", "image": place(part, images)})
        elif isinstance(part, dict) and isinstance(part.get("text"), str):
            found += [{"type": "text", "text": unicode(part["text"])}] if part["text"] else []
        else:
            raise SkippedRow("a part of a turn that is neither text nor an image")
    return found


def place(part: dict, images: list) -> str:
    """Return where the image of this part is."""
    named = next((name for name in ("image", "image_url", "url", "path", "base64") if part.get(name)), None)
    if named is None and not images:
        raise SkippedRow("an image of which nothing says where it is")
    value = images.pop(0) if named is None else part[named]
    if type(value).__module__.startswith("PIL."):  # as `datasets` reads the Hub's
        buffer = io.BytesIO()
        value.convert("RGB").save(buffer, "PNG")
        value = {"bytes": buffer.getvalue()}
    if isinstance(value, dict):  # OpenAI's, or of a Parquet file of images
        data = value.get("bytes")
        value = value.get("url") or value.get("path") if data is None else base64.b64encode(data).decode()
        named = named if data is None else "base64"
    if not isinstance(value, str) or value.startswith(("http://", "https://")):
        raise SkippedRow("an image that is not on this machine")  # which training would fetch in every epoch
    bare = named == "base64" or len(value) > LONGEST_PATH
    return f"data:image;base64,{value}" if bare and not value.startswith("data:") else value


def content(value: Any) -> str:
    """Return the text, or the text among OpenAI's list of parts (nothing of an image, say)."""
    if isinstance(value, list):
        texts = [part for part in value if not (isinstance(part, dict) and part.get("type") in IMAGES)]
        if texts and not is_text(texts):
            raise SkippedRow("a part of a turn that is neither text nor an image")
        value = "".join(part["text"] for part in texts) if texts else value
    if value is None or (isinstance(value, str) and not value.strip()):
        raise SkippedRow("an empty turn")
    if not isinstance(value, str):
        raise SkippedRow("a turn that is not text")
    return unicode(value)


def is_text(value: Any) -> bool:
    """Return whether it is a text, or a list of parts with text."""
    if isinstance(value, list):
        return all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in value)
    return isinstance(value, str)


def unicode(text: str) -> str:
    """Return the text. Raises SkippedRow for half a character (a lone surrogate), which JSON may spell and no tokenizer
    takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise SkippedRow("half a character (a lone surrogate)") from None
    return text
