"""Writes stored features slowly, as one of two processes, so that a test can kill it halfway:

python -m tests.support.feature_writer TARGET FOLDER RANK
"""

import sys
import time
from pathlib import Path

import torch

from foredraft.heads import Target
from foredraft.train.data.packing import Packed
from foredraft.train.hidden_states import offline
from tests.support.batches import documents

LAYERS = [1, 2, 3]


def rows() -> Packed:
    torch.manual_seed(5)
    return Packed(documents(40, 25, 33, 60, 21, 50, 44), length=32, seed=0)


def facts(target: Target) -> dict:
    return offline.describe(rows(), target, LAYERS, "float32", 2)


def main(path: str, folder: str, rank: str) -> None:
    torch.set_num_threads(1)
    target = Target.from_pretrained(path, dtype="float32", device="cpu")
    shard = offline.shard

    def slow(*given):
        time.sleep(0.3)
        return shard(*given)

    offline.shard = slow
    offline.write(rows(), target, facts(target), Path(folder), 2, int(rank), 2)


if __name__ == "__main__":
    main(*sys.argv[1:])
