"""The corpus that a program's config names."""

from collections import Counter
from typing import Any

import numpy as np
from hydra.utils import instantiate
from omegaconf import DictConfig

from foredraft.heads.target_model import Target
from foredraft.train.data.corpus import Corpus, Held, highest_id, tokenize
from foredraft.train.data.documents import Documents

WRITES = "foredraft.train.writing.magpie.corpus"  # lets the target write what is not there yet
READS_IMAGES = "foredraft.train.data.conversations.corpus"


def needs_target(settings: DictConfig) -> bool:
    return settings._target_ == WRITES


def load_corpus(settings: DictConfig, target: Target) -> Corpus:
    more: dict[str, Any] = {"target": target} if needs_target(settings) else {}
    if settings._target_ == READS_IMAGES:
        more["images"] = target.images
    return drop_unknown_tokens(instantiate(settings, tokenizer=target.text_tokenizer, **more), target)


def drop_unknown_tokens(data: Corpus, target: Target) -> Corpus:
    """Return the corpus without documents that hold a token which the target lacks: some tokenizers have tokens beyond the
    embeddings. Its card counts them and names the token. Raises ValueError if nothing is left to train on."""
    tokenizer, num_embeddings = target.text_tokenizer, target.model.get_input_embeddings().num_embeddings
    if highest_id(tokenizer) < min(num_embeddings, target.vocab_size):
        return data
    lacking: dict[Any, int] = {}  # the token, by the place of the document or by its text

    def known(documents: Documents, text: str | None = None) -> np.ndarray:
        """Return the numbers of documents of which the target has all tokens. It can read more than it writes logits of."""
        unknown = np.full(len(documents), -1, np.int64)
        for numbers, tokens, flags in documents.blocks():
            beyond = (tokens >= num_embeddings) | ((tokens >= target.vocab_size) & (flags > 0))
            lacks = np.flatnonzero(beyond)[::-1]  # so that the first one of a document is written last
            ends = documents.sizes[numbers.start : numbers.stop].cumsum()
            unknown[numbers.start + np.searchsorted(ends, lacks, side="right")] = tokens[lacks]
        for number in np.flatnonzero(unknown >= 0).tolist():
            place = (int(documents.chunk[number]), int(documents.begin[number])) if text is None else text
            lacking[place] = int(unknown[number])
        return np.flatnonzero(unknown < 0)

    def held(part: Held) -> Held:
        if isinstance(part, Documents):
            return part.select(known(part))
        return [one for one in part if len(known(tokenize(tokenizer, [one]), str(one)))]

    train, validation, test = data.train.select(known(data.train)), held(data.validation), held(data.test)
    names = tokenizer.convert_ids_to_tokens([*lacking.values()])
    dropped = dict(Counter(f"a token that the target lacks: {name}" for name in names))
    if not len(train):
        raise ValueError(f"the data ({data.card['source']}) gives nothing to train on: {dropped}")
    sets = {name: held(part) for name, part in data.test_sets.items()}
    card = data.card | {"dropped": data.card.get("dropped", {}) | dropped} if dropped else data.card
    return Corpus(train, validation, test, card, sets)
