"""What every kind of head must do alike: learn from the right tokens, and leave the target's text unchanged. And what a new
kind takes: one file and one yaml."""

import importlib
import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from foredraft.heads import Target, checkpoint, load_head, save_head
from foredraft.heads.base import BlockHead, PackedBatch, RecurrentHead
from foredraft.heads.caches import cuda_graphs
from foredraft.inference.drafters import AutoTree, drafter_for, load_drafter
from foredraft.inference.drafters.base import Accepted
from foredraft.inference.sampling import Sampling, SamplingParams
from foredraft.train import parity_gate
from foredraft.train.losses import Prediction
from foredraft.train.module import DistillationModel
from tests.support import ROOT, nightly_but, typed
from tests.support.batches import PROMPT
from tests.support.configs import composed
from tests.support.decoding import SETTINGS, check_drafts
from tests.support.documents import blocks
from tests.support.head_factory import KINDS, PLAIN_KINDS, make_head
from tests.support.modes import Tape
from tests.support.processes import succeeded
from tests.support.tiny import TEXT

# -- what is learned --------------------------------------------------------------------------------------------------


def answers_of(head, target: Target) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return per depth what the loss compared with, and with which weight, for a prompt of 10 tokens and an answer of 6."""
    tokens = torch.tensor([PROMPT[:16]])
    places = torch.arange(16)[None]
    text = PackedBatch(tokens, places >= 10, torch.zeros_like(tokens), places)
    seen: list[Prediction] = []

    def loss(draft: Prediction, answer: Prediction) -> torch.Tensor:
        seen.append(answer)
        return draft.logits.float().sum(-1)

    outcome = DistillationModel(head, target, loss)(*text)
    assert len(seen) == head.depth
    return [(answer.hidden, count) for answer, count in zip(seen, outcome.counts.tolist(), strict=True)]


def test_the_loss_compares_with_just_the_supervised_tokens(target, head):
    """Train on tokens 10..15. The target chose them by its hidden states 9..14: these are the answers, all of them, at
    every depth."""
    states = target.forward(torch.tensor([PROMPT[:16]]), layers=[target.num_layers]).aux_hidden_states[0]
    for answers, count in answers_of(head, target):
        assert count == 6
        torch.testing.assert_close(answers, states[9:15])


# -- what is drafted --------------------------------------------------------------------------------------------------


FEW = ("eagle3", "medusa", "dflash", "draft_model")
MORE = (("fixed", "greedy"), ("fixed", "sampled"), ("auto", "greedy"), ("auto", "top-p"))
WAYS = [(kind, "fixed", "top-p") for kind in KINDS] + [(kind, *way) for kind in FEW for way in MORE]
BY_DAY = [(kind, "fixed", "top-p") for kind in PLAIN_KINDS] + [
    (kind, "auto", "greedy") for kind in ("eagle3", "dflash")
]


@pytest.mark.parametrize(("kind", "tree", "name"), nightly_but(WAYS, *BY_DAY))
def test_text_is_the_targets_own(target, kind, tree, name):
    head = make_head(kind, target)
    rows = torch.tensor([PROMPT[:12], [0] * 5 + PROMPT[20:27], [0] * 11 + PROMPT[5:6]])
    mask = (torch.arange(12) >= torch.tensor([[0], [5], [11]])).long()
    every_level = {"min_probability": 0.0} if isinstance(head, RecurrentHead | BlockHead) else {}
    drafter = drafter_for(head, target, nodes=9, tree=tree, **every_level)
    assert isinstance(drafter, AutoTree) == (tree == "auto")
    check_drafts(target, drafter, rows, mask, max_new_tokens=16, seed=3, **SETTINGS[name])


@pytest.mark.parametrize("kind", nightly_but(KINDS, "eagle3", "dflash"))
def test_a_head_drafts_in_half_precision_for_a_target_in_float32(target, kind):
    """Check that it does as on a CPU that multiplies in bfloat16, where all but small heads are loaded in it."""
    drafter = drafter_for(make_head(kind, target).to(torch.bfloat16), target, nodes=9)
    for name in ("greedy", "sampled"):
        check_drafts(target, drafter, torch.tensor([PROMPT[:12]]), max_new_tokens=16, seed=3, **SETTINGS[name])


@pytest.mark.parametrize(
    ("dtype", "small", "products", "expected"),
    [
        ("float32", False, True, torch.bfloat16),
        ("float32", False, False, torch.float32),
        ("bfloat16", False, False, torch.bfloat16),
        ("float32", True, True, torch.float32),
        ("bfloat16", True, True, torch.float32),
    ],
)
def test_a_head_is_loaded_in_the_dtype_of_the_fastest_drafts(
    tiny_path, tmp_path, monkeypatch, dtype, small, products, expected
):
    target = Target.from_pretrained(tiny_path, dtype=dtype, device="cpu")
    save_head(make_head("medusa", target), tmp_path, target)
    monkeypatch.setattr(checkpoint, "SMALL_HEAD", 1 << 22 if small else 0)
    monkeypatch.setattr(checkpoint, "has_bfloat16_products", lambda device: products)
    monkeypatch.setattr(checkpoint, "is_faster", lambda dtype: products)
    assert load_head(tmp_path, target).dtype == expected


@torch.no_grad()
@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("kind", ["eagle3", "hydra", "medusa"])
def test_a_pruned_head_drafts_its_best_tokens_under_their_own_names(target, kind, noisy):
    """Compute depth 1 by hand: the training forward's logits, the noise of the tokens that they stand for, the target's
    ids."""
    head = make_head(kind, target)
    ids = head.draft_ids
    assert ids is not None and len(ids) < target.vocab_size and ids[0] > 0
    tokens = torch.tensor([PROMPT])
    aux_hidden_states = target.forward(tokens, layers=head.layers).aux_hidden_states[:, :-1]
    drafter = drafter_for(head, target, nodes=8)
    drafter.begin(1, 64, Sampling.of([SamplingParams(temperature=1.0)] * 1, 1024))
    gumbel = torch.randn(1, drafter.depth + 1, target.vocab_size) if noisy else None
    tree = drafter.propose(Accepted(tokens[:, 1:], aux_hidden_states, [len(PROMPT) - 1], [PROMPT]), gumbel)
    assert torch.isin(tree.tokens[0, 1:], ids).all()
    logits = parity_gate.trained_logits(head, target, [*PROMPT, 0, 0, 0, 0], len(PROMPT) - 2)[0]
    scores = logits if gumbel is None else logits.log_softmax(-1) + gumbel[0, 0, ids]
    first = set(tree.tokens[0][tree.depths[0] == 1].tolist())
    assert first == set(ids[scores.topk(len(first)).indices].tolist())


CAPTURED = ["eagle3", "hydra_pp", "medusa", "mtp", "dflash2", "dspark rnn", "xpress", "p_eagle"]


@pytest.mark.parametrize("kind", nightly_but(CAPTURED, "eagle3", "dspark rnn"))
def test_the_parity_gate_passes_where_steps_are_captured(kind, target, monkeypatch):
    """Check that it sees each of the drafter's logits once: a capture runs the head's code again."""
    monkeypatch.setitem(cuda_graphs.CAPTURES, "cpu", Tape)
    assert parity_gate.check(make_head(kind, target), target, PROMPT) < 1e-3


# -- one file and one yaml --------------------------------------------------------------------------------------------


@pytest.fixture
def train(tiny_path, tmp_path, here):
    """Return train(*arguments), the command that users type, which returns the directory that it leaves."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(4):
        (texts / f"{number}.txt").write_text(TEXT[: 1200 + 7 * number])
    small = typed(f"""
        preset=test_model target.path={tiny_path} target.device=cpu target.dtype=float32
        data=text data.path={texts} self_generated_tokens=0 max_length=64 trainer.max_steps=2 trainer.bf16=false
        eval.final_num_prompts=2 eval.prompt_tokens=16 eval.max_new_tokens=8 eval.steps=0
        eval.timed_prompts=1 output_dir=out
    """)

    def run(*arguments: str) -> Path:
        succeeded(here(*small, *arguments))
        return tmp_path / "out"

    return run


def test_a_new_head_is_one_file_and_one_yaml(train, target, tmp_path, monkeypatch):
    """Train the head of the developer page by the command that users type, save it, load it, and decode with it; nothing in
    the project contains its name."""
    page, own = ROOT / "docs" / "developer" / "add-a-head.md", tmp_path / "own"
    (own / "head").mkdir(parents=True)
    (own / "shared.py").write_text(blocks(page, "python")[0].text)
    settings = blocks(page, "yaml")[0].text.replace("foredraft.heads.shared", "shared")
    (own / "head" / "shared.yaml").write_text(settings)
    monkeypatch.syspath_prepend(own)
    directory = train(f"hydra.searchpath=[file://{own}]", "head=shared", "head.num_heads=2")
    metrics = json.loads((directory / "metrics.json").read_text())
    assert metrics["head"] == "shared" and metrics["identical_greedy"] == metrics["identical_sampled"] == 1.0
    head = load_head(directory / "head", target)
    assert isinstance(head, importlib.import_module("shared").SharedHead) and head.depth == 2
    check_drafts(target, load_drafter(str(directory / "head"), target, tree="fixed"), torch.tensor([PROMPT]))


def test_a_head_may_choose_loss_and_objective_and_the_command_line_overrules_it():
    lines = ("head=medusa", "head=eagle", "head=eagle loss=ce", "head=xpress", "head=eagle3_1")
    chosen = {line: composed("train", *line.split()) for line in lines}
    losses = {line: cfg.loss for line, cfg in chosen.items()}
    assert losses["head=medusa"] == "kl_div" and losses["head=eagle"] == "regression"
    assert losses["head=eagle loss=ce"] == "ce"
    assert chosen["head=xpress"].objective["_target_"] == "foredraft.train.blocks.SelfFedDistillation"
    assert chosen["head=eagle3_1"].head.fc_norm and chosen["head=eagle3_1"].head.norm_output


def test_a_draft_model_is_trained_like_any_head(train):
    directory = train("head=draft_model", "loss=tv", "head.lora_r=4", "trainer.optim=adamw")
    metrics = json.loads((directory / "metrics.json").read_text())
    assert metrics["head"] == "draft_model" and metrics["identical_greedy"] == 1.0
    LlamaForCausalLM.from_pretrained(directory / "head")
