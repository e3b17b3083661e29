"""The Trainer as this project uses it: one device for a process, an optimizer that obeys its arguments, no second target."""

import datetime
import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.utils import DynamoBackend, TorchDynamoPlugin
from torch import Tensor, nn

from foredraft.heads.base import DraftHead, ParallelHead
from foredraft.heads.checkpoint import save_head
from foredraft.heads.eagle3 import Eagle3Head
from foredraft.heads.hydra import HydraHead
from foredraft.heads.medusa import MedusaHead
from foredraft.heads.target_model import Target
from foredraft.train import checks, parity_gate
from foredraft.train.data.packing import Document
from foredraft.train.optimizer import Float32Muon, MuonAdamW, build, multiplies_faster_in_bfloat16, schedule
from foredraft.train.runtime import callbacks, checkpoints, distributed
from foredraft.train.trainer import HeadTrainer, HeadTrainingArguments
from tests.support.batches import PROMPT
from tests.support.head_factory import make_head, make_trainer
from tests.support.processes import SMALL, complaint, succeeded
from tests.support.tiny import TEXT


def test_one_process_uses_one_of_several_devices(target: Target, tmp_path: Path):
    trainer = make_trainer(target, tmp_path, n_gpu=4)
    assert trainer.args.n_gpu == 1 and trainer.args.train_batch_size == 2
    trainer.train()
    assert not isinstance(trainer.model_wrapped, nn.DataParallel)
    assert trainer.state.global_step == 1


@pytest.mark.parametrize("optim", ["adamw", "muon"])
def test_the_optimizer_obeys_the_trainers_arguments(target: Target, tmp_path: Path, optim: str):
    given = {"weight_decay": 0.1, "adam_epsilon": 1e-3, "adam_beta1": 0.8, "adam_beta2": 0.7, "learning_rate": 0.5}
    trainer = make_trainer(target, tmp_path, optim, **given)
    trainer.create_optimizer()
    groups = {id(p): group for group in trainer.optimizer.param_groups for p in group["params"]}
    head = trainer.distillation.head
    assert len(groups) == len([p for p in head.parameters() if p.requires_grad])
    for parameter in (p for p in head.parameters() if p.requires_grad):
        group = groups[id(parameter)]
        assert group["weight_decay"] == (0.1 if parameter.ndim > 1 else 0.0)
        if "betas" in group:  # AdamW's; Muon has a momentum
            assert group["betas"] == (0.8, 0.7) and group["eps"] == 1e-3 and group["lr"] == 0.5
    assert any("betas" in group for group in groups.values())


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("eval_strategy", "steps", "set eval.steps"),
        ("fp16", True, "products are in bfloat16 or float32"),
        ("bf16_full_eval", True, "products are in bfloat16 or float32"),
        ("gradient_checkpointing", True, "lower trainer.per_device_train_batch_size"),
        ("auto_find_batch_size", True, "set trainer.per_device_train_batch_size"),
        ("use_liger_kernel", True, "it is for a model with embeddings"),
        ("push_to_hub", True, "foredraft push sends a finished head"),
    ],
)
def test_an_argument_that_would_be_ignored_is_refused(tmp_path: Path, name: str, value: object, remedy: str):
    with pytest.raises(ValueError, match=f"trainer.{name}={value} has no effect on a head: {remedy}"):
        HeadTrainingArguments(str(tmp_path), use_cpu=True, **{name: value})


@pytest.mark.parametrize("more", [{}, {"split_batches": False}, {"even_batches": True}, {"non_blocking": True}])
def test_settings_of_accelerate_that_do_no_harm(tmp_path: Path, more: dict):
    HeadTrainingArguments(str(tmp_path), use_cpu=True, accelerator_config=more)


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"save_only_model": True}, "^trainer.save_only_model=True saves no optimizer to resume with: set"),
        (
            {"ignore_data_skip": True},
            "^trainer.ignore_data_skip=True lets a resumed run learn its first rows once more",
        ),
        ({"accelerator_config": {"split_batches": True}}, "split_batches gives"),  # huggingface/transformers#38484
        (
            {"lr_scheduler_type": "warmup_stable_decay"},
            r"^trainer.lr_scheduler_type=warmup_stable_decay does not fit lr_scheduler_kwargs=.*num_decay_steps'\): change",
        ),
        ({"lr_scheduler_kwargs": {"min_lr": 1e-5}}, "=linear does not fit lr_scheduler_kwargs=.*unexpected .*'min_lr'"),
    ],
)
def test_an_argument_that_trainer_would_take_until_it_is_too_late_is_refused(
    tmp_path: Path, given: dict, complaint: str
):
    with pytest.raises(ValueError, match=complaint):
        HeadTrainingArguments(str(tmp_path), use_cpu=True, **given)


@pytest.mark.parametrize(
    "given",
    [
        {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 10}},
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}, "warmup_steps": 0.1},
        {"lr_scheduler_type": "constant"},
    ],
)
def test_schedules_of_transformers(tmp_path: Path, given: dict):
    rates = schedule(HeadTrainingArguments(str(tmp_path), use_cpu=True, **given), 100).lr_lambdas
    assert len(rates) == 1 and rates[0](50) == pytest.approx(1, abs=0.5) and 0 <= rates[0](100) <= 1


def test_accelerate_launch_chooses_neither_precision_nor_compiler(tmp_path: Path, monkeypatch):
    for name, value in {"ACCELERATE_MIXED_PRECISION": "fp16", "ACCELERATE_DYNAMO_BACKEND": "EAGER"}.items():
        monkeypatch.setenv(name, value)
    HeadTrainingArguments(str(tmp_path), use_cpu=True)
    assert TorchDynamoPlugin().backend == DynamoBackend.NO and os.environ["ACCELERATE_MIXED_PRECISION"] == "no"


@pytest.mark.parametrize(
    ("typed", "remedy"),
    [
        ("trainer.optim=sgd", "trainer.optim=sgd is not one of adamw, muon"),
        ("+trainer.use_liger_kernel=true", "trainer.use_liger_kernel=True has no effect on a head: it is for a model"),
        (
            "strategy_args={max_grad_norm:1}",
            "max_grad_norm=1 of strategy or strategy_args replaces trainer.max_grad_norm=0.5",
        ),
        ("+trainer.fsdp=full_shard", "trainer.fsdp=full_shard is part of a strategy: set strategy=fsdp, zero2"),
        ("+trainer.deepspeed=ds.json", "trainer.deepspeed=ds.json is part of a strategy: set strategy=fsdp, zero2"),
        ("+trainer.train_sampling_strategy=random", "trainer.train_sampling_strategy=random has no effect on a head"),
    ],
)
def test_a_wrong_argument_is_told_in_a_sentence(here, tiny_path, folder, typed: str, remedy: str):
    ended = here("head=medusa", *SMALL, f"target.path={tiny_path}", f"data.path={folder}", "output_dir=out", typed)
    assert complaint(ended).startswith(remedy)


def test_other_processes_wait_for_hours_while_one_writes_text(tmp_path: Path):
    """Check the timeout: gloo's default of half an hour ended runs on eight GPUs whose first process was still writing."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        backend = distributed.host_group()._get_backend(torch.device("cpu"))
        assert backend.options._timeout >= datetime.timedelta(days=1)
    finally:
        distributed.host_group.cache_clear()
        dist.destroy_process_group()


# A head that cannot be saved


def test_a_head_that_cannot_be_saved_is_not_trained(here, tiny_path, folder, tmp_path, monkeypatch):
    saved = Eagle3Head.to_config
    monkeypatch.setattr(Eagle3Head, "to_config", lambda self: saved(self) | {"norm_before_residual": True})
    given = [f"target.path={tiny_path}", f"data.path={folder}", "output_dir=out", "trainer.max_steps=2"]
    ended = here("head=eagle3", *SMALL, *given)
    assert complaint(ended).startswith(
        "parity gate: at depth 1 the training forward and the drafter with the saved files"
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", [Eagle3Head, MedusaHead, HydraHead])
def test_checking_a_head_changes_nothing(target: Target, kind):
    head = kind.for_target(target, 3)
    before = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    state = torch.random.get_rng_state()
    checks.check_saving(head, target, [Document(list(range(1, 60)), [True] * 59)])
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in head.state_dict().items())


def test_a_fault_that_the_start_of_a_head_hides_is_found_before_the_first_step(target: Target, monkeypatch):
    """Let training read the embedding of another token, which a new Hydra head multiplies by zero."""
    text = [Document(list(range(1, 60)), [True] * 59)]
    head, forward = HydraHead.for_target(target, 3), HydraHead.forward
    checks.check_saving(head, target, text)
    monkeypatch.setattr(
        HydraHead, "forward", lambda self, aux, e, packed: forward(self, aux, e.roll(1, dims=1), packed)
    )
    with pytest.raises(ValueError, match="parity gate: at depth 1 the training forward and the drafter differ"):
        checks.check_saving(head, target, text)


class Incomplete(MedusaHead):
    kind = "incomplete"


def unrelated() -> type[DraftHead]:
    """Return a new class of the kind "taken"."""
    methods = dict.fromkeys(("draft_all", "forward", "for_target", "logits", "to_config"), lambda self: None)
    return type("Unrelated", (ParallelHead,), {"kind": "taken", "layers": [1], "depth": 1, **methods})


def test_what_a_new_kind_of_head_lacks_is_named(target: Target):
    head = Incomplete.for_target(target, 3)
    checks.check_head(head)
    first, second = unrelated(), unrelated()
    del head.layers
    for wrong, message in (
        (head, r"Incomplete does not set layers, which heads/base\.py explains"),
        ({"foo": 3}, "the head's yaml builds dict, not a DraftHead"),
        (second(), rf"Unrelated\.kind=taken is the kind of {first.__module__}\.Unrelated: set another one"),
    ):
        with pytest.raises(ValueError, match=message):
            checks.check_head(wrong)


# The gate in the target's own precision


@pytest.mark.nightly
def test_a_run_in_half_precision_loads_one_target(here, tiny_path, folder, tmp_path, monkeypatch):
    loaded, original = [], Target.from_pretrained.__func__

    def count(cls, *args, **kwargs):
        loaded.append(args)
        return original(cls, *args, **kwargs)

    monkeypatch.setattr(Target, "from_pretrained", classmethod(count))
    given = [f"target.path={tiny_path}", f"data.path={folder}", "output_dir=out", "target.dtype=bfloat16"]
    fast = ["trainer.max_steps=1", "eval.steps=0", "eval.check_float32=false", "eval.timed_prompts=1"]
    ended = succeeded(here("head=medusa", *SMALL, *given, *fast, "eval.final_num_prompts=1", "trainer.bf16=false"))
    assert len(loaded) == 1 and "parity gate: training forward, drafter and saved files agree" in ended.out
    assert json.loads((tmp_path / "out/metrics.json").read_text())["identical_greedy"] is None


@pytest.fixture(scope="module")
def half(tiny_path: Path) -> Target:
    return Target.from_pretrained(tiny_path, dtype="bfloat16", device="cpu")


@pytest.mark.parametrize("kind", [Eagle3Head, MedusaHead, HydraHead])
def test_the_gate_in_half_precision_passes_heads_and_sees_faults(half: Target, tmp_path: Path, kind):
    head = kind.for_target(half, 3).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in head.parameters():  # layers that start as nothing would hide what reaches them
            parameter.add_(0.2 * torch.randn_like(parameter))
    save_head(head, tmp_path, half)
    assert half.tokenizer is not None
    prompt = half.tokenizer(TEXT)["input_ids"][:40]
    head = head.float()
    assert parity_gate.check(head, half, prompt, saved=tmp_path) < 0.5
    forward = kind.forward
    with pytest.MonkeyPatch.context() as patched, pytest.raises(ValueError, match="parity gate: at depth 1"):
        patched.setattr(kind, "forward", lambda self, f, e, text: forward(self, f.roll(1, dims=1), e, text))
        parity_gate.check(head, half, prompt, saved=tmp_path)


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "dflash", "p_eagle", "mtp"])
def test_the_gate_sees_a_small_fault_of_a_head_for_a_target_in_half_precision(half: Target, tmp_path: Path, kind: str):
    """Use frequencies 5 % higher than in the files: less than what eight roundings of the largest logit hide."""
    head = make_head(kind, half).to(torch.bfloat16)
    save_head(head, tmp_path, half)
    head = head.float()
    assert parity_gate.check(head, half, PROMPT, saved=tmp_path) < 1e-4
    head.rotary.rope.inv_freq.mul_(1.05)
    head.rotary.table = head.rotary.table[:, :0]
    with pytest.raises(ValueError, match=r"parity gate: .* the drafter with the saved files differ by 0\."):
        parity_gate.check(head, half, PROMPT, saved=tmp_path)


@pytest.mark.parametrize("name", ["loss", "grad_norm"])
def test_a_loss_that_is_not_finite_ends_the_run(target: Target, tmp_path: Path, name: str):
    """Check that it ends before a checkpoint is written, with the step and the samples in the error. After a gradient that is
    not finite the next loss is not, either, and its samples are not to blame."""
    trainer = make_trainer(target, tmp_path, max_steps=40, logging_steps=100, save_steps=5)
    plain, stream = trainer.distillation.loss, trainer.train_dataset

    def loss(*given: Any) -> Tensor:
        found, factor = plain(*given), torch.nan if trainer.state.global_step == 12 else 1
        if name == "loss":
            return found * factor
        if found.requires_grad:
            found.register_hook(lambda gradient: gradient * factor)
        return found

    trainer.distillation.loss = loss
    rows = sorted({stream.locate(index) for index in (24, 25)})
    with pytest.raises(
        ValueError, match=rf"^{name}=nan at step 13, whose rows .* are {rows[0]}, {rows[1]}: see that text, lower"
    ):
        trainer.train()
    assert checkpoints.newest(tmp_path / "checkpoints") == str(tmp_path / "checkpoints/checkpoint-10")


@pytest.mark.nightly
def test_some_steps_are_profiled(target: Target, tmp_path: Path, capsys):
    make_trainer(target, tmp_path, max_steps=8, profile=True, save_strategy="no").train()
    names = [event["name"] for event in json.loads((tmp_path / "profile.json").read_text())["traceEvents"]]
    assert names.count("target") == names.count("head") == 4 and "aten::mm" in names
    assert "Self CPU time total" in capsys.readouterr().out


# As many steps as there is time for


class Clock:
    """Imitate a machine on which a step takes this many seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.now = seconds, 0.0

    def perf_counter(self) -> float:
        self.now += self.seconds / 2  # FitToTime looks twice: at the first step that is timed, and at the last
        return self.now


def rates(trainer: HeadTrainer) -> list[float]:
    return [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]


def test_a_limit_of_time_shortens_the_training_and_its_schedule(target: Target, tmp_path: Path, monkeypatch, capsys):
    """Take eight steps in 4 s, and 10 s in all: some 20 steps instead of 200, with the learning rates of 20 steps."""
    settings = {"warmup_steps": 4, "logging_steps": 5, "save_strategy": "no"}
    monkeypatch.setattr(callbacks, "time", Clock(8.0))
    limited = make_trainer(target, tmp_path / "limited", max_steps=200, max_minutes=1 / 6, **settings)
    limited.train()
    steps = limited.state.global_step
    assert 10 < steps < 40 and limited.state.max_steps == steps
    assert callbacks.time_limit_record(limited.state) == {
        "step": 10,
        "fitted_steps": steps,
        "all_steps": 200,
        "minutes": 1 / 6,
    }
    assert f"trainer.max_minutes=0.166667 allows {steps} of 200" in capsys.readouterr().out
    monkeypatch.undo()
    plain = make_trainer(target, tmp_path / "plain", max_steps=steps, **settings)
    plain.train()
    assert rates(limited)[2:] == rates(plain)[2:] and rates(plain)[-1] < 0.2 * max(rates(plain))


@pytest.mark.parametrize("optim", ["adamw", "muon"])
@pytest.mark.parametrize(
    ("schedule", "settings"), [("polynomial", {"lr_end": 1e-3}), ("cosine_with_min_lr", {"min_lr": 1e-3})]
)
def test_the_lowest_learning_rate_of_a_schedule_is_the_one_that_is_set(
    target: Target, tmp_path: Path, optim: str, schedule: str, settings: dict
):
    rates_of = {"learning_rate": 1e-2, "lr_scheduler_type": schedule, "lr_scheduler_kwargs": settings}
    trainer = make_trainer(target, tmp_path, optim, max_steps=12, warmup_steps=0, **rates_of)
    trainer.create_optimizer_and_scheduler(12)
    for steps in (12, 8):  # as a limit of minutes shortens it
        trainer.reschedule(steps) if steps < 12 else None
        assert trainer.schedules[0].lr_lambdas[0](steps) == pytest.approx(0.1)


def test_a_machine_that_is_fast_enough_trains_all_steps(target: Target, tmp_path: Path):
    trainer = make_trainer(target, tmp_path, max_steps=12, max_minutes=60.0, save_strategy="no")
    trainer.train()
    assert trainer.state.global_step == 12 and not callbacks.time_limit_record(trainer.state)


def test_a_limit_of_time_that_is_over_ends_the_run_at_the_next_step(target: Target, tmp_path: Path, monkeypatch):
    """Log its last step, of which no checkpoint is saved."""
    monkeypatch.setattr(callbacks, "time", Clock(80.0))
    trainer = make_trainer(
        target, tmp_path, max_steps=200, max_minutes=0.1, logging_steps=50, save_strategy="no", learning_rate=1e-2
    )
    trainer.train()
    assert trainer.state.global_step == 11
    (entry,) = (entry for entry in trainer.state.log_history if "loss" in entry)
    assert entry["step"] == 11 and entry["tokens"] > 11 * 16


def test_a_resumed_run_logs_and_saves_as_often_as_is_set_now(target: Target, tmp_path: Path):
    """Its checkpoint has the numbers of the run that wrote it."""
    make_trainer(target, tmp_path, max_steps=4, logging_steps=4, save_steps=4).train()
    trainer = make_trainer(target, tmp_path, max_steps=8, logging_steps=1, save_steps=2, save_total_limit=9)
    trainer.train(resume_from_checkpoint=checkpoints.newest(tmp_path / "checkpoints"))
    assert [entry["step"] for entry in trainer.state.log_history if "loss" in entry] == [4, 5, 6, 7, 8]
    saved = (tmp_path / "checkpoints").glob("checkpoint-*")
    assert sorted(path.name for path in saved) == [f"checkpoint-{step}" for step in (4, 6, 8)]


def muon(module: nn.Module, vocabulary: Sequence[nn.Parameter] = (), **settings: float) -> torch.optim.Optimizer:
    given = {"optimizer": "muon", "learning_rate": 1e-3, "weight_decay": 0.0, "adam_epsilon": 1e-8}
    return build(module, vocabulary, SimpleNamespace(**given | {"adam_beta1": 0.9, "adam_beta2": 0.95} | settings))


def test_muon_in_float32_takes_the_steps_of_torchs(monkeypatch):
    """Compare with torch's to a hundredth, since it rounds to bfloat16; the state is the same, so a resumed run may use
    it."""
    torch.manual_seed(0)
    ours, theirs = (nn.ModuleList([nn.Linear(24, 8), nn.Linear(8, 40)]) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    monkeypatch.setattr("foredraft.train.optimizer.multiplies_faster_in_bfloat16", lambda device: True)
    rounded = muon(theirs, learning_rate=0.01, weight_decay=0.1).parts[0]
    exact = Float32Muon(matrices(ours), lr=0.01, weight_decay=0.1)
    assert type(rounded) is torch.optim.Muon
    for step in range(4):
        for one, other in zip(matrices(ours), matrices(theirs), strict=True):
            one.grad = torch.randn(one.shape, generator=torch.Generator().manual_seed(step))
            other.grad = one.grad.clone()
        exact.step()
        rounded.step()
    for one, other in zip(matrices(ours), matrices(theirs), strict=True):
        torch.testing.assert_close(one, other, atol=2e-3, rtol=0.02)
        assert exact.state[one].keys() == rounded.state[other].keys()
    monkeypatch.setattr("foredraft.train.optimizer.multiplies_faster_in_bfloat16", lambda device: False)
    assert type(muon(ours).parts[0]) is Float32Muon


@pytest.mark.parametrize(
    ("maker", "amx", "half", "expected"),
    [
        ("AMD EPYC", False, True, True),
        ("AMD EPYC", False, False, False),
        ("Xeon", True, True, True),
        ("Xeon", False, True, False),
    ],
)
def test_products_are_in_bfloat16_where_that_is_faster(monkeypatch, maker, amx, half, expected):
    monkeypatch.setattr("foredraft.train.optimizer.device_name", lambda device: maker)
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr("foredraft.train.optimizer.has_bfloat16_products", lambda device: half)
    assert multiplies_faster_in_bfloat16(torch.device("cpu")) is expected
    assert multiplies_faster_in_bfloat16(torch.device("cuda")) is half


@pytest.mark.parametrize(
    ("module", "kind"),
    [
        (nn.Linear(4, 4), MuonAdamW),
        (nn.Linear(4, 4, bias=False), Float32Muon),
        (nn.Linear(4, 7), torch.optim.AdamW),  # a projection to the vocabulary
    ],
)
def test_muon_takes_heads_of_matrices_alone_and_of_none(module, kind, monkeypatch):
    monkeypatch.setattr("foredraft.train.optimizer.multiplies_faster_in_bfloat16", lambda device: False)
    made = muon(module, [*module.parameters()] if module.out_features == 7 else [])
    assert type(made) is kind
    before = [parameter.detach().clone() for parameter in module.parameters()]
    module(torch.ones(1, 4)).square().sum().backward()
    made.step()
    assert not any(torch.equal(one, other) for one, other in zip(before, module.parameters(), strict=True))


def test_muon_knows_what_has_a_row_per_token_by_its_role(fresh, head_kind):
    """Check that it does not depend on the number of rows, which may be a hidden size too (`draft_vocab_size` of 4,096 with
    an 8B model)."""
    head = make_head(head_kind, fresh)
    sizes = {fresh.vocab_size, len(head.d2t) if head.pruned else fresh.vocab_size}
    by_role = {id(parameter) for parameter in head.vocabulary_parameters if parameter.ndim == 2}
    assert by_role == {id(p) for p in head.parameters() if p.ndim == 2 and p.shape[0] in sizes}
    if head.pruned:
        alike = make_head(head_kind, fresh, draft_vocab_size=fresh.hidden_size)
        assert names_in_muon(alike) == names_in_muon(head) != set()


def names_in_muon(head: DraftHead) -> set[str]:
    made = muon(head, head.vocabulary_parameters)
    names = {id(parameter): name for name, parameter in head.named_parameters()}
    return {names[id(parameter)] for parameter in made.parts[0].param_groups[0]["params"]}


def matrices(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.ndim == 2]
