"""Masks, token by token: what the target writes in a conversation is supervised, all of it and nothing else."""

import pytest

from foredraft.train.data.chat_template import ChatFormat
from foredraft.train.data.layouts import SkippedRow, cut_off, turns
from tests.support import chats
from tests.support.chats import CHATML, GEMMA, LLAMA3, MISTRAL, TAGGED, THINKING, tokenizer

ONE = [{"role": "user", "content": "Hi é"}, {"role": "assistant", "content": "yes\n"}]
TWO = [*ONE, {"role": "user", "content": "more"}, {"role": "assistant", "content": "no"}]


def shown(form: ChatFormat, messages: list[dict]) -> list[str]:
    """Each document's text, with every run of supervised tokens in ⟦ ⟧."""
    found = []
    for document in form.documents(messages):
        pieces, inside = [], False
        runs: list[list[int]] = []
        for token, flag in zip(document.tokens, document.loss_mask, strict=True):
            if flag != inside or not runs:
                runs.append([])
                pieces.append(flag)
                inside = flag
            runs[-1].append(token)
        texts = [form.tokenizer.decode(run) for run in runs]
        found.append("".join(f"⟦{text}⟧" if flag else text for flag, text in zip(pieces, texts, strict=True)))
    return found


FAMILIES = {
    "chatml": (
        CHATML,
        "<|im_start|>user\nHi é<|im_end|>\n<|im_start|>assistant\n⟦yes\n<|im_end|>⟧",
        "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n⟦no<|im_end|>⟧\n",
    ),
    "llama-3": (
        LLAMA3,
        "<s><|start_header_id|>user<|end_header_id|>\n\nHi é<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
        "⟦yes<|eot_id|>⟧",
        "<|start_header_id|>user<|end_header_id|>\n\nmore<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n⟦no<|eot_id|>⟧",
    ),
    "mistral": (MISTRAL, "<s>[INST] Hi é [/INST]⟦ yes\n</s>⟧", "[INST] more [/INST]⟦ no</s>⟧"),
    "gemma": (
        GEMMA,
        "<s><start_of_turn>user\nHi é<end_of_turn>\n<start_of_turn>model\n⟦yes<end_of_turn>⟧",
        "\n<start_of_turn>user\nmore<end_of_turn>\n<start_of_turn>model\n⟦no<end_of_turn>⟧\n",
    ),
    "tagged": (
        TAGGED,
        "<|im_start|>user\nHi é<|im_end|>\n<|im_start|>assistant\n⟦yes\n<|im_end|>⟧",
        "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n⟦no<|im_end|>⟧\n",
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_masks_of_families_without_thoughts(family: str):
    template, first, second = FAMILIES[family]
    form = ChatFormat(tokenizer(template))
    assert [text.rstrip("\n") for text in shown(form, ONE)] == [first]
    assert shown(form, TWO) == [first + second]
    # A question behind the last answer changes nothing.
    if family != "mistral":
        assert shown(form, [*TWO, {"role": "user", "content": "?"}]) == [first + second]


@pytest.mark.parametrize("family", FAMILIES)
def test_training_begins_as_decoding_does(family: str):
    """What stands before an answer is, token for token, the prompt behind which the target writes it."""
    form = ChatFormat(tokenizer(FAMILIES[family][0]))
    (document,) = form.documents(TWO)
    starts = [i for i in range(1, len(document.tokens)) if document.loss_mask[i] > document.loss_mask[i - 1]]
    assert [document.tokens[:start] for start in starts] == [form.prompt(TWO[:1]), form.prompt(TWO[:3])]


def test_thoughts_are_supervised_where_they_are_written_and_absent_where_they_lie_behind():
    said = [dict(message) for message in TWO]
    said[1]["reasoning_content"], said[3]["reasoning_content"] = "hm", "well"
    first, second = shown(ChatFormat(tokenizer(THINKING)), said)
    head = "<|im_start|>user\nHi é<|im_end|>\n<|im_start|>assistant\n"
    assert first == head + "⟦<think>\nhm\n</think>\n\nyes\n<|im_end|>⟧\n"
    more = "yes\n<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    assert second == head + more + "⟦<think>\nwell\n</think>\n\nno<|im_end|>⟧\n"


def test_with_thinking_off_the_empty_thoughts_are_the_prompts():
    (text,) = shown(ChatFormat(tokenizer(THINKING), thinking=False), ONE)
    assert text.endswith("assistant\n<think>\n\n</think>\n\n⟦yes\n<|im_end|>⟧\n")
    with pytest.raises(ValueError, match="knows no thinking"):
        ChatFormat(tokenizer(CHATML), thinking=False)


def test_nothing_is_added_to_what_the_template_says():
    form = ChatFormat(tokenizer(CHATML))
    assert form.tokenizer.decode(form.prompt(ONE[:1])) == "<|im_start|>user\nHi é<|im_end|>\n<|im_start|>assistant\n"
    assert all("system" not in text for text in shown(form, TWO))
    with_system = [{"role": "system", "content": "be kind"}, *ONE]
    assert shown(form, with_system)[0].startswith("<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user")


def test_a_conversation_that_a_template_refuses_is_dropped_with_its_words():
    twice = [ONE[0], ONE[0], ONE[1]]
    with pytest.raises(SkippedRow, match="must take turns"):
        ChatFormat(tokenizer(MISTRAL)).documents(twice)
    with pytest.raises(SkippedRow, match="no answer"):
        ChatFormat(tokenizer(CHATML)).documents(ONE[:1])


def test_a_template_whose_answers_begin_otherwise_is_refused():
    odd = chats.CHATML.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant, now\n{% endif %}")
    with pytest.raises(ValueError, match=r"begins an answer otherwise.*data.template=FILE"):
        ChatFormat(tokenizer(odd)).documents(ONE)


def test_the_plain_template_marks_answers(tmp_path):
    with pytest.raises(ValueError, match=r"no chat template.*data\.template=plain"):
        ChatFormat(tokenizer(None))
    form = ChatFormat(tokenizer(None), template="train/data/plain_chat.jinja")
    assert shown(form, TWO) == ["User: Hi é\nAssistant:⟦ yes\n</s>⟧\nUser: more\nAssistant:⟦ no</s>⟧\n"]
    assert form.tokenizer.decode(form.prompt(TWO[:1])) == "User: Hi é\nAssistant:"


@pytest.mark.parametrize("family", ["chatml", "tagged", "mistral"])
def test_an_answer_that_was_cut_off_has_no_end_to_learn(family: str):
    """Its target would have gone on: an end token there teaches drafts to stop in mid-sentence."""
    form = ChatFormat(tokenizer(FAMILIES[family][0]))
    (whole,), (cut,) = shown(form, TWO), shown(form, cut_off([dict(one) for one in TWO], ["stop", "length"]))
    end = "</s>" if family == "mistral" else "<|im_end|>"
    assert f"no{end}⟧" in whole and cut == whole.replace(f"no{end}⟧", f"no⟧{end}")


def test_thoughts_reach_a_template_by_each_of_their_names():
    template = "{% for m in messages %}{{ m.role }}<{{ m.thinking }}|{{ m.reasoning }}>{{ m.content }}\n{% endfor %}"
    said = turns([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "thinking": "t"}])
    assert said[1]["reasoning_content"] == "t"
    assert ChatFormat(tokenizer(template)).render(said)[0] == "user<|>a\nassistant<t|t>b\n"
