"""Show what a head would be trained on:  python scripts/preview.py data=conversations data.path=FILE target=ORG/NAME

Some documents are shown with the supervised tokens highlighted, followed by the dataset card. No weights are loaded.
"""

import sys
from collections.abc import Iterator
from itertools import groupby

from hydra.utils import instantiate
from omegaconf import DictConfig
from transformers import PreTrainedTokenizerBase

from foredraft.cli import check_at_least, entry
from foredraft.heads.target_model.loading import read_tokenizer
from foredraft.heads.target_model.resolve_path import resolve_path
from foredraft.inference.text import Detokenizer
from foredraft.train.data import data_card
from foredraft.train.data.corpus import Corpus, Document
from foredraft.train.data.loading import load_corpus, needs_target

GREEN, PLAIN = "\x1b[32m", "\x1b[0m"


@entry("preview")
def main(cfg: DictConfig) -> None:
    check_at_least(cfg, 1, "samples")
    revision = cfg.target.revision
    path = resolve_path(cfg.target.path, gguf_file=cfg.target.get("gguf_file"), revision=revision)
    try:
        tokenizer = read_tokenizer(path, revision)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"target.path={cfg.target.path} has no tokenizer: {str(error).splitlines()[0]}") from error
    # Whether the target, or a server, writes the missing text.
    writes = needs_target(cfg.data) and (cfg.data.path is None or cfg.data.endpoint is not None)
    data: Corpus = (
        load_corpus(cfg.data, instantiate(cfg.target)) if writes else instantiate(cfg.data, tokenizer=tokenizer)
    )
    count = min(cfg.samples, len(data.train))
    card = data.card | data_card.describe(data.train)
    for number in range(count):
        document = data.train[len(data.train) * number // count]
        facts = f"{len(document.tokens)} tokens, {sum(document.loss_mask)} supervised"
        print(f"--- document {number + 1}: {facts}\n{terminal(tokenizer, document)}\n")
    print(data_card.summary(card))


def runs(tokenizer: PreTrainedTokenizerBase, document: Document) -> Iterator[tuple[bool, str]]:
    """Yield (supervised?, text) of each span, with special tokens."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False, prompt=())
    pairs = zip(document.loss_mask, document.tokens, strict=True)
    spans = [(flag, [token for _, token in run]) for flag, run in groupby(pairs, key=lambda pair: pair[0])]
    for number, (flag, tokens) in enumerate(spans, start=1):
        yield flag, detokenizer.push(*tokens) + (detokenizer.pending_text if number == len(spans) else "")


def terminal(tokenizer: PreTrainedTokenizerBase, document: Document) -> str:
    """Return the text with supervised spans in green, or in [[ ]] if the output is not a terminal."""
    start, end = (GREEN, PLAIN) if sys.stdout.isatty() else ("[[", "]]")
    return "".join(f"{start}{text}{end}" if flag else text for flag, text in runs(tokenizer, document))


if __name__ == "__main__":
    main()
