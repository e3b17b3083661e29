"""A trainer of a small head, made as a run makes it."""

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from foredraft.heads.eagle3 import Eagle3Head
from foredraft.heads.target_model import Target
from foredraft.train.data.packing import Document, Packed
from foredraft.train.data.row_order import EpochStream
from foredraft.train.losses import kl_div
from foredraft.train.module import DistillationModel
from foredraft.train.trainer import HeadTrainer, arguments
from tests.support.configs import composed


def make_trainer(target: Target, directory: Path, optim: str = "adamw", n_gpu: int = 0, **settings: Any) -> HeadTrainer:
    """Make a trainer. n_gpu: what transformers finds on a machine with this many."""
    settings = {
        "bf16": False,
        "optim": optim,
        "per_device_train_batch_size": 2,
        "max_steps": 1,
        "max_minutes": 0.0,
        "gradient_accumulation_steps": 1,
    } | settings
    trainer = composed("train", f"output_dir={directory}").trainer
    OmegaConf.set_struct(trainer, False)  # as +trainer.<name>= does
    args = arguments(OmegaConf.merge(trainer, settings), target)
    args._n_gpu = n_gpu
    packed = Packed([Document(list(range(1, 200)), [True] * 199)], 16, seed=0)
    head = Eagle3Head.for_target(target, ttt_steps=2)
    return HeadTrainer(
        DistillationModel(head, target, kl_div),
        args,
        train_dataset=EpochStream(packed, 2 * args.max_steps * args.gradient_accumulation_steps, 0),
        measure=lambda head: {"acceptance_length": 1.0},
    )
