"""Tokens to text: the same in pieces as at once, after any prompt, by every kind of tokenizer."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from foredraft.inference.evaluation.results import Sample
from foredraft.inference.serve.echo import Echo
from foredraft.inference.serve.openai.logprobs import TokenLogprob, chat_logprobs, completion_logprobs
from foredraft.inference.slots import RequestOutput
from foredraft.inference.text import Detokenizer, answer_context, continuation, encode_prompt, token_texts_of
from foredraft.scripts.chat import AnswerWriter, Marks
from foredraft.scripts.preview import runs
from foredraft.train.data.corpus import Document, tokenize
from foredraft.train.writing.self_generated import starts
from tests.support.chats import byte_level, sentencepiece


def word_pieces() -> PreTrainedTokenizerFast:
    """Make a tokenizer like BERT's: a space between tokens, none before what continues a word."""
    vocab = ["[UNK]", "the", "sky", "##s", "blue", "##er", "."]
    raw = Tokenizer(models.WordPiece({word: number for number, word in enumerate(vocab)}, unk_token="[UNK]"))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece(cleanup=False)
    return PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="[UNK]")


ONE_STEP = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(), decoders.Fuse()])  # as T5 and XLM decode
KINDS = {"strip": sentencepiece(), "metaspace": sentencepiece(ONE_STEP), "byte level": byte_level()}
KINDS["words"] = word_pieces()
TEXTS = st.text(st.sampled_from("The sky is blue  \n é日🧪�<"), max_size=24)


def ids(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False).input_ids


def pieces(detokenizer: Detokenizer, tokens: list[int]) -> list[str]:
    return [*(detokenizer.push(token) for token in tokens), detokenizer.end()]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(prompt=TEXTS, text=TEXTS, data=st.data())
def test_pieces_are_what_decoding_at_once_adds_to_the_prompt(kind, prompt, text, data):
    """Insert special tokens, which are not shown, anywhere."""
    tokenizer = KINDS[kind]
    tokens = ids(tokenizer, f"{prompt} {text}")
    cut = data.draw(st.integers(0, len(tokens)))
    before, new = [1, 2, *tokens[:cut]] if len(tokenizer.all_special_ids) > 2 else tokens[:cut], tokens[cut:]
    if new and kind != "words":
        new.insert(data.draw(st.integers(0, len(new))), tokenizer.eos_token_id)

    def decode(tokens: list[int]) -> str:
        return tokenizer.decode(tokens, skip_special_tokens=True)

    shown = decode(before)
    if not shown.endswith("�"):  # otherwise a character may start there
        assert continuation(tokenizer, before, new) == decode(before + new)[len(shown) :]
        assert "".join(pieces(Detokenizer(tokenizer, prompt=before), new)) == decode(before + new)[len(shown) :]
    whole = pieces(Detokenizer(tokenizer, prompt=()), before + new)
    assert "".join(whole) == decode(before + new)


@pytest.mark.parametrize("kind, tokens", [("strip", "🧪"), ("metaspace", "é日🧪"), ("byte level", " 🧪 é")])
def test_a_text_completes_the_character_that_its_prompt_began(kind, tokens):
    tokenizer = KINDS[kind]
    whole = ids(tokenizer, f"is blue{tokens}blue")
    for cut in range(3, len(whole)):
        shown = "".join(map(Detokenizer(tokenizer, prompt=()).push, whole[:cut]))
        for logprobs in ([], [(None, [])] * cut):
            assert Echo.of(tokenizer, whole[:cut], logprobs).text == shown
        rest = "".join(pieces(Detokenizer(tokenizer, prompt=whole[:cut]), whole[cut:]))
        assert shown + rest == tokenizer.decode(whole)


@pytest.mark.parametrize("kind", ["strip", "metaspace", "byte level"])
def test_a_replacement_character_that_somebody_wrote_is_text(kind):
    tokenizer = KINDS[kind]
    prompt, new = ids(tokenizer, "is �"), ids(tokenizer, "The�")[1:]
    assert "".join(pieces(Detokenizer(tokenizer, prompt=prompt), new)) == tokenizer.decode(prompt + new)[4:]
    assert Detokenizer(tokenizer, prompt=prompt).push(ids(tokenizer, "The")[-1]) in (" The", "e")


@pytest.mark.parametrize("kind", ["strip", "metaspace"])
def test_a_first_word_keeps_its_space_unless_the_text_starts_with_it(kind):
    tokenizer = KINDS[kind]
    blue, four = tokenizer.convert_tokens_to_ids(["▁blue", "▁▁▁▁"])
    assert (Detokenizer(tokenizer).push(blue), Detokenizer(tokenizer).push(four)) == (" blue", "    ")
    mark = tokenizer.convert_tokens_to_ids("<|assistant|>")
    for prompt, expected in (([1], "blue"), ([blue, mark], " blue"), ([blue, 2, 2, 2, 2, 2, 2, 2, 2, 2], " blue")):
        assert Detokenizer(tokenizer, prompt=prompt).push(blue) == expected
    # An answer starts behind the last mark of a chat's prompt, and continues what stands there.
    for prompt, expected in (([blue, mark], "blue"), ([mark, blue], " blue"), ([blue], " blue")):
        assert Detokenizer(tokenizer, prompt=answer_context(tokenizer, prompt)).push(blue) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_have_texts_and_bytes_that_make_the_text(kind):
    tokenizer = KINDS[kind]
    token_texts, text = token_texts_of(tokenizer), "blue sky é🧪日 blues \n" if kind != "words" else "the skys bluer"
    tokens = ids(tokenizer, text)
    found = b"".join(token_texts.token_text(token, first=number == 0)[1] or b"" for number, token in enumerate(tokens))
    assert found.decode() == tokenizer.decode(tokens)
    assert len(tokens) > len(text.split()) or kind == "words"


def test_a_prompt_has_one_bos_token():
    tokenizer = sentencepiece()
    once = encode_prompt(tokenizer, "The sky")
    assert once[0] == 1 and 1 not in once[1:]
    assert encode_prompt(tokenizer, "<s>The sky")[:2] == [1, ids(tokenizer, "<s>The sky")[1]]
    assert encode_prompt(tokenizer, "<s><s>The")[:3].count(1) == 2  # as it was written
    assert encode_prompt(tokenizer, "The sky", add_special_tokens=False) == once[1:]
    single = TemplateProcessing(single="$A", special_tokens=[])
    tokenizer.backend_tokenizer.post_processor = single  # as `add_bos_token = False` sets it
    assert encode_prompt(tokenizer, "The sky") == once[1:]
    assert encode_prompt(byte_level(), "<s>a")[:1] == encode_prompt(byte_level(), "<s>a", add_special_tokens=False)[:1]


def test_a_prompt_does_not_end_with_the_end_token_of_its_tokenizer():
    """Tokenizers with `add_eos_token`, as fine-tunes leave it, put one behind every text: answers were empty."""
    tokenizer = sentencepiece()
    pairs = [("<s>", 1), ("</s>", tokenizer.eos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=pairs)
    assert tokenizer("The sky").input_ids == [*encode_prompt(tokenizer, "The sky"), tokenizer.eos_token_id]


def test_all_tokens_that_a_text_starts_with_are_there_once():
    """GLM's tokenizer puts two before a text, and names neither of them as bos."""
    tokenizer = byte_level()
    tokenizer.bos_token, marks = None, ["<|user|>", "<s>"]
    first = tokenizer.convert_tokens_to_ids(marks)
    single = TemplateProcessing(single="<|user|> <s> $A", special_tokens=list(zip(marks, first, strict=True)))
    tokenizer.backend_tokenizer.post_processor = single
    once = encode_prompt(tokenizer, "a")
    assert once == [*first, *ids(tokenizer, "a")] == encode_prompt(tokenizer, "<|user|><s>a")
    assert encode_prompt(tokenizer, "<s>a") == [*first, first[1], *once[2:]]  # another start
    (document,) = tokenize(tokenizer, ["a"])
    assert document.tokens == [*once, tokenizer.eos_token_id] and document.loss_mask == [0, 0, 1, 1]
    long = tokenize(tokenizer, ["a raw text " * 40])
    places = starts(SimpleNamespace(context=None, text_tokenizer=tokenizer), long)  # type: ignore[arg-type]
    assert len(places) > 5  # a chat has as many as answers


def test_what_is_shown_of_a_text_in_parts_has_its_spaces():
    """Check a sample of a report, and the stretches of a document."""
    tokenizer = sentencepiece()
    prompt, new = [1, *ids(tokenizer, "The sky")], ids(tokenizer, "is 🧪 blue")
    sample = Sample.of(tokenizer, prompt, new, [1] * (len(new) // 2), [2] * (len(new) // 2))
    assert "".join(piece for piece, _ in sample.pieces) == " is 🧪 blue"
    document = Document(prompt + new, [False] * len(prompt) + [True] * len(new))
    assert list(runs(tokenizer, document)) == [(False, "<s> The sky"), (True, " is 🧪 blue")]


def test_a_chat_in_the_terminal_has_its_spaces():
    tokenizer = sentencepiece()
    blue, mark = tokenizer.convert_tokens_to_ids(["▁blue", "<|assistant|>"])
    for prompt, expected in (([blue, mark], "blue blue"), ([mark, blue], " blue blue")):
        writer = AnswerWriter(SimpleNamespace(text_tokenizer=tokenizer), prompt, Marks(False))
        writer.push(RequestOutput(None, [blue], None, 1, None))
        writer.push(RequestOutput(None, [blue], 0, 1, "length"))
        assert writer.end() == expected


def test_log_probabilities_never_name_two_tokens_alike():
    """Use a byte and a letter of one text, and two halves of characters."""
    tokenizer = sentencepiece()
    letter, byte, half, other = tokenizer.convert_tokens_to_ids(["T", "<0x54>", "<0xF0>", "<0x9F>"])
    place = TokenLogprob(byte, -1.0, [(letter, -0.5), (half, -2.0), (other, -2.0)], 0, False)
    named = completion_logprobs(token_texts_of(tokenizer), [place], False)
    assert [*named["top_logprobs"][0]] == ["T", "bytes:\\xf0", "bytes:\\x9f"]
    assert named["tokens"] == [f"token_id:{byte}"] and named["text_offset"] == [0]
    place = place._replace(token=half)
    (entry,) = chat_logprobs(token_texts_of(tokenizer), [place], False)["content"]
    assert (entry["token"], entry["bytes"]) == ("bytes:\\xf0", [0xF0])
    named = completion_logprobs(token_texts_of(tokenizer), [place], True)
    assert named["tokens"] == [f"token_id:{half}"] and len(named["top_logprobs"][0]) == 3
