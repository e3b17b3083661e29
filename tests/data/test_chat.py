"""Masks, token by token: what the target writes in a conversation is supervised, all of it and nothing else."""

import io
from types import SimpleNamespace

import pytest

from foredraft.scripts import chat
from foredraft.scripts.chat import Chat, Marks
from foredraft.scripts.preview import runs
from foredraft.train.data.chat_template import ChatFormat
from foredraft.train.data.columns import cut_off
from foredraft.train.data.layouts import SkippedRow, turns
from tests.support.chats import CHATML, form_of, tokenizer

TAGGED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>"
    "{% endgeneration %}{{ '\\n' }}{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ONE = [{"role": "user", "content": "Hi é"}, {"role": "assistant", "content": "yes\n"}]
TWO = [*ONE, {"role": "user", "content": "more"}, {"role": "assistant", "content": "no"}]


def shown(form: ChatFormat, messages: list[dict]) -> list[str]:
    """Return each document's text, with every run of supervised tokens in ⟦ ⟧."""
    each = (runs(form.tokenizer, document) for document in form.documents(messages))
    return ["".join(f"⟦{text}⟧" if flag else text for flag, text in stretches) for stretches in each]


def test_what_a_template_marks_is_learned_and_nothing_else():
    first = "<|im_start|>user\nHi é<|im_end|>\n<|im_start|>assistant\n⟦yes\n<|im_end|>⟧"
    second = "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n⟦no<|im_end|>⟧\n"
    for template in (CHATML, TAGGED):
        form = ChatFormat(tokenizer(template))
        assert shown(form, ONE) == [first + "\n"] and shown(form, TWO) == [first + second]
        # A question behind the last answer changes nothing.
        assert shown(form, [*TWO, {"role": "user", "content": "?"}]) == [first + second]


def test_text_for_a_target_that_sees_images_needs_no_processor():
    class Unread:
        @property
        def placeholder(self) -> str:
            raise AssertionError("it loads the processor, which needs pillow and the target's files")

    form = ChatFormat(tokenizer(CHATML), images=Unread())  # type: ignore[arg-type]
    assert shown(form, ONE) == shown(ChatFormat(tokenizer(CHATML)), ONE)


def test_a_switch_that_the_template_does_not_know_is_refused():
    with pytest.raises(ValueError, match="does not support thinking"):
        ChatFormat(tokenizer(CHATML), thinking=False)


def test_a_conversation_that_a_template_refuses_is_dropped_with_its_words():
    twice = [ONE[0], ONE[0], ONE[1]]
    with pytest.raises(SkippedRow, match="roles must alternate"):
        form_of("mistral").documents(twice)
    with pytest.raises(SkippedRow, match="no answer"):
        ChatFormat(tokenizer(CHATML)).documents(ONE[:1])


def test_a_system_prompt_that_a_template_refuses_is_said_in_a_chat():
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHATML
    target = SimpleNamespace(text_tokenizer=tokenizer(template), eos_token_ids=[])
    refusing = Chat(target, None, None, 8, 0, Marks(False))
    with pytest.raises(ValueError, match="the chat template does not support this conversation: no system role"):
        refusing.request([{"role": "system", "content": "be kind"}, ONE[0]])


def test_ctrl_c_before_the_first_token_ends_no_chat(call, monkeypatch):
    questions, asked = iter(["one", "tw\udcf3", "/quit"]), []  # a terminal sent half of a character

    def answer(self: Chat, question: str) -> None:
        asked.append(question)
        if question == "one":
            raise KeyboardInterrupt

    monkeypatch.setattr(chat, "instantiate", lambda *_, **__: SimpleNamespace(text_tokenizer=tokenizer(CHATML)))
    monkeypatch.setattr(chat, "reader", lambda history: lambda: next(questions))
    monkeypatch.setattr(Chat, "answer", answer)
    assert call(chat.main, "target=any").code == 0 and asked == ["one", "tw?"]


UNDERLINED, GREEN = "\x1b[4m", "\x1b[4;32m"


@pytest.mark.parametrize(
    ("terminal", "environment", "wanted", "legend", "answer"),
    [
        (True, {}, True, f"{GREEN}green and underlined\x1b[0m: a draft", f"a{GREEN} b c\x1b[0m d\n"),
        (True, {"NO_COLOR": "1"}, True, f"{UNDERLINED}underlined\x1b[0m: a draft", f"a{UNDERLINED} b c\x1b[0m d\n"),
        (True, {"TERM": "dumb"}, True, "[in brackets]: a draft", "a[ b c] d\n"),
        (False, {}, True, "[in brackets]: a draft", "a[ b c] d\n"),
        (False, {}, False, "", "a b c d\n"),
    ],
)
def test_accepted_drafts_are_marked_with_and_without_colors(monkeypatch, terminal, environment, wanted, legend, answer):
    written = io.StringIO()
    monkeypatch.setattr(written, "isatty", lambda: terminal)
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in ({"TERM": "xterm"} | environment).items():
        monkeypatch.setenv(name, value)
    marks = Marks(wanted, written)
    marks.explain()
    explained = written.getvalue()
    assert explained.startswith(legend) and explained.count("\n") == wanted
    for text, drafted in (("a", False), (" b", True), ("", False), (" c", True), (" d", False), ("\n", False)):
        marks.write(text, drafted)
    assert written.getvalue().removeprefix(explained) == answer


def test_marks_end_with_the_answer():
    written = io.StringIO()
    marks = Marks(True, written)
    for _ in range(2):
        marks.write("a")
        marks.write(" b", True)
        marks.write("\n")
    assert written.getvalue() == "a[ b]\na[ b]\n"


def test_a_template_whose_answers_begin_otherwise_is_refused():
    odd = CHATML.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant, now\n{% endif %}")
    with pytest.raises(ValueError, match=r"starts an answer otherwise.*data.template=FILE"):
        ChatFormat(tokenizer(odd)).documents(ONE)
    # Reasons are counted, so a long text is not in them.
    loud = CHATML.replace("{{ m.content", "{{ m.content | upper if m.role == 'user' else m.content")
    with pytest.raises(ValueError, match="generation prompt does") as error:
        ChatFormat(tokenizer("{{ 'x' * 90 if add_generation_prompt }}" + loud)).documents(ONE)
    assert "x" * 41 not in str(error.value)


TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{{ end }}{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


@pytest.mark.parametrize(
    ("template", "answer", "written"),
    [
        # Hermes: a line's end before the header in the history alone.
        (TURNS.replace("{{ end }}", "{{ '\n' if not loop.last }}") + PROMPT, "yes", "yes<|im_end|>"),
        # Command R7B: its prompt closes the reasoning, which the answers of the history do not have.
        (
            TURNS.replace("{{ m.content }}", "{{ '[R]' if m.role == 'assistant' }}{{ m.content }}")
            + PROMPT.replace("{% endif", "<|START_THINKING|><|END_THINKING|>{% endif"),
            "yes",
            "[R]yes<|im_end|>",
        ),
        # Kimi-K2-Thinking: it writes an empty reasoning before that of the text.
        (
            TURNS.replace("{{ m.content }}", "{{ '<think></think>' if m.role == 'assistant' }}{{ m.content }}")
            + PROMPT,
            "<think>so</think>yes",
            "<think>so</think>yes<|im_end|>",
        ),
        # The target stops at its eos_token, whatever stands behind it.
        (TURNS.replace("<|im_end|>", "</s><|im_end|>") + PROMPT, "yes", "yes</s>"),
    ],
)
def test_an_answer_is_learned_from_its_prompt_to_its_end(template: str, answer: str, written: str):
    (text,) = shown(ChatFormat(tokenizer(template)), [{"role": "user", "content": "Hi"}, ONE[-1] | {"content": answer}])
    assert f"⟦{written}⟧" in text and text.count("⟦") == 1


def test_a_header_is_context_and_the_same_text_in_an_answer_is_learned():
    # GigaChat asks for no answer to an answer. Gemma 4 asks for none to a tool's result, and goes on without a header.
    form = ChatFormat(tokenizer(TURNS + PROMPT.replace("{% if", "{% if messages[-1].role == 'user' and")))
    turns = [*ONE, {"role": "assistant", "content": "more"}]
    (text,) = shown(form, turns)
    assert text.endswith("⟧<|im_start|>assistant\n⟦more<|im_end|>⟧")
    (text,) = shown(form, [*turns[:2], {"role": "tool", "content": "4"}, turns[2]])
    assert text.endswith("tool\n4<|im_end|>⟦more<|im_end|>⟧")
    # Qwen3 writes more than the header into its prompt.
    empty = PROMPT.replace("{% endif", "{% if enable_thinking is false %}<think></think>{% endif %}{% endif")
    turns = [ONE[0], {"role": "assistant", "content": "<|im_start|>assistant\nis a header"}]
    (text,) = shown(ChatFormat(tokenizer(TURNS + empty)), turns)
    assert text.endswith("<think></think>⟦<|im_start|>assistant\nis a header<|im_end|>⟧")


def test_an_answer_lacks_the_reasoning_that_its_prompt_and_the_history_open():
    """Check it for Nemotron-Nano-v2's template, and that a text with the end of the reasoning has it."""
    opening = TURNS.replace("{{ m.content }}", "{{ '<think>\n' if m.role == 'assistant' }}{{ m.content }}")
    form = ChatFormat(tokenizer(opening + PROMPT.replace("{% endif", "<think>\n{% endif")))
    with pytest.raises(SkippedRow, match="without the reasoning that its target starts with"):
        form.documents(ONE)
    (text,) = shown(form, [ONE[0], ONE[1] | {"content": "so</think>yes"}])
    assert "⟦so\n</think>\n\nyes<|im_end|>⟧" in text


def test_the_plain_template_marks_answers(tmp_path):
    with pytest.raises(ValueError, match=r"no chat template.*data\.template=plain"):
        ChatFormat(tokenizer(None))
    form = ChatFormat(tokenizer(None), template="train/data/plain_chat.jinja")
    assert shown(form, TWO) == ["User: Hi é\nAssistant:⟦ yes\n</s>⟧\nUser: more\nAssistant:⟦ no</s>⟧\n"]
    assert form.tokenizer.decode(form.prompt(TWO[:1])) == "User: Hi é\nAssistant:"


@pytest.mark.parametrize(("template", "end"), [(CHATML, "<|im_end|>"), (TAGGED, "<|im_end|>"), (None, "</s>")])
def test_an_answer_that_was_cut_off_has_no_end_to_learn(template: str | None, end: str):
    """Check that no end token is learned there: its target would have gone on, and drafts would learn to stop in
    mid-sentence."""
    form = ChatFormat(tokenizer(template)) if template else form_of("mistral")
    (whole,), (cut,) = shown(form, TWO), shown(form, cut_off([dict(one) for one in TWO], ["stop", "length"]))
    assert f"no{end}⟧" in whole and cut == whole.replace(f"no{end}⟧", f"no⟧{end}")


def test_thoughts_reach_a_template_by_each_of_their_names():
    template = "{% for m in messages %}{{ m.role }}<{{ m.thinking }}|{{ m.reasoning }}>{{ m.content }}\n{% endfor %}"
    said = turns([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "thinking": "t"}])
    assert said[1]["reasoning_content"] == "t"
    form = ChatFormat(tokenizer(template))
    assert form.write([form.shown(message) for message in said])[0] == "user<|>a\nassistant<t|t>b\n"
