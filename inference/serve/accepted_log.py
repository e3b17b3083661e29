"""What became of drafts, one JSON line per text, for training a head on what it met in use.

{"id", "created" (seconds since 1970), "prompt_ids", "ids" (both null unless texts are logged), "accepted", "drafted"}

The last two have a number per step after the prompt's: how many drafts were accepted, and how deep the tree was at most
(trees of a batch are padded to its largest). So step s gave accepted[s] + 1 tokens, less what the text's end cut off, and
where it drafted deeper, its drafts there were rejected.
"""

import json
import os
from pathlib import Path

from foredraft.inference.serve.completion import Answer


class AcceptedLog:
    def __init__(self, path: str | Path, text: bool = False):
        """path: lines are added to it; nobody else may read a new file. text: log the token ids of prompts and answers."""
        self.text = text
        try:
            self.file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        except OSError as error:
            raise ValueError(f"log_accepted={path} cannot be written: {error.strerror}") from None

    def write(self, answer: Answer) -> None:
        if not answer.asked.speculative:
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
            written = os.write(self.file, data)  # at once, so that lines never mix
            if written < len(data):  # a full disk
                os.ftruncate(self.file, os.fstat(self.file).st_size - written)
                raise OSError(f"{written} of {len(data)} bytes were written")
