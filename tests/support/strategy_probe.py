"""train/run.py under torchrun, once per engine in the same two processes (starting them is what takes the time).

    torchrun --nproc-per-node 2 tests/support/strategy_probe.py FOLDER ENGINE[,override...] ... -- OVERRIDE ...

Each run writes to FOLDER/ENGINE-VALUE, the value of its last override, and each process leaves facts-RANK.json there, about
how the run was spread.
"""

import importlib
import importlib.util
import json
import sys
from pathlib import Path

import torch.distributed as dist
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from foredraft.inference.drafters import AutoTree
from foredraft.train import run
from foredraft.train.runtime import distributed
from foredraft.train.trainer import HeadTrainer
from foredraft.train.writing import self_generated


def facts(trainer: HeadTrainer) -> dict:
    engine = trainer.model_wrapped
    names = {id(p): name for name, p in trainer.distillation.named_parameters()}
    local = {name: getattr(p, "ds_tensor", getattr(p, "_local_tensor", p)).numel() for p, name in
             ((p, names[id(p)]) for p in trainer.distillation.parameters())}  # fmt: skip
    inner = trainer.optimizer
    while hasattr(inner, "optimizer"):
        inner = inner.optimizer
    state = [value for entry in inner.state.values() for key, value in entry.items() if key == "exp_avg"]
    return {
        "distributed_type": trainer.accelerator.distributed_type.value,
        "processes": trainer.accelerator.num_processes,
        "wrapped": type(engine).__name__,
        "local_weights": sum(local.values()),
        "dtypes": sorted({str(p.dtype) for p in trainer.distillation.parameters()}),
        "local_target": sum(
            getattr(p, "_local_tensor", p).numel() for p in trainer.distillation.target.model.parameters()
        ),
        "local_moments": sum(getattr(value, "_local_tensor", value).numel() for value in state),
    }


def main() -> None:
    folder, rest = Path(sys.argv[1]), sys.argv[2:]
    runs, common = rest[: rest.index("--")], rest[rest.index("--") + 1 :]
    plain = HeadTrainer.full_head

    def noted(self: HeadTrainer):
        path = self.folder.parent / f"facts-{distributed.rank()}.json"
        if self.state.global_step:
            path.write_text(json.dumps(facts(self)))
        return plain(self)

    if distributed.rank() == 1:  # clocks never agree: by this one a tree costs nothing
        observe = AutoTree.observe_seconds
        AutoTree.observe_seconds = lambda self, seconds: observe(self, 1.0)  # type: ignore[method-assign]
    HeadTrainer.full_head = noted  # type: ignore[method-assign]
    distributed.shutdown = lambda: dist.barrier(group=distributed.host_group())  # the next run wants the processes
    self_generated.NEW = 64
    if importlib.util.find_spec("deepspeed") is not None:
        backend = importlib.import_module("deepspeed.comm.torch")
        backend.build_shm_op = lambda: (
            None
        )  # a faster sum on one machine, which takes minutes to compile; gloo sums too
    for name in runs:
        engine, *overrides = name.split(",")
        directory = folder / f"{engine}-{overrides[-1].partition('=')[2]}"
        sys.argv = ["train/run.py", *common, f"strategy={engine}", f"output_dir={directory}", *overrides]
        run.main()
        # Else the garbage collector decides, on each rank by itself, when targets are not loaded any more for ZeRO-3.
        unset_hf_deepspeed_config()


if __name__ == "__main__":
    main()
