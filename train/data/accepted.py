"""data=accepted: what a server has logged of its requests, for a head that follows its traffic.

    {"id": .., "created": .., "prompt_ids": [..], "ids": [..], "accepted": [2, 0, ..], "drafted": [4, 4, ..]}

One row per request; `accepted` and `drafted` have a number per step after the prompt's, so step s gave accepted[s] + 1 tokens
and, where that is below drafted[s], the last of them stands where a draft was rejected:

    ids        w0 | w1 w2 w3 | w4 | ..        accepted [2, 0], drafted [4, 4]
    rejected               ~~   ~~
"""

import hashlib
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from foredraft.train.data.conversations import assemble
from foredraft.train.data.corpus import Corpus, highest_id
from foredraft.train.data.documents import REJECTED, Document
from foredraft.train.data.encoding import CODE, Encoder, encode, hash_of_code
from foredraft.train.data.layouts import SkippedRow
from foredraft.train.data.sources import Row, Source


class LoggedRequests(Encoder):
    """Read rows as a server logs them (inference/serve). Their tokens are the target's own: there is nothing to tokenize."""

    def digest(self) -> str:
        facts = f"{self.source.digest()} {len(self.tokenizer)}"
        return hashlib.sha256(hash_of_code((*CODE, "accepted")) + facts.encode()).hexdigest()[:16]

    def documents(self, row: Row) -> tuple[list[Document], Any]:
        if isinstance(row.value, SkippedRow):
            raise row.value
        try:
            prompt, ids, accepted, drafted = (row.value[name] for name in ("prompt_ids", "ids", "accepted", "drafted"))
        except (KeyError, TypeError):
            raise SkippedRow("no request as a server logs it") from None
        if not prompt or not ids:
            raise SkippedRow("no tokens in it: the server logs them with log_text=true only")
        if max(*prompt, *ids) > highest_id(self.tokenizer):
            raise SkippedRow("tokens of another target")
        flags = [0] * len(prompt) + [1] * len(ids)
        end = len(prompt) + 1  # the prompt's own step gave the first
        for took, tried in zip(accepted, drafted, strict=False):
            end += took + 1
            if took < tried and end <= len(flags):
                flags[end - 1] = REJECTED
        return [Document([*prompt, *ids], flags)], [{"role": "user", "content": repr(prompt)}]

    def check(self) -> None:
        if next(self.source.rows(), None) is None:
            raise ValueError(f"data.path={self.source.path} gives nothing to train on: it has no rows")


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
    encoder = LoggedRequests(tokenizer, Source(path, max_samples=max_samples))
    data = assemble([encode(encoder, cache_dir, num_proc)], [encoder], None, val_split)
    counts = np.sum([np.bincount(flags, minlength=REJECTED + 1) for _, _, flags in data.train.blocks()], axis=0)
    card = data.card | {"rejected_share": round(float(counts[REJECTED] / counts[1:].sum()), 4)}
    if rejection_weight != 1:
        relative = np.array([0, 1, rejection_weight])
        data.train.weights = relative * counts[1:].sum() / (relative * counts).sum()
    return data._replace(card=card)
