"""Measure what a process holds of a row that all share:

    torchrun --nproc-per-node N scripts/bench/context_parallel.py target=ORG/NAME head=eagle3 max_length=16384

The row is one document of random tokens, and every token is in the loss. Prints the loss, which must not depend on N, and the
tokens per second and the peak memory of the first process in one forward and backward, without what it held before.
"""

import time
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate.utils import send_to_device
from hydra.utils import instantiate
from omegaconf import DictConfig

from foredraft.cli import entry
from foredraft.heads import Target
from foredraft.heads.base import PackedBatch, draft_loss_mask
from foredraft.train import losses
from foredraft.train.runtime import distributed
from foredraft.train.runtime.context_parallel import ContextParallel
from foredraft.train.runtime.memory import peak_memory
from foredraft.train.runtime.strategy import choose_device
from foredraft.train.start import new_head


def restart_peak(device: torch.device) -> int:
    """Forget the peak of the memory so far (Linux, CUDA). Return the bytes that are held now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        Path("/proc/self/clear_refs").write_text("5")
    return peak_memory(device)


@entry("context_parallel")
def main(cfg: DictConfig) -> None:
    torch.set_num_threads(cfg.threads)
    choose_device()
    processes = distributed.world_size()
    dist.init_process_group()
    target: Target = instantiate(cfg.target)
    torch.manual_seed(cfg.seed)
    head = new_head(cfg.head, target)
    head.on_train_begin(target)
    model = instantiate(cfg.objective, head=head, target=target, loss=losses.build(cfg.loss, cfg.loss_args))
    tokens = torch.randint(target.vocab_size, (1, cfg.max_length))
    everything = torch.ones_like(tokens, dtype=torch.bool)
    text = PackedBatch(tokens, everything, torch.zeros_like(tokens), torch.arange(cfg.max_length)[None])
    prepared = model.prepare(text, step=0)
    text = text._replace(anchors=prepared.get("anchors"))
    counts = torch.stack([draft_loss_mask(text, depth).sum() for depth in range(1, head.depth + 1)])
    model.num_items = counts.to(target.device)
    part = dict(zip(PackedBatch._fields[:4], text[:4], strict=True)) | prepared
    if processes > 1:
        part = ContextParallel(processes).exchange(part, head.depth)[0]
        if text.anchors is None:
            part["label_positions"] = model.label_positions_of(PackedBatch.of(part))
    part = send_to_device(part, target.device)
    before = restart_peak(target.device)
    start = time.perf_counter()
    outcome = model(**part)
    outcome.loss.backward()
    loss = outcome.loss.detach()
    dist.all_reduce(loss)
    loss = loss.item()  # waits for the device
    seconds, peak = time.perf_counter() - start, peak_memory(target.device) - before
    if distributed.rank() == 0:
        print(
            f"{head.kind}, a row of {cfg.max_length:,} tokens in {processes} processes: loss {loss:.6f}, peak "
            f"{peak / 2**20:,.0f} MiB, {cfg.max_length / seconds:,.0f} tokens/s",
            flush=True,
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
