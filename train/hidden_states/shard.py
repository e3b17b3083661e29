"""Read single rows of a safetensors file and no other byte: with a mapping the kernel would read ahead, up to megabytes for
each row of a random order."""

import json
import os
import sys
from pathlib import Path

import torch
from torch import Tensor

from foredraft.train.hidden_states.storage import STORED

AGAIN = "delete it and the manifest, and both are written again"


class Shard:
    def __init__(self, file: Path):
        """Open a file. Raise ValueError for one that is not a complete safetensors file."""
        self.file = file.open("rb", buffering=0)
        if sys.platform == "linux":
            os.posix_fadvise(self.file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        try:
            self.begin = 8 + int.from_bytes(self.file.read(8), "little")
            self.tensors = json.loads(self.file.read(self.begin - 8))
            self.owner = json.loads(self.tensors.pop("__metadata__", {}).get("foredraft", "{}"))
            whole = self.begin + max(facts["data_offsets"][1] for facts in self.tensors.values())
        except (ValueError, KeyError, OverflowError, MemoryError) as error:
            raise ValueError(f"{file} is damaged: its header cannot be read ({error}); {AGAIN}") from error
        if file.stat().st_size != whole:
            raise ValueError(f"{file} is damaged: it has {file.stat().st_size} bytes and should have {whole}; {AGAIN}")

    def row(self, place: int) -> dict[str, Tensor]:
        found = {}
        for name, facts in self.tensors.items():
            tensor = torch.empty(facts["shape"][1:], dtype=STORED[facts["dtype"]])
            start = self.begin + facts["data_offsets"][0] + place * tensor.nbytes
            read = os.preadv(self.file.fileno(), [tensor.flatten().view(torch.uint8).numpy().data], start)
            assert read == tensor.nbytes, f"{self.file.name} ends within a row that its checksum covers"
            found[name] = tensor
        return found
