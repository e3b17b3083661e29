"""Prompts of chosen lengths: acceptance by context. All lengths end at the same places of the same texts, so what differs
between them is the context alone."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from foredraft.inference.evaluation.benchmark import Prompt
from foredraft.inference.text import start_tokens
from foredraft.train.data.chat_template import ChatFormat
from foredraft.train.data.corpus import Corpus
from foredraft.train.data.layouts import turns
from foredraft.train.data.prompt_sets import held_out

SUMMARIZE = "Summarize the text above."
FIND = 'The words "{words}" occur in the text above. Copy the paragraph around them, word for word.'
WORDS = 12  # tokens of the text that FIND names


def texts_of(tokenizer: PreTrainedTokenizerBase, data: Corpus, count: int, lengths: Sequence[int]) -> list[list[int]]:
    """Return the tokens of about `count` held-out raw texts of the longest length; a conversation would lose its form. Raise
    ValueError if there are none."""
    longest = max(lengths)
    prompts = held_out(tokenizer, data, count, longest)
    texts = [prompt.tokens for prompt in prompts if not prompt.ends and len(prompt.tokens) >= longest]
    if not texts or min(lengths) <= len(start_tokens(tokenizer)):
        raise ValueError(f"lengths={list(lengths)} needs held-out raw texts (data=text) of at least {longest} tokens")
    return texts


def continued(tokenizer: PreTrainedTokenizerBase, texts: list[list[int]], lengths: Sequence[int]) -> list[Prompt]:
    """Return the last tokens of each text, for each length."""
    start = start_tokens(tokenizer)
    return [
        Prompt(f"{length} tokens", [*start, *tokens[len(tokens) - length + len(start) :]], False)
        for length in lengths
        for tokens in texts
    ]


def asked(tokenizer: PreTrainedTokenizerBase, texts: list[list[int]], lengths: Sequence[int]) -> list[Prompt]:
    """Return two questions about the last tokens of each text, for each length: a summary of all of it, and a paragraph to
    find, which is in another place of each text and at the same share of all lengths. Raise ValueError for a length that does
    not hold a question."""
    form = ChatFormat(tokenizer, None if tokenizer.chat_template else "plain")

    def prompt(text: str) -> list[int]:
        return form.prompt(turns([text], all_user=True))

    prompts, around = [], len(prompt("\n\n" + FIND)) + 2 * WORDS
    for length in lengths:
        if length < around + WORDS:
            raise ValueError(f"lengths={list(lengths)}: {length} tokens do not hold a text and a question about it")
        for number, tokens in enumerate(texts):
            back = WORDS + int((length - around) * (number + 0.5) / len(texts))
            found = tokenizer.decode(tokens[-back:][:WORDS], skip_special_tokens=True)
            words = found.strip("\ufffd \n").replace("\n", " ")
            for task, question in (("summary", SUMMARIZE), ("find", FIND.format(words=words))):
                room = length - len(prompt("\n\n" + question))
                text = tokenizer.decode(tokens[-room:], skip_special_tokens=True)
                prompts.append(Prompt(f"{length} tokens, {task}", prompt(f"{text}\n\n{question}"), True))
    return prompts
