"""Tokens that a target cannot read or write: some tokenizers have tokens beyond the target's embeddings."""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from foredraft.heads.target_model import Target
from foredraft.train.data.documents import Documents


def highest_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the highest id of a tokenizer, which may be above the number of its tokens: ids have holes."""
    return highest_of(tokenizer, len(tokenizer))


@lru_cache(8)
def highest_of(tokenizer: PreTrainedTokenizerBase, size: int) -> int:
    return max(tokenizer.get_vocab().values(), default=0)


class Vocabulary(NamedTuple):
    read: int  # rows of the target's embedding
    written: int  # tokens that its lm_head gives logits of

    @classmethod
    def of(cls, target: Target) -> "Vocabulary":
        return cls(target.model.get_input_embeddings().num_embeddings, target.vocab_size)

    def unknown(self, documents: Documents) -> np.ndarray:
        """Return (documents,) int64: in each document the first token that the target lacks, -1 if it has all."""
        found = np.full(len(documents), -1, np.int64)
        for numbers, tokens, flags in documents.blocks():
            lacks = np.flatnonzero((tokens >= self.read) | ((tokens >= self.written) & (flags > 0)))[::-1]
            ends = documents.sizes[numbers.start : numbers.stop].cumsum()
            found[numbers.start + np.searchsorted(ends, lacks, side="right")] = tokens[lacks]
        return found
