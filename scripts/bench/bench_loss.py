"""Peak memory of the EAGLE-3 loss, chunked and not:

    python scripts/bench/bench_loss.py [--batch 4 --length 2048 --skip-whole]

A random target and head, thin (hidden 16, one layer, one attention head) so that logits are all that counts, with the
vocabulary of Llama 3 and the paper's 7 steps. Each case runs forward and backward in a separate process, which reports how
much its peak memory grew, gradients included, in bytes and in units of one step's float32 logits.
"""

import argparse
import json
import resource
import subprocess
import sys
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from foredraft.heads.eagle3 import Eagle3Head
from foredraft.heads.target import Target
from foredraft.train import losses
from foredraft.train.module import DistillationModel

HIDDEN, STEPS = 16, 7


def peak(device: torch.device) -> int:
    """Most bytes held so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def measure(batch: int, length: int, vocab: int, chunk: int) -> dict:
    """One forward and backward. chunk: rows of logits at a time, 0 for the default."""
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = LlamaConfig(
        vocab_size=vocab,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=length,
    )
    target = Target(LlamaForCausalLM(shape).to(device))
    distillation = DistillationModel(
        Eagle3Head.for_target(target, depth=STEPS, layers=[0, 1]), target, losses.soft, chunk=chunk or None
    )
    tokens = torch.randint(vocab, (batch, length), device=device)
    places = torch.arange(length, device=device).repeat(batch, 1)
    before, start = peak(device), time.perf_counter()
    outcome = distillation(tokens, torch.ones_like(tokens).bool(), torch.zeros_like(tokens), places)
    outcome.loss.backward()
    grown, one_step = peak(device) - before, 4 * batch * length * vocab
    return {
        "bytes": grown,
        "logits_of_one_step": one_step,
        "ratio": round(grown / one_step, 3),
        "loss": round(outcome.loss.item(), 5),
        "seconds": round(time.perf_counter() - start, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=128_256)
    parser.add_argument("--skip-whole", action="store_true", help="do not measure the loss in one piece")
    parser.add_argument("--chunk", type=int, help="measure this size only, in this process")
    args = parser.parse_args()
    if args.chunk is not None:
        print(json.dumps(measure(args.batch, args.length, args.vocab, args.chunk)))
        return
    print(f"EAGLE-3 loss, {STEPS} steps, batch {args.batch} x {args.length}, vocabulary {args.vocab:,}", flush=True)
    for name, chunk in {"chunked": 0, **({} if args.skip_whole else {"in one piece": 1 << 62})}.items():
        sizes = ["--batch", str(args.batch), "--length", str(args.length), "--vocab", str(args.vocab)]
        run = subprocess.run(
            [sys.executable, __file__, *sizes, "--chunk", str(chunk)], capture_output=True, text=True, check=False
        )
        if run.returncode:
            reason = run.stderr.strip().rpartition("\n")[2] or f"ended by signal {-run.returncode}: out of memory?"
            print(f"{name:13} failed: {reason}", flush=True)
            continue
        found = json.loads(run.stdout)
        shown = f"{found['bytes'] / 1e9:.2f} GB, {found['ratio']:.2f} times one step's logits, {found['seconds']} s"
        print(f"{name:13} {shown}, loss {found['loss']}", flush=True)


if __name__ == "__main__":
    main()
