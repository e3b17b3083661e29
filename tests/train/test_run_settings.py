"""Settings of a run whose effect is seen only at its end, or when it is resumed."""

import os
from pathlib import Path
from types import SimpleNamespace as Fake
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from transformers import TrainerState

from foredraft.heads import Target, save_head
from foredraft.heads.medusa import MedusaHead
from foredraft.train import checks, finalize, held_out, losses
from foredraft.train.data import data_card
from foredraft.train.data.packing import Document
from foredraft.train.losses import kl_div
from foredraft.train.module import DistillationModel
from foredraft.train.run import set_steps
from foredraft.train.runtime import callbacks, checkpoints, locks, run_state
from tests.support import names, typed
from tests.support.configs import composed
from tests.support.head_factory import make_head, same, settings


def test_accuracies_of_the_tree_are_counted_by_depth_and_rank(target: Target, monkeypatch):
    monkeypatch.setattr(held_out, "tokenized", lambda *given: [Document([1] * 16, [True] * 16)])
    guesses = [(2, torch.tensor([[7, 3, 8]]), torch.tensor([8]))]
    guesses += [(1, torch.tensor([[5, 6, 9], [7, 8, 4]]), torch.tensor([5, right])) for right in (8, 9)]
    fakes = {"guesses_of": lambda rows, ranks: guesses}
    distillation = Fake(target=target, head=Fake(depth=3, draft_ids=None), **fakes)
    found = finalize.rank_accuracies(distillation, ["a text"], length=16, ranks=3)
    assert found == [[0.5, 0.25, 0.0], [0.0, 0.0, 1.0], [0.0] * 3]


def test_a_small_draft_vocabulary_has_fewer_ranks(target):
    torch.manual_seed(0)
    head = MedusaHead.for_target(target, 2, draft_vocab_size=5, counts=torch.arange(target.vocab_size))
    found = finalize.rank_accuracies(DistillationModel(head, target, kl_div), ["some text " * 20], length=16)
    assert [len(row) for row in found] == [5, 5]


def wrong_settings() -> list[tuple[str, str, object]]:
    """Return values of another type or size for every number, list and group of conf/head."""
    found: list[tuple[str, str, object]] = []
    for kind in names("head"):
        for key, value in dict(settings(kind).get("head", {})).items():
            if key == "target_layer_ids":
                found += [(kind, key, wrong) for wrong in (3, "x", [1.5], ["a"])]
            elif key == "rope":
                found += [(kind, key, wrong) for wrong in (5, "x", [1])]
            elif type(value) is float:
                found += [(kind, key, wrong) for wrong in ("x", True)]
            elif type(value) is int or key in ("draft_vocab_size", "mask_token_id", "window", "lora_r"):
                found += [(kind, key, wrong) for wrong in (-1, 1.5, "x", True)]
                found += [] if key in checks.LEAST else [(kind, key, 0)]
                found += [] if key in checks.UNLIMITED else [(kind, key, 10**9)]
    return found


def test_settings_of_a_head_that_cannot_be_are_named_before_it_is_built():
    wrong = wrong_settings()
    assert {kind for kind, *_ in wrong} == {*names("head")} - {"auto"}
    for kind, key, value in wrong:
        chosen = OmegaConf.create({"head": {**settings(kind).head, key: value}})
        with pytest.raises(ValueError, match=rf"^head\.{key}="):
            checks.check_head_settings(chosen)


def test_a_setting_of_a_head_may_refer_to_another():
    chosen = OmegaConf.create({"max_length": 64, "head": {**settings("eagle3").head, "window": "${max_length}"}})
    checks.check_head_settings(chosen)


def a_head_from(start: int = 0, names: list[str] | None = None, size: int | str = "auto") -> None:
    """Stand for the constructor of somebody's head."""


def test_a_head_of_another_module_may_count_from_any_number():
    head = {"_target_": f"{__name__}.a_head_from", "start": -3, "names": ["a"], "size": "auto"}
    checks.check_head_settings(OmegaConf.create({"head": head}))
    with pytest.raises(ValueError, match=r"head\.start=1\.5 must be a whole number"):
        checks.check_head_settings(OmegaConf.create({"head": head | {"start": 1.5}}))


class Theirs:
    """Stand for somebody's head that drafts hidden states of the target."""

    @classmethod
    def for_target(cls, target: Target) -> None: ...


def test_a_head_of_another_module_may_learn_from_hidden_states():
    for module, kind in ((__name__, "Theirs"), (MedusaHead.__module__, "MedusaHead")):
        head = {"_target_": f"{module}.{kind}.for_target"}
        cfg = OmegaConf.create({"head": head, "loss": "regression", "loss_args": {}})
        if kind == "Theirs":
            checks.check_loss(cfg)
        else:
            with pytest.raises(ValueError, match="MedusaHead drafts from other"):
                checks.check_loss(cfg)


def test_a_head_of_another_module_may_bring_its_loss(tmp_path, monkeypatch):
    (tmp_path / "head_and_loss.py").write_text(
        "from foredraft.heads.medusa import MedusaHead\n"
        "from foredraft.train.losses import LOSSES, Loss\n\n"
        "LOSSES['mine'] = Loss('nothing', lambda draft, teacher: draft.hidden.sum(-1))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(losses, "LOSSES", dict(losses.LOSSES))
    head = {"_target_": "head_and_loss.MedusaHead.for_target"}
    checks.check_loss(OmegaConf.create({"head": head, "loss": "mine", "loss_args": {}}))
    assert losses.build("mine", {}) is not None
    with pytest.raises(ValueError, match=r"loss=other is not one of .*, mine"):
        losses.build("other", {})


@pytest.mark.parametrize("kind", sorted({*names("head")} - {"auto"}))
def test_the_settings_of_conf_pass(kind):
    checks.check_head_settings(settings(kind))
    checks.check_loss(settings(kind))


@pytest.mark.parametrize(("keep_best", "best", "step"), [(True, 2, 2), (True, 4, 4), (False, 2, 4)])
def test_the_best_weights_ship_unless_they_are_the_last_or_not_wanted(
    target, tmp_path: Path, capsys, keep_best, best, step
):
    last, earlier = (make_head("medusa", target) for _ in range(2))
    save_head(earlier, checkpoints.best_head(tmp_path / run_state.CHECKPOINTS, 2), target)
    history = [{"step": at, "acceptance_length": 1.0 + (at == best), "acceptance_error": 0.1} for at in (2, 4)]
    trainer = Fake(distillation=Fake(head=last, target=target), state=Fake(log_history=history, global_step=4))
    assert finalize.keep_best_weights(Fake(eval=Fake(keep_best=keep_best)), trainer, tmp_path) == step
    assert same(trainer.distillation.head, earlier if step == 2 else last)
    said = "the weights of step 2, which drafted best on validation prompts, are kept\n"
    assert capsys.readouterr().out == (said if step == 2 else "")


def test_a_resumed_run_has_only_the_rest_of_its_minutes(monkeypatch):
    """Let a step take 1 s: after 40 s of the first run and 10 of the second, 10 more steps fit into a minute."""
    now, fitted = [0.0], list[int]()
    monkeypatch.setattr(callbacks, "time", Fake(perf_counter=lambda: now[0]))
    limit = callbacks.FitToTime(1.0, fitted.append)
    state = Fake(global_step=40, max_steps=1000, logging_steps=1, log_history=[{"train_seconds": 40.0}])
    limit.on_train_begin(None, state, None)
    for _ in range(callbacks.FitToTime.LAST):
        now[0], state.global_step = now[0] + 1, state.global_step + 1
        limit.on_step_end(None, state, None)
    assert fitted == [60] == [state.max_steps]


@pytest.mark.parametrize(("all_steps", "fitted"), [(1000, [120, 65, 200]), (150, [120, 65, 150]), (62, [])])
def test_a_machine_that_becomes_busier_or_freer_changes_how_many_steps_fit(monkeypatch, all_steps, fitted):
    """Let steps take 1 s, from the 11th on 2 s, and from the 21st on half a second, in a run of two minutes."""
    now, plans = [0.0], list[int]()
    monkeypatch.setattr(callbacks, "time", Fake(perf_counter=lambda: now[0]))
    limit = callbacks.FitToTime(2.0, plans.append)
    state = Fake(global_step=0, max_steps=all_steps, logging_steps=1, log_history=[])
    limit.on_train_begin(None, state, None)
    while state.global_step < state.max_steps:
        state.global_step += 1
        now[0] += 1 if state.global_step <= 10 else 2 if state.global_step <= 20 else 0.5
        limit.on_step_end(None, state, None)
    assert plans == fitted and state.global_step == (fitted or [all_steps])[-1]
    assert callbacks.time_limit_record(state).get("fitted_steps") == (200 if all_steps == 1000 else None)


@pytest.mark.parametrize(
    ("seconds", "minutes", "fitted"), [([1] * 10 + [0.1] * 90, 1 / 3, [20]), ([1] * 20 + [9] * 80, 1, [60, 33])]
)
def test_a_limit_of_minutes_lets_the_learning_rate_fall(monkeypatch, seconds, minutes, fitted):
    """Check that a run that ends is not prolonged, and that one whose minutes are over has a tenth of its steps left."""
    now, plans = [0.0], list[int]()
    monkeypatch.setattr(callbacks, "time", Fake(perf_counter=lambda: now[0]))
    limit = callbacks.FitToTime(minutes, plans.append)
    state = Fake(global_step=0, max_steps=1000, logging_steps=1, log_history=[])
    limit.on_train_begin(None, state, None)
    while (last := state.global_step) < state.max_steps:
        state.global_step, now[0] = last + 1, now[0] + seconds[last]
        limit.on_step_end(None, state, None)
    assert plans == fitted and state.global_step == fitted[-1]


def test_a_resumed_run_may_change_what_is_measured_and_nothing_that_is_trained():
    trained = typed("""
        head.ttt_steps loss loss_args objective.depth_decay target.path target.dtype data.path data.val_split seed data_seed
        max_length packing init_from lora_r hidden_states._target_ trainer.learning_rate trainer.optim trainer.warmup_steps
        trainer.weight_decay trainer.max_grad_norm trainer.bf16 self_generated_tokens
    """)
    assert [name for name in trained if run_state.free(name)] == []
    assert all(map(run_state.free, ("eval.steps", "trainer.max_minutes", "trainer.report_to", "keep_checkpoints")))


@pytest.mark.parametrize("states", ["offline", "server"])
def test_a_run_whose_directory_is_moved_is_the_same_run(states: str, capsys: pytest.CaptureFixture[str]):
    """Its store moves with it. The hidden states there are checked by what they are."""
    before, now = (
        run_state.as_saved(composed("train", f"hidden_states={states}", f"output_dir=outputs/{name}", *more))
        for name, more in (("old", []), ("new", ["hidden_states.load_full_target=true"]))
    )
    run_state.check_same_run(Path("outputs/new"), before, now)
    assert "hidden_states.load_full_target is False there, True here" in capsys.readouterr().out


def test_a_step_has_the_rows_of_all_processes(monkeypatch):
    cfg = composed(
        "train", "head=medusa", *typed("trainer.per_device_train_batch_size=3 trainer.gradient_accumulation_steps=2")
    )
    monkeypatch.setattr(run_state.distributed, "world_size", lambda: 2)
    assert run_state.rows_per_step(cfg) == 12
    for steps, written in (
        (-1, 5000),
        (0, 5000),
        (1, 12 * 64),
        (3, 3 * 12 * 64),
        (9, 5000),
    ):  # of text, no more than is read
        cfg.trainer.max_steps, cfg.max_length, cfg.self_generated_tokens = steps, 64, 5000
        assert run_state.written_tokens(cfg) == written
    assert run_state.written_tokens(OmegaConf.create({"trainer": {"max_steps": -1}})) == 0


def test_a_group_of_settings_may_be_gone():
    assert run_state.differences({"a": {"b": 1}}, {"a": None}) == ["a is {'b': 1} there, None here"]
    assert run_state.differences({"a": 2}, {"a": {"b": 1}}) == ["a is 2 there, {'b': 1} here"]
    assert run_state.differences({"a": 2}, {}) == ["a is 2 there, None here"]


@pytest.mark.parametrize(("limit", "steps"), [(2, (20, 100)), (0, (9, 20, 100)), (-1, (9, 20, 100))])
def test_as_many_checkpoints_stay_as_are_asked_for_and_the_best_weights(tmp_path: Path, limit: int, steps: tuple):
    written = tmp_path / checkpoints.UNFINISHED
    history = [{"step": 2, "acceptance_length": 1.5, "acceptance_error": 0.1}]
    for step in (9, 20, 100):
        (written / f"checkpoint-{step}").mkdir(parents=True)
        checkpoints.best_head(tmp_path, step // 10).mkdir()
        state = Fake(global_step=step, log_history=history)
        callbacks.KeepCheckpoints().on_save(Fake(output_dir=str(written), save_total_limit=limit), state, None)
    retained = {f"checkpoint-{step}" for step in steps}
    assert {path.name for path in tmp_path.iterdir()} == {*retained, "best-2", "unfinished"}


def test_a_second_run_resumes_the_first_or_says_why_not(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(run_state.shutil, "disk_usage", lambda path: Fake(free=100))
    out = tmp_path / "out"

    def config(*changes: str) -> Any:
        return composed("train", "head=medusa", f"output_dir={out}", "strategy=single", *changes)

    def opened(*changes: str, need_bytes: int = 100) -> str | None:
        directory, checkpoint = run_state.open_directory(cfg := config(*changes), need_bytes)
        assert directory == out and run_state.saved_config(out) == run_state.as_saved(cfg)
        return checkpoint

    with pytest.raises(ValueError, match="0 MiB free and this run writes"):
        opened(need_bytes=101)
    assert opened() is None and opened("seed=3") is None  # without a checkpoint, nothing is lost
    checkpoint = out / "checkpoints" / "checkpoint-5"
    checkpoint.mkdir(parents=True)
    (checkpoint / checkpoints.STATE).touch()
    half = checkpoint.parent / checkpoints.UNFINISHED / "checkpoint-9"  # a kill came before it got its name
    half.mkdir(parents=True)
    assert opened("seed=3", "trainer.max_steps=7") == opened("seed=3", "trainer.max_steps=8") == str(checkpoint)
    said = f"resuming with other settings: trainer.max_steps is 7 there, 8 here\nresuming from {checkpoint}\n"
    assert capsys.readouterr().out.endswith(said)
    assert not half.exists() and len(run_state.LOCKS) == 1
    with pytest.raises(
        ValueError, match=r"; trainer.seed is 3 there, 0 here\): give another output_dir, the .* resume it, or delete"
    ):
        opened("trainer.max_steps=8")
    spread = "trainer.per_device_train_batch_size=2", "trainer.gradient_accumulation_steps=3"
    with pytest.raises(
        ValueError,
        match=r"another config \(data_seed is .*; rows_per_step is 1 there, 6 here; seed is 3 there, 0 here\)"
        r".*\(rows_per_step is processes x .*gradient_accumulation_steps\)",
    ):
        opened(*spread, "trainer.max_steps=8")
    facts = {"processes": 2, "strategy": "zero2", "trainer": {"output_dir": "here"}}
    run_state.check_same_run(out, facts, facts | {"trainer": {"output_dir": "elsewhere"}})
    capsys.readouterr()
    run_state.check_same_run(out, {"processes": 1, "strategy": "single"}, {"processes": 2, "strategy": "ddp"})
    assert not capsys.readouterr().out  # nothing about how rows are spread
    for now, message in (
        ({"processes": 3}, "cut its checkpoints in .* for 2 processes and here are 3"),
        ({"strategy": "fsdp"}, "strategy=zero2, which strategy=fsdp cannot read"),
    ):
        with pytest.raises(ValueError, match=message):
            run_state.check_same_run(out, facts, facts | now)
    assert not run_state.done_before(config("seed=3", "trainer.max_steps=8"))
    for number in (1, 2):  # finished runs keep their files
        (out / run_state.METRICS).write_text("{}")
        assert run_state.done_before(config("seed=3", *["trainer.max_steps=8"] * (number == 1)))
        assert not run_state.done_before(config("seed=3", "trainer.max_steps=9"))  # for a sweep it is another run
        assert opened("seed=3") is None and (tmp_path / f"out.{number}" / run_state.METRICS).exists()
        assert f"{out} holds a finished run; it is kept as {out}.{number}\n" in capsys.readouterr().out
    (out / run_state.METRICS).write_text("{}")
    monkeypatch.chdir(out)
    with pytest.raises(ValueError, match=r"output_dir=\. holds a finished run and cannot be renamed"):
        run_state.claim(Path())
    with pytest.raises(ValueError, match=r"output_dir=\. holds a finished run and cannot be renamed"):
        run_state.open_directory(config("output_dir=."), 100)
    with pytest.raises(ValueError, match=r"lies in output_dir=.*out, whose finished run would get another name"):
        opened("init_from=head")
    run_state.unlock()
    assert not run_state.LOCKS


def test_a_directory_is_claimed_with_those_above_it(tmp_path: Path):
    run_state.claim(tmp_path / "a" / "b").close()
    run_state.claim(tmp_path / "a" / "b").close()


def test_the_seconds_of_a_run_are_those_of_its_newest_entry():
    history = [{"train_seconds": 1.5}, {"loss": 2.0}, {"train_seconds": 5.0}, {"train_seconds": 7.0}]
    assert run_state.seconds_of(Fake(log_history=history)) == 7 and run_state.seconds_of(Fake(log_history=[])) == 0


def test_a_lock_that_was_opened_before_a_finished_run_moved_is_not_taken(tmp_path: Path, monkeypatch):
    out, plain = tmp_path / "out", run_state.hold

    def moved(path: Path, name: str) -> Any:
        """Lock a directory that another process moves out of the way meanwhile."""
        monkeypatch.undo()
        lock = plain(path, name)
        path.rename(tmp_path / "out.1")
        return lock

    monkeypatch.setattr(run_state, "hold", moved)
    with run_state.claim(out) as lock:
        assert os.path.samestat(os.fstat(lock.fileno()), (out / locks.FILE).stat())


@pytest.mark.parametrize(
    "settings, minutes, steps",
    [
        ((500, 1.5), 1.5, 120),
        ((500, 9.0), 1.5, 500),
        ((300, 1.5), 1.5, 300),
        ((300, 0.0), 1.5, 300),
    ],
)
def test_a_resumed_run_has_the_steps_that_fitted_unless_its_limits_are_others(tmp_path: Path, settings, minutes, steps):
    record = {"step": 10, "fitted_steps": 120, "all_steps": 500, "minutes": minutes}
    state = TrainerState(max_steps=120, log_history=[record])
    state.save_to_json(str(tmp_path / checkpoints.STATE))
    args = Fake(max_steps=settings[0], max_minutes=settings[1], num_train_epochs=1)
    set_steps(args, str(tmp_path), epoch=1.0)
    assert args.max_steps == steps
    state.max_steps = args.max_steps
    assert bool(callbacks.time_limit_record(state)) == (steps == 120)  # the report says what was left out


def test_a_data_card_is_written_completely_or_not_at_all(tmp_path: Path, monkeypatch):
    """Fill the disk while a resumed run writes it."""

    def write_half(file: Path, content: Any) -> None:
        with file.open("wb") as opened:
            opened.write(b"{")
        raise OSError(28, "No space left on device")

    data_card.save(tmp_path, {"hash": "a"})
    monkeypatch.setattr(Path, "write_text", write_half)
    monkeypatch.setattr(Path, "write_bytes", write_half)
    with pytest.raises(OSError, match="No space"):
        data_card.save(tmp_path, {"hash": "a"})
    data_card.check_same(tmp_path, {"hash": "a"})
