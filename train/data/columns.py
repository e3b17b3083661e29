"""What a row's columns say: where its turns are, and which of its answers are learned. What a turn says is for layouts.py.

A row has its turns in a list, or a prompt and a response in columns; it may have a system prompt, tools and weights in
others.
"""

from typing import Any

from foredraft.train.data.layouts import (
    IMAGES,
    LEARNED,
    ROLES,
    THOUGHTS,
    Message,
    SkippedRow,
    content,
    listed,
    not_learned,
    parsed,
    parsed_list,
    role_of,
    tools,
    turns,
    unicode,
)

# Tried in this order, so a set with both `prompt` and `messages` (UltraChat-200k) is read from `messages`.
LISTS = ("messages", "conversations", "conversation", "turns", "data")
PROMPTS = ("prompt", "question", "instruction", "problem", "query", "input")
# A worked solution before the bare answer that it ends with (MATH, NuminaMath).
RESPONSES = ("response", "solution", "answer", "output", "completion", "answers", "chosen")
TEXTS = ("text", "content", "code")
SYSTEMS = ("system", "system_prompt", "system_message")
OF_ROWS = tuple(name for name in LEARNED if name != "loss")  # a row's loss may be a number that somebody measured
TOOLS = ("tools", "functions", "tool_defs", "available_tools")  # the last two are those of verifiers and Toucan
# A request and its answer, as batch files, preferences of OpenAI, loggers and Open WebUI nest them.
REQUESTS = ("body", "request", "request_body", "inputs", "input", "chat")
ANSWERS = ("preferred_output", "preferred_completion", "response", "response_body", "outputs", "output")
OF_TOKENS = ("assistant_mask", "assistant_masks", "completion_mask")


def pick(row: dict, named: str | None, usual: tuple[str, ...]) -> str | None:
    """Return the column of this name, or the first of the usual ones, those that hold something before empty ones."""
    if named is not None:
        return named if named in row else None
    there = [name for name in usual if name in row]
    return next((name for name in there if row[name]), there[0] if there else None)


def cells(row: dict) -> dict[str, Any]:
    """Return the columns that hold something."""
    return {name: cell for name, cell in row.items() if cell is not None}


def unwrapped(row: dict) -> dict[str, Any]:
    """Return the row with the columns of the request in it, unless it has messages itself, and with the answer to them as the
    column `chosen`."""
    nested = () if row.get("messages") else (row[name] for name in REQUESTS if isinstance(row.get(name), dict))
    request = next((cells(inner) for inner in nested if inner.get("messages")), {})
    if not (request or row.get("messages")):
        return row
    answers = [*(row.get(name) for name in ANSWERS), {"choices": row.get("choices")}]
    said = next(filter(None, map(said_in, answers)), None)
    return row | request | ({"chosen": said} if said and not row.get("chosen") else {})


def said_in(answer: Any) -> list | None:
    """Return the messages of a completion (its first choice) or of a list; None for other values."""
    answer = parsed(answer)
    answer = answer.get("body", answer) if isinstance(answer, dict) else answer
    choices = answer.get("choices") if isinstance(answer, dict) else None
    first = choices[0] if isinstance(choices, list) and choices else None
    if isinstance(first, dict) and isinstance(first.get("message"), dict):
        answer = first["message"] | {"finish_reason": first.get("finish_reason")}
    elif isinstance(answer, dict) and role_of(answer) is None:
        answer = answer.get("messages")
    found = listed(answer)
    return found if isinstance(found, list) and found and isinstance(found[0], dict) and role_of(found[0]) else None


def system(row: dict) -> list[Message]:
    """Return the system prompt that a row has in a separate column."""
    given = [{"role": "system", "content": row[name]} for name in SYSTEMS if row.get(name)]
    return turns(given)[:1] if given else []


def pair(row: dict, prompt: str, response: str | None, images: list | None = None) -> list[Message]:
    """Return a prompt and its answer; either may be a list of messages (TRL's layout). Without an answer only the prompt.
    images: as in layouts.turns."""
    question, answer = listed(row[prompt]), listed(None if response is None else row[response])
    answer = first(parsed(answer) if response == "answers" else answer)
    inputs = (row.get(name) for name in ("input", "context"))
    more = next((text for text in inputs if isinstance(text, str) and text.strip()), "")
    asked = question if isinstance(question, list) else [{"role": "user", "content": question}]
    alternate = answer is not None and len(asked) % 2 == 1
    messages = turns(asked, all_user=not alternate, images=images)  # MT-Bench and arenas have the user's alone
    if prompt in ("instruction", "question") and more and len(messages) == 1:  # Alpaca, Dolly
        more, said = "\n\n" + content(more), messages[0]["content"]
        messages[0]["content"] = said + more if isinstance(said, str) else [*said, {"type": "text", "text": more}]
    messages = earlier(row) + messages
    if answer is None:
        return messages
    facts = {name: row[name] for name in (*THOUGHTS, "tool_calls") if name in row}
    if isinstance(answer, list) and all(isinstance(call, dict) and "name" in call for call in answer):  # xLAM
        facts, answer = facts | {"tool_calls": answer}, ""
    said = turns(answer if isinstance(answer, list) else [facts | {"role": "assistant", "content": answer}])
    return joined(messages, said)


def joined(messages: list[Message], said: list[Message]) -> list[Message]:
    """Return the messages and what was said next, unless that repeats them."""
    return said if said and said[0]["role"] in ("system", "user") else messages + said


def earlier(row: dict) -> list[Message]:
    """Return the turns before a row's prompt, pairs of a question and its answer (LLaMA-Factory, ms-swift)."""
    history = parsed_list(row.get("history"))
    if not history or not isinstance(history, list):
        return []
    paired = all(isinstance(item, list) and len(item) == 2 for item in history)
    return turns([text for item in history for text in item] if paired else history)


def first(answer: Any) -> Any:
    """Return an answer, or the first one of alternatives (NQ, TriviaQA, SQuAD)."""
    if isinstance(answer, dict):
        answer = answer.get("value") or answer.get("text") or answer
    texts = isinstance(answer, list) and all(isinstance(text, str) for text in answer)
    return next((text for text in answer if text.strip()), "") if texts else answer


def weighted(messages: list[Message], row: dict) -> list[Message]:
    """Return the messages, with a weight of 0 at answers that the row says are not learned: all of them, or by a list with
    a place for each message or each answer. Raises SkippedRow for another list."""
    answers = [message for message in messages if message["role"] == "assistant"]
    # False is TRL's and LLaMA-Factory's label of a rejected answer; a number is a class as a rule.
    labelled = "completion" in row or isinstance(row.get("label"), bool)
    if not_learned(row, (*OF_ROWS, "kto_tag", *(["label"] if labelled else []))):
        for message in answers:
            message["weight"] = 0
    for name in ("weights", *OF_ROWS):
        if not isinstance(weights := parsed(row.get(name)), list):
            continue
        places = next((places for places in (messages, answers) if len(weights) == len(places)), None)
        if places is None:
            raise SkippedRow(f"{name} for neither each message nor each answer")
        for message, weight in zip(places, weights, strict=True):
            if not_learned({name: weight}, (name,)) and message["role"] == "assistant":
                message["weight"] = 0
    return messages


def raw_text(row: dict, column: str) -> str:
    """Return a text that is learned whole. Raises SkippedRow for a part of a conversation."""
    text = row[column]
    if not isinstance(text, str) or not text.strip():
        raise SkippedRow("no text in it")
    if role_of(row) in ROLES or row.get("reasoning_content"):
        raise SkippedRow("a message without its conversation")  # OpenAssistant's rows
    if not_learned(row, OF_ROWS):
        raise SkippedRow("the row says that it is not learned")
    if any(isinstance(parsed(row.get(name)), list) for name in (*OF_ROWS, *OF_TOKENS)):
        raise SkippedRow("a mask of tokens, which another tokenizer made")
    return unicode(text)


def declared(row: dict, messages: str | None = None) -> list[dict] | None:
    """Return the functions that a row declares, in a column or in its first message. messages: its column, if named."""
    row = cells(row)
    column = pick(row, messages, LISTS)
    items = parsed(row[column]) if column else None
    begins = items[0] if isinstance(items, list) and items and isinstance(items[0], dict) else {}
    places = (holder[name] for holder in (row, begins) for name in TOOLS if holder.get(name))
    return next(filter(None, map(tools, places)), None)


def template_options(row: dict) -> dict[str, Any]:
    """Return the variables of the chat template that a row sets (TRL, SmolTalk2)."""
    found = parsed(row.get("chat_template_kwargs"))
    return {name: value for name, value in found.items() if value is not None} if isinstance(found, dict) else {}


def cut_off(messages: list[Message], reasons: Any) -> list[Message]:
    """Return the messages, with `finish_reason` at answers that ended at a limit. reasons: as regeneration writes them, for
    the answers that are learned."""
    answers = [message for message in messages if message["role"] == "assistant" and message.get("weight") != 0]
    if isinstance(reasons, list) and len(reasons) == len(answers):
        for message, reason in zip(answers, reasons, strict=True):
            if reason == "length":
                message["finish_reason"] = reason
    return messages


def has_images(row: dict, messages: str | None) -> bool:
    """Return whether a row has images, next to its turns or in them. messages: its column of turns, if that is named."""
    column = pick(row, messages, LISTS)
    turns = row[column] if column and isinstance(row[column], list) else []
    contents = [turn.get("content") for turn in turns if isinstance(turn, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    inside = any(isinstance(part, dict) and part.get("type") in IMAGES for part in parts)
    return inside or bool(row.get("images") or row.get("image"))
