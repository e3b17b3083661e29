"""A log of accepted drafts, one JSON line per text, to train a head on real traffic.

{"id", "created" (seconds since 1970), "prompt_ids", "ids" (both null unless texts are logged), "accepted", "drafted"}

The last two contain a number per step after the prompt's: the number of accepted drafts, and the maximum depth of the tree
(trees of a batch are padded to the largest). So step s added accepted[s] + 1 tokens, up to the end of the text. If its tree
was deeper, the drafts at the next depth were rejected. With texts, "seed" and "temperature" are logged too.
"""

import json
import os
from pathlib import Path
from typing import Any

from foredraft.inference.serve.openai.completion import Answer


class AcceptedLog:
    def __init__(self, path: str | Path, text: bool = False, limit: int | None = None):
        """Append to this file, readable only by this user if new. text: log the token ids of prompts and answers. limit:
        bytes, after which the file starts again. Other programs may rename the file (logrotate, train/learn.py)."""
        self.path, self.text, self.limit = path, text, limit
        try:
            os.close(self.open())
        except OSError as error:
            raise ValueError(f"log_accepted={path} cannot be written ({error.strerror}): choose another file") from None

    def open(self) -> int:
        return os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def write(self, answer: Answer) -> None:
        if not answer.request.speculative:
            return
        rows = [self.row(answer, choice) for choice in answer.choices.values()]
        data = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
        file = self.open()
        try:
            if self.limit is not None and os.fstat(file).st_size > self.limit:
                os.ftruncate(file, 0)
            written = os.write(file, data)  # in one call, so that lines never mix
            if written < len(data):  # the disk is full
                os.ftruncate(file, os.fstat(file).st_size - written)
                raise OSError(f"only {written} of {len(data)} bytes were written")
        finally:
            os.close(file)

    def row(self, answer: Answer, choice: Any) -> dict[str, Any]:
        row = {"id": f"{answer.id}-{choice.index}", "created": answer.created, "prompt_ids": None, "ids": None}
        row |= {"accepted": choice.accepted, "drafted": choice.drafted}
        if self.text:
            request = choice.job.request
            row |= {"prompt_ids": request.prompt, "ids": choice.whole.ids}
            row |= {"seed": request.seed, "temperature": request.params.temperature}
        return row
