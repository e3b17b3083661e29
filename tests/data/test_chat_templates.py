"""The chat templates of real models: what is in the loss is exactly what the model wrote, found here by hand.

Once from messages, through the template, and once from what an engine gave: token ids, and messages as its parsers split
them.
The conversations are ours. What an answer wrote is all that the model emits after its generation prompt: reasoning, the
answer or a tool call, and the token that ends its turn.
"""

import asyncio
import json
from datetime import date
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from openai.types.chat import ChatCompletion

from foredraft.inference.serve.openai.prompts import PromptEncoder
from foredraft.inference.serve.openai.protocol import ChatRequest
from foredraft.scripts.preview import runs
from foredraft.train.data.chat_template import ChatFormat
from foredraft.train.data.encoding import Encoder
from foredraft.train.data.layouts import SkippedRow, split_reasoning
from foredraft.train.data.sources import Row, Source
from foredraft.train.writing.regeneration import GenerationSettings, Regeneration, questions
from foredraft.train.writing.writers import Server
from tests.support.chats import CONVERSATIONS, MODELS, TOOL, form_of, wrote

PLAIN = MODELS["smollm2"].wrote  # which has no reasoning
CASES = [(name, conversation) for name, model in MODELS.items() for conversation in model.wrote]


def learned(form: ChatFormat, documents: list) -> list[str]:
    """Return each stretch of tokens in the loss, as text."""
    return [text for document in documents for flag, text in runs(form.tokenizer, document) if flag]


def begins(documents: list) -> list[list[int]]:
    """Return the tokens before each stretch in the loss: the prompts behind which it was written."""
    return [tokens[:at] for tokens, mask, _ in documents for at in range(1, len(mask)) if mask[at] and not mask[at - 1]]


def served(form: ChatFormat, messages: list[dict], with_tools: bool) -> list[list[int]]:
    """Return the prompts that the server gives the target: with thinking at its default, on and off."""
    target: Any = SimpleNamespace(text_tokenizer=form.tokenizer, context=None, name="x")
    said = json.dumps({"messages": messages} | ({"tools": [TOOL]} if with_tools else {}))
    switches = [{}, *({"enable_thinking": value, "thinking": value} for value in (True, False))]
    requests = [ChatRequest.model_validate(json.loads(said) | {"chat_template_kwargs": one}) for one in switches]
    return [tokens for request in requests for tokens in PromptEncoder(target).chat(request)]


def rows_of(model: str, value: dict, **settings) -> tuple[ChatFormat, list]:
    """Return a sample's documents, as training reads them."""
    form = form_of(model)
    return form, Encoder(form.tokenizer, Source("x"), **settings).documents(Row("", value))[0]


@pytest.mark.parametrize(("model", "name"), CASES)
@pytest.mark.parametrize("with_tools", [False, True])
def test_what_is_learned_is_what_the_model_wrote(model: str, name: str, with_tools: bool):
    row = {"messages": CONVERSATIONS[name]} | ({"tools": json.dumps([TOOL["function"]])} if with_tools else {})
    form, documents = rows_of(model, row)
    assert learned(form, documents) == wrote(model, name)
    knows_tools = model not in ("gemma3", "smollm2", "deepseek_r1", "phi3", "phi4")  # the server refuses them
    places = [number for number, message in enumerate(row["messages"]) if message["role"] == "assistant"]
    found = begins(documents)
    for prompt, place in zip(found, places[-len(found) :], strict=True):
        assert prompt in served(form, row["messages"][:place], with_tools and knows_tools)
    shown = form.tokenizer.decode(documents[-1].tokens)
    assert ("Adds." in shown) == (with_tools and knows_tools)


class VLLM:
    """Replace the engine: return token ids as the model wrote them, and what its parsers make of the text."""

    def __init__(self, model: str, name: str, cut: int = 0):
        self.form, self.cut = form_of(model), cut
        self.left = list(wrote(model, name))
        self.answers = [split_reasoning(one) for one in CONVERSATIONS[name] if one["role"] == "assistant"]
        self.chat, self.prompts = SimpleNamespace(completions=self), []

    async def create(self, messages: list[dict], tools: list[dict] | None = None, **request: Any) -> ChatCompletion:
        assert request["extra_body"]["return_token_ids"]
        answer = dict(self.answers.pop(0))
        answer["reasoning"], answer["content"] = answer.pop("reasoning_content", None), answer["content"] or None
        if "tool_calls" in answer:
            function = answer["tool_calls"][0]["function"]
            function = function | {"arguments": json.dumps(function["arguments"])}
            answer["tool_calls"] = [answer["tool_calls"][0] | {"function": function}]
        prompt, ids = self.form.prompt(messages, tools), self.form.tokenizer(self.left.pop(0))["input_ids"]
        if self.cut:
            ids, answer["content"] = ids[: self.cut], None
        self.prompts.append(prompt)
        choice = {"index": 0, "message": answer, "token_ids": ids, "finish_reason": "length" if self.cut else "stop"}
        more = {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "prompt_token_ids": prompt}
        return ChatCompletion.model_validate({"choices": [choice], **more})

    def regenerated(self, row: dict) -> dict:
        server = Server("http://127.0.0.1:9", "m", 1.0, 0)
        server.client = self
        request, *_ = questions(
            SimpleNamespace(rows=lambda: [Row("", row)], conversation=Source("x").conversation, messages=None), {}
        )
        answers = Regeneration(GenerationSettings(0.0, None, 99, 0))
        return json.loads(json.dumps(asyncio.run(answers.answer(request, server.ask))))


@pytest.mark.parametrize(("model", "name"), CASES)
def test_what_an_engine_wrote_is_learned_as_it_was_written(model: str, name: str):
    """Check that the engine's own tokens are learned, behind the prompts that it got, regardless of what the template makes
    of them later."""
    engine = VLLM(model, name)
    form, documents = rows_of(model, engine.regenerated({"messages": CONVERSATIONS[name], "tools": [TOOL]}))
    asked = wrote(model, name)[: 1 if "a tool" in name else None]  # no result of the target's own call
    assert learned(form, documents) == asked
    assert begins(documents) == engine.prompts


@pytest.mark.parametrize("model", ["qwen3", "qwq", "deepseek_r1", "gpt_oss"])
def test_thoughts_that_were_cut_off_are_learned_up_to_there(model: str):
    """Check it from ids, and from messages as an engine splits them."""
    row = VLLM(model, "reasoning", cut=40).regenerated({"messages": CONVERSATIONS["reasoning"]})
    assert row["error"] == "an answer without content (finish_reason length)"
    form, documents = rows_of(model, row)
    whole = wrote(model, "reasoning")[0]
    assert learned(form, documents) == [form.tokenizer.decode(form.tokenizer(whole)["input_ids"][:40])]
    for name in ("tokens", "starts", "written"):
        del row[name]
    (text,) = learned(*rows_of(model, row))
    assert whole.startswith(text) and text.endswith("2 and 3.")


@pytest.mark.parametrize("model", MODELS)
def test_a_question_may_be_a_part_of_a_mark(model: str):
    form, answer = form_of(model), {"role": "assistant", "content": "yes", "reasoning_content": "because"}
    questions = ("hi", "a", "assistant", "what is 2 + 2?")  # "hi" is in <think>
    found = [learned(form, form.documents([{"role": "user", "content": asked}, answer])) for asked in questions]
    assert found == found[-1:] * 4


def test_ids_of_another_tokenizer_are_told_from_the_text():
    row = VLLM("qwen3", "one turn").regenerated({"messages": CONVERSATIONS["one turn"]})
    with pytest.raises(SkippedRow, match="tokens of another target"):
        rows_of("qwen3", row | {"tokens": [token ^ 1 for token in row["tokens"]]})


@pytest.mark.parametrize("name", PLAIN)
def test_qwen3_without_thinking(name: str):
    """Check the generation prompt, which has an empty reasoning that the model does not write."""
    form = form_of("qwen3", thinking=False)
    found = learned(form, form.documents(CONVERSATIONS[name]))
    assert found == [f"{text}<|im_end|>" for text in PLAIN[name]]


@pytest.mark.parametrize("model", MODELS)
def test_the_ids_are_those_of_the_conversation_written_by_hand(model: str):
    """Check that the tokens before an answer's are those that the model gets when the head is used."""
    thinks = model in ("qwq", "deepseek_r1", "qwen3", "qwen3_5", "glm4_5", "glm5", "minimax_m2", "smollm3")
    name = "reasoning in the text" if thinks else "one turn"
    prompt = MODELS[model].prompt.replace("TODAY", str(date.today()))  # which gpt-oss's template says
    form, (document,) = rows_of(model, {"messages": CONVERSATIONS[name]})
    before, written = (form.tokenizer(text)["input_ids"] for text in (prompt, wrote(model, name)[0]))
    whole = [*before, *written]
    assert document.tokens[: len(whole)] == whole and before == form.prompt(CONVERSATIONS[name][:1])
    assert np.flatnonzero(document.loss_mask).tolist() == list(range(len(before), len(whole)))
    assert not form.tokenizer.decode(document.tokens[len(whole) :]).strip()
