"""Every head of conf/head learns: a floor of its acceptance length after few steps on the test model's own text."""

from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate
from safetensors.torch import load_file
from transformers import set_seed

from foredraft.heads import Target
from foredraft.inference import drafter_for
from foredraft.train.data.packing import Document, Packed
from foredraft.train.data.row_order import EpochStream
from foredraft.train.judge import decode
from foredraft.train.learn import acceptance
from foredraft.train.losses import build
from foredraft.train.start import new_head
from foredraft.train.trainer import HeadTrainer, arguments
from tests.support import ROOT, names, typed
from tests.support.configs import composed

pytestmark = pytest.mark.nightly

STEPS, ROWS, GIVEN, LENGTH, TRAINED, PROMPTS, NEW = 20, 4, 16, 64, 80, 24, 16
# Measured values (on two cores of an x86 CPU, torch 2.13) minus three standard errors over the prompts.
FLOORS = {
    **{"dflash": 1.375, "dflash2": 1.303, "domino": 1.438, "draft_model": 1.385, "dspark": 1.353, "eagle": 1.279},
    **{"eagle3": 1.373, "eagle3_1": 1.349, "hydra": 1.313, "hydra_pp": 1.426, "jetspec": 1.343, "medusa": 1.336},
    **{"mtp": 1.545, "p_eagle": 1.469, "xpress": 1.191},
}


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    """Return texts of GIVEN tokens and what the test model wrote after them."""
    stored = load_file(ROOT / "scripts/test_model/self_generated/self_generated.safetensors")
    parts = stored["tokens"].split(stored["lengths"].tolist())
    return [part[:LENGTH].tolist() for part in parts if len(part) >= LENGTH][: TRAINED + PROMPTS]


@pytest.mark.parametrize("kind", names("head"))
def test_a_head_drafts_after_few_steps(kind: str, embedded: Target, texts: list[list[int]], tmp_path: Path) -> None:
    set_seed(0)
    changes = f"trainer.max_steps={STEPS} trainer.logging_steps={STEPS} trainer.per_device_train_batch_size={ROWS}"
    changes += (
        f" preset=test_model trainer.max_minutes=0 trainer.bf16=false +trainer.save_strategy=no output_dir={tmp_path}"
    )
    config = composed("train", f"head={kind}", *typed(changes))
    flags = [place >= GIVEN for place in range(LENGTH)]
    packed = Packed([Document(text, flags) for text in texts[:TRAINED]], LENGTH, seed=0)
    counts = torch.tensor(texts[:TRAINED]).flatten().bincount(minlength=embedded.vocab_size)
    head = new_head(config.head, embedded, counts)
    head.on_train_begin(embedded)
    objective = instantiate(config.objective, head=head, target=embedded, loss=build(config.loss, config.loss_args))
    stream = EpochStream(packed, STEPS * ROWS, 0)
    trainer = HeadTrainer(objective, arguments(config, embedded), lambda head: {}, train_dataset=stream)
    trainer.train()
    head.on_train_end()
    rows = [{"prompt_ids": text[:GIVEN], "ids": [0] * NEW, "temperature": 0} for text in texts[TRAINED:]]
    length, parts = acceptance(decode(embedded, drafter_for(head.eval(), embedded), rows))
    assert length > FLOORS[kind], f"{kind}: {length:.3f}, standard error {parts.std() / PROMPTS**0.5:.3f}"
