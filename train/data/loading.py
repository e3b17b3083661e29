"""The corpus that a program's config names."""

from collections import Counter
from typing import Any

import numpy as np
from hydra.utils import instantiate
from omegaconf import DictConfig

from foredraft.heads.target_model import Target
from foredraft.train.data.conversations import HeldOut
from foredraft.train.data.corpus import Corpus, Held, tokenize
from foredraft.train.data.documents import Documents
from foredraft.train.data.known_tokens import Vocabulary, highest_id

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
    """Return the corpus without documents that hold a token which the target lacks. Its card counts them and names the token.
    Raises ValueError if nothing is left to train on."""
    tokenizer, vocabulary = target.text_tokenizer, Vocabulary.of(target)
    if highest_id(tokenizer) < min(vocabulary):
        return data
    lacking: dict[Any, int] = {}  # the token, by the place of the document or by its text

    def known(documents: Documents, text: str | None = None) -> np.ndarray:
        unknown = vocabulary.unknown(documents)
        for number in np.flatnonzero(unknown >= 0).tolist():
            place = (int(documents.chunk[number]), int(documents.begin[number])) if text is None else text
            lacking[place] = int(unknown[number])
        return np.flatnonzero(unknown < 0)

    def held(part: Held) -> Held:
        if isinstance(part, HeldOut):
            return part.select(known(part.documents))
        return [one for one in part if len(known(tokenize(tokenizer, [one]), str(one)))]

    train, validation, test = data.train.select(known(data.train)), held(data.validation), held(data.test)
    names = tokenizer.convert_ids_to_tokens([*lacking.values()])
    dropped = dict(Counter(f"a token that the target lacks: {name}" for name in names))
    if not len(train):
        raise ValueError(f"the data ({data.card['source']}) gives nothing to train on: {dropped}")
    sets = {name: held(part) for name, part in data.test_sets.items()}
    card = data.card | {"dropped": data.card.get("dropped", {}) | dropped} if dropped else data.card
    return Corpus(train, validation, test, card, sets)
