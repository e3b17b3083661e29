"""Targets in pieces, in four processes that are two nodes:

torchrun --nproc-per-node 4 tests/support/sharding_probe.py TARGET ...
"""

import os
import sys
from unittest.mock import patch

import torch
import torch.distributed as dist

from foredraft.heads import Target
from foredraft.heads.target_model.capabilities import Capabilities
from foredraft.heads.target_model.sharding import COLLECTIVE
from foredraft.train.hidden_states import online
from tests.support.batches import batch


def compare(path: str) -> None:
    whole = Target.from_pretrained(path, dtype="float32", device="cpu")
    rank = int(os.environ["RANK"])
    torch.manual_seed(rank)  # each process has its own text
    texts = [batch(40, 25), batch(*((9, 30, 12, 14) if rank else (65,)))]
    total = sum(parameter.numel() for parameter in whole.model.parameters())
    for kind in COLLECTIVE:
        target = Target.from_pretrained(path, dtype="float32", device="cpu", sharding=kind)
        for text, packed in zip(texts, (True, False), strict=True):  # unchanged, and document by document
            with torch.no_grad(), patch.object(Capabilities, "packed_rows", packed):
                found, wanted = (online.forward_target(each, text, [1, 3]) for each in (target, whole))
            for ours, theirs in zip(found, wanted, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)
        here = sum(getattr(p, "_local_tensor", p).numel() for p in target.model.parameters())
        assert 0.4 < here / total < 0.7, f"{kind}: {here} of {total} weights here, not those of half a node"


def main(*paths: str) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    torch.set_num_threads(1)
    for path in paths:
        compare(path)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
