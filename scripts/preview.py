"""Look at what a head would be trained on:  python scripts/preview.py data=conversations data.path=FILE target=ORG/NAME

A few documents in the terminal and in a page, what is supervised in colour, and the data card. Reads no weights.
"""

import sys
from collections.abc import Iterator
from html import escape
from itertools import groupby
from pathlib import Path

from hydra.utils import instantiate
from omegaconf import DictConfig
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from inference.evaluation import plots
from inference.evaluation.report import PAGE_STYLE, verbatim
from train.cli import entry
from train.data import data_card
from train.data.corpus import Corpus, Document

GREEN, PLAIN = "\x1b[32m", "\x1b[0m"
STYLE = "mark{background:var(--t3);box-shadow:inset 0 -2px var(--d3);color:inherit}"


@entry("preview")
def main(cfg: DictConfig) -> None:
    try:
        tokenizer = AutoTokenizer.from_pretrained(cfg.target.path)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"target.path={cfg.target.path} has no tokenizer: {str(error).splitlines()[0]}") from error
    data: Corpus = instantiate(cfg.data, tokenizer=tokenizer)
    if cfg.samples < 1:
        raise ValueError(f"samples={cfg.samples} must be at least 1")
    count = min(cfg.samples, len(data.train))
    samples = [data.train[len(data.train) * i // count] for i in range(count)]
    card = data.card | data_card.describe(data.train)
    for number, document in enumerate(samples, start=1):
        print(f"--- {title(number, document)}\n{terminal(tokenizer, document)}\n")
    print(data_card.summary(card))
    Path(cfg.output).parent.mkdir(parents=True, exist_ok=True)
    Path(cfg.output).write_text(page(tokenizer, samples, card))
    print(f"the same, in colour: {cfg.output}")


def title(number: int, document: Document) -> str:
    return f"document {number}: {len(document.tokens)} tokens, {sum(document.loss_mask)} supervised"


def runs(tokenizer: PreTrainedTokenizerBase, document: Document) -> Iterator[tuple[bool, str]]:
    """(supervised?, text) of each stretch. The texts are the tokens' own, special ones included."""
    pairs = zip(document.loss_mask, document.tokens, strict=True)
    for flag, run in groupby(pairs, key=lambda pair: pair[0]):
        yield flag, tokenizer.decode([token for _, token in run], clean_up_tokenization_spaces=False)


def terminal(tokenizer: PreTrainedTokenizerBase, document: Document) -> str:
    """Green, or in [[ ]] where the output is no terminal."""
    start, end = (GREEN, PLAIN) if sys.stdout.isatty() else ("[[", "]]")
    return "".join(f"{start}{text}{end}" if flag else text for flag, text in runs(tokenizer, document))


def page(tokenizer: PreTrainedTokenizerBase, samples: list[Document], card: dict) -> str:
    """One HTML page that needs nothing but itself."""
    shown = []
    for number, document in enumerate(samples, start=1):
        text = "".join(
            f"<mark>{verbatim(text)}</mark>" if flag else f'<span class="prompt">{verbatim(text)}</span>'
            for flag, text in runs(tokenizer, document)
        )
        shown.append(f"<h2>{title(number, document)}</h2><pre>{text}</pre>")
    rows = "".join(f"<dt>{escape(label)}</dt><dd>{escape(value)}</dd>" for label, value in data_card.lines(card))
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>Preview of {escape(str(card['source']))}</title><style>{PAGE_STYLE}{plots.STYLE}{STYLE}</style><main>"
        f"<h1>{escape(str(card['source']))}</h1><p>What the target writes is <mark>marked</mark>: only that is learnt.</p>"
        f"{''.join(shown)}<h2>Data card</h2><dl>{rows}</dl><figure>{data_card.histogram(card)}</figure></main></html>\n"
    )


if __name__ == "__main__":
    main()
