"""data=accepted: what a server has logged of its requests, for a head that follows its traffic.

    {"id": .., "created": .., "prompt_ids": [..], "ids": [..], "accepted": [2, 0, ..], "drafted": [4, 4, ..]}

One row per request; `accepted` and `drafted` have a number per step after the prompt's, so step s gave accepted[s] + 1 tokens
and, where that is below drafted[s], the last of them stands where a draft was rejected:

    ids        w0 | w1 w2 w3 | w4 | ..        accepted [2, 0], drafted [4, 4]
    rejected               ~~   ~~
"""

import numpy as np
from transformers import PreTrainedTokenizerBase

from foredraft.train.data.conversations import assemble
from foredraft.train.data.corpus import Corpus
from foredraft.train.data.documents import REJECTED
from foredraft.train.data.encoding import Encoder
from foredraft.train.data.sources import Source


def corpus(
    tokenizer: PreTrainedTokenizerBase,
    path: str,
    rejection_weight: float = 2.0,
    max_samples: int | None = None,
    val_split: float = 0.05,
    num_proc: int | None = None,
    cache_dir: str | None = None,
) -> Corpus:
    """Load the logged requests. rejection_weight: of a draft whose token stands where one was rejected, against others; the
    mean weight is 1. Raises ValueError where nothing can be trained on."""
    if rejection_weight <= 0:
        raise ValueError(f"data.rejection_weight={rejection_weight} must be above 0; 1 weighs all drafts alike")
    encoder = Encoder(tokenizer, Source(path, max_samples=max_samples))
    data = assemble([encoder], None, val_split, num_proc, cache_dir)
    counts = np.sum([np.bincount(flags, minlength=REJECTED + 1) for _, _, flags in data.train.blocks()], axis=0)
    card = data.card | {"rejected_share": round(float(counts[REJECTED] / counts[1:].sum()), 4)}
    if rejection_weight != 1:
        relative = np.array([0, 1, rejection_weight])
        data.train.weights = relative * counts[1:].sum() / (relative * counts).sum()
    return data._replace(card=card)
