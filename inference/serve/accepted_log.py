"""A log of accepted drafts, one JSON line per text, to train a head on real traffic.

{"id", "created" (seconds since 1970), "prompt_ids", "ids" (both null unless texts are logged), "accepted", "drafted"}

The last two contain a number per step after the prompt's: the number of accepted drafts, and the maximum depth of the tree
(trees of a batch are padded to the largest). So step s added accepted[s] + 1 tokens, up to the end of the text. If its tree
was deeper, the drafts at the next depth were rejected.
"""

import json
import os
from pathlib import Path

from foredraft.inference.serve.completion import Answer


class AcceptedLog:
    def __init__(self, path: str | Path, text: bool = False):
        """Append to this file, readable only by this user if new. text: log the token ids of prompts and answers."""
        self.text = text
        try:
            self.file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        except OSError as error:
            raise ValueError(f"log_accepted={path} cannot be written ({error.strerror}): choose another file") from None

    def write(self, answer: Answer) -> None:
        if not answer.request.speculative:
            return
        for choice in answer.choices.values():
            line = {
                "id": f"{answer.id}-{choice.index}",
                "created": answer.created,
                "prompt_ids": choice.job.request.prompt if self.text else None,
                "ids": choice.ids if self.text else None,
                "accepted": choice.accepted,
                "drafted": choice.drafted,
            }
            data = json.dumps(line).encode() + b"\n"
            written = os.write(self.file, data)  # in one call, so that lines never mix
            if written < len(data):  # the disk is full
                os.ftruncate(self.file, os.fstat(self.file).st_size - written)
                raise OSError(f"only {written} of {len(data)} bytes were written")
