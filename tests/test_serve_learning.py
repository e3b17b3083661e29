"""`foredraft serve learn=true`: what is kept of the traffic, when another head serves, and that answers notice nothing."""

import json
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foredraft.heads import Target, save_head
from foredraft.inference.drafters import load_drafter
from foredraft.inference.serve import background as background_module
from foredraft.inference.serve.background import Background
from foredraft.inference.serve.learned import newest_head, train_overrides
from foredraft.inference.serve.learning import Learning, ServingHead
from foredraft.inference.serve.traffic import Traffic, acceptance, acceptance_difference, decode, lines
from foredraft.inference.serve.worker import Worker
from tests.support.configs import composed
from tests.support.head_factory import make_head
from tests.support.processes import script
from tests.support.serving import Served, served, wait_until

PROMPT = "def add(self, other):"
# A trainer: it copies the head that it starts with, and is killed as often as the file `kills` says.
TRAIN = """
import os, pathlib, shutil, sys
given = dict(word.split("=", 1) for word in sys.argv[1:])
kills = pathlib.Path("kills")
if kills.exists() and (left := int(kills.read_text())):
    kills.write_text(str(left - 1))
    os.kill(os.getpid(), 9)
shutil.copytree(given["init_from"], given["output_dir"] + "/head")
"""
# A judge: it finds what the file `found` says.
JUDGE = "import json, shutil, sys; shutil.copy('found', json.loads(sys.argv[1])['output'])"
BETTER, SAME, WORSE = ([[emitted + i % 2, 10] for i in range(40)] for emitted in (30, 20, 10))


def answer(number: int, prompt: list[int], emitted: int = 3, speculative: bool = True) -> Any:
    """Return an answer as Service has it at its end, of a text of one step that accepted two drafts."""
    params = SimpleNamespace(temperature=0.0)
    job = SimpleNamespace(request=SimpleNamespace(prompt=prompt, seed=number, params=params))
    choice = SimpleNamespace(index=0, job=job, ids=[1, 2, 3, 4], accepted=[2], drafted=[4], emitted=emitted, forwards=1)
    request = SimpleNamespace(speculative=speculative)
    return SimpleNamespace(id=f"a{number}", choices={0: choice}, request=request, began=time.monotonic())


def test_the_traffic_keeps_within_its_limit_a_sample_of_all(tmp_path: Path):
    limit, last = 80_000, 3000
    traffic = Traffic(tmp_path, limit)
    for number in range(last):
        traffic.write(answer(number, [number, number + 1]))
        if number % 500 == 499:
            folder = traffic.begin(seed=number)
            trained, held = lines(folder / "train" / "new.jsonl"), lines(folder / "recent.jsonl")
            prompts = [{tuple(json.loads(line)["prompt_ids"]) for line in some} for some in (trained, held)]
            assert held and len(trained) > len(held) and not prompts[0] & prompts[1]
            known = lines(folder / "train" / "replay.jsonl")
            assert bool(known) == (number > 500) and len(known) <= len(trained)
            assert sum(path.stat().st_size for path in tmp_path.rglob("*.jsonl")) <= limit
            traffic.end()
    ids = [int(json.loads(line)["id"][1:-2]) for line in lines(traffic.replay)]
    assert len(ids) > 50 and abs(sum(ids) / len(ids) - last / 2) < last / 8  # not the newest alone
    assert traffic.replay.stat().st_size <= limit // 4 and not traffic.round.exists()
    traffic.write(answer(1, [1], speculative=False))
    assert traffic.count == 0


def test_a_full_disk_is_a_warning_and_half_a_row_is_none(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    traffic = Traffic(tmp_path, 10**6)
    traffic.new = tmp_path / "no folder" / "new.jsonl"
    for number in range(3):
        traffic.write(answer(number, [1]))
    assert len(caplog.records) == 1 and "not stored" in caplog.text
    traffic = Traffic(tmp_path, 10**6)
    traffic.write(answer(1, [5]))
    with traffic.new.open("ab") as file:
        file.write(b'{"id": "a2-0", "ids": [1,\n')
    traffic.write(answer(3, [6]))
    assert Traffic(tmp_path, 10**6).count == 2
    kept = [
        json.loads(line)["id"] for part in ("train/new", "recent") for line in lines(traffic.begin(0) / f"{part}.jsonl")
    ]
    assert sorted(set(kept)) == ["a1-0", "a3-0"]


def test_gains_are_compared_text_by_text():
    torch.manual_seed(0)
    old = [
        [int(steps * rate), steps] for steps, rate in zip(range(20, 60), (1 + 4 * torch.rand(40)).tolist(), strict=True)
    ]
    new = [[emitted + 2, steps] for emitted, steps in old]  # texts differ by far more than heads do
    difference, error = acceptance_difference(old, new)
    assert difference == pytest.approx(2 * 40 / sum(steps for _, steps in old)) and difference > 8 * error
    assert acceptance(old)[1] > 3 * difference and acceptance_difference(new, old)[0] == -difference


def test_a_row_that_cannot_be_written_again_ends_no_round(target: Target, tmp_path: Path, caplog):
    good = {"prompt_ids": [5, 6, 7], "ids": [0] * 20, "seed": 1, "temperature": 1}
    bad = [{"temperature": None}, {"temperature": "a"}, {"temperature": -1}, {"seed": None}, {"seed": 1.5}]
    bad += [{"prompt_ids": None}, {"prompt_ids": []}, {"prompt_ids": ["a"]}, {"ids": [[1]]}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(good | one) + "\n" for one in [*bad, {}]) + "[1]\n3\n")
    rows = [json.loads(line) for line in lines(tmp_path / "rows.jsonl")]
    assert rows == [good]
    other = [good | {"prompt_ids": [10**6]}, good | {"prompt_ids": [5] * 300}]  # of another target
    assert len(decode(target, load_drafter("ngram", target), [*other, good])) == 1
    assert caplog.text.count("a text is skipped") == 2


def test_the_judge_writes_the_texts_that_were_served(target: Target):
    rows = [{"prompt_ids": [5, 6, 7 + i], "ids": [0] * 20, "seed": i, "temperature": i % 2} for i in range(3)]
    found = decode(target, load_drafter("ngram", target), rows)
    assert len(found) == 3 and all(emitted == 19 and 0 < steps <= 19 for emitted, steps in found)


@pytest.fixture
def start(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Learning]]:
    """Start a server's two threads with TRAIN and JUDGE in the place of the processes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(background_module, "IDLE", 0.0)
    monkeypatch.setattr(
        Learning, "evaluate_heads", lambda self, *facts: self.run_process(["-c", JUDGE, judge_facts(*facts)])
    )
    save_head(make_head("eagle3", target), tmp_path / "given", target)
    started: list[Learning] = []

    def begin(found: Any = (), **given: Any) -> Learning:
        Path("found").write_text(json.dumps(found))
        learned = Path("learned")
        spec = newest_head(learned, "given")
        load = partial(load_drafter, target=target)
        worker = Worker(target, load(spec))
        background = Background(lambda: worker.open > 0, on_gpu=False)
        serving = ServingHead(worker, 0, "", load)
        one = Learning(serving, background, spec, ["-c", TRAIN], {}, learned, rows=8, **given)
        worker.on_reserve = background.on_request
        worker.start()
        one.start()
        started.append(one)
        return one

    yield begin
    for one in started:
        one.stop()
        one.serving.worker.stop()
        one.serving.worker.join()


def judge_facts(heads: list[Path], rows: list[Path], verdict: Path) -> str:
    assert all((head / "config.json").exists() for head in heads) and all(file.exists() for file in rows)
    return json.dumps({"output": str(verdict)})


def serve_some(one: Learning, emitted: int = 3, first: int = 0) -> None:
    for number in range(first, first + 40):
        one.write(answer(number, [number], emitted))


def history() -> list[dict[str, Any]]:
    file = Path("learned/history.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.mark.parametrize(
    "found, outcome",
    [
        ([[SAME, BETTER], [SAME, SAME]], "served"),
        ([[SAME, BETTER], [[], []]], "served"),  # the first round
        ([[SAME, SAME], [SAME, SAME]], "no better"),
        ([[SAME, WORSE], [SAME, BETTER]], "no better"),
        ([[SAME, BETTER], [BETTER, SAME]], "forgot too much"),
    ],
)
def test_a_head_serves_where_it_is_better_and_has_not_forgotten(start, found, outcome):
    one = start(found)
    serve_some(one)
    wait_until(lambda: history() and not one.traffic.round.exists())
    (facts,) = history()
    head = "head-0002" if outcome == "served" else "head-0001"
    assert facts["outcome"] == outcome and one.serving.head == head == Path("learned/current").read_text().strip()
    cards = sorted(path.parent.name for path in Path("learned").glob("head-*/README.md"))
    assert cards == ["head-0001", "head-0002"][: int(head[-1])]
    assert one.traffic.count == 0 and lines(one.traffic.replay)


def test_a_trainer_that_is_killed_begins_again_and_one_that_fails_does_not(start, caplog):
    Path("kills").write_text("2")
    one = start([[SAME, BETTER], [[], []]])
    serve_some(one)
    wait_until(lambda: history() and not one.traffic.round.exists())
    assert [record.getMessage().split(": ")[1] for record in caplog.records if "ended with" in record.getMessage()] == [
        "a process ended with -9"
    ] * 2
    one.train[:] = ["-c", "raise SystemExit('no space left')"]
    serve_some(one)
    wait_until(lambda: len(history()) == 2 and not one.traffic.round.exists())
    assert history()[1]["outcome"] == "failed" and "no space left" in caplog.text
    assert one.serving.head == "head-0002" and one.is_alive()


def test_the_head_before_comes_back_by_hand_or_where_acceptance_has_fallen(start, caplog):
    one = start([[SAME, BETTER], [[], []]])
    serve_some(one, emitted=4)
    wait_until(lambda: one.serving.head == "head-0002" and not one.traffic.round.exists())
    assert one.before is not None
    one.rows = 10**6
    Path("found").write_text(json.dumps([[SAME, SAME]]))
    serve_some(one, emitted=1, first=40)  # other texts: no reason to go back
    wait_until(lambda: len(history()) == 2)
    assert history()[1]["outcome"] == "stays" and one.serving.head == "head-0002"
    one.before = "head-0001", [(4, 1)] * 40
    Path("found").write_text(json.dumps([[SAME, BETTER]]))
    wait_until(lambda: one.serving.head == "head-0001")
    assert history()[2]["outcome"] == "back" and one.before is None
    Path("learned/current").write_text("head-0002\n")
    wait_until(lambda: one.serving.head == "head-0002")
    Path("learned/current").write_text("head-9\n")
    wait_until(lambda: "head-9 cannot serve" in caplog.text and Path("learned/current").read_text() == "head-0002\n")
    assert (
        newest_head(Path("learned"), "given") == "learned/head-0002"
        and newest_head(Path("learned"), "learned/head-0001")[-1] == "1"
    )


@pytest.mark.linux
def test_on_a_cpu_a_process_is_halted_while_something_is_served(start, monkeypatch):
    one = start()
    one.train[:] = ["-c", "import time; time.sleep(600)"]
    serve_some(one)
    background, worker = one.background, one.serving.worker
    wait_until(lambda: background.process is not None)
    state = Path(f"/proc/{background.process.pid}/stat")
    worker.open += 1
    worker.on_reserve()
    wait_until(lambda: state.read_text().split()[2] == "T")
    ran = background.seconds
    time.sleep(0.3)
    assert background.seconds == ran
    worker.open -= 1
    wait_until(lambda: state.read_text().split()[2] == "S")


def test_the_oldest_heads_go_but_none_that_serves_or_may_come_back(start):
    one = start([[SAME, BETTER], [[], []]], keep=2)
    for number in range(2, 5):
        serve_some(one, emitted=4)
        wait_until(lambda number=number: len(history()) == number - 1 and not one.traffic.round.exists())
    wait_until(lambda: sorted(path.name for path in Path("learned").glob("head-*")) == ["head-0003", "head-0004"])
    assert one.serving.head == "head-0004" and one.before[0] == "head-0003"
    one.rows = 10**6
    Path("learned/current").write_text("head-0003\n")
    wait_until(lambda: one.serving.head == "head-0003" and one.before is None)  # it counts the texts of that head
    one.rows = 8
    serve_some(one)
    wait_until(lambda: len(history()) == 4 and not one.traffic.round.exists())
    wait_until(lambda: sorted(path.name for path in Path("learned").glob("head-*")) == ["head-0003", "head-0005"])


def test_a_deleted_current_is_written_again_and_said_once(start, caplog):
    one = start([[SAME, BETTER], [[], []]])
    current = Path("learned/current")
    for _ in range(2):
        current.unlink()
        wait_until(current.exists)
    assert current.read_text() == "head-0001\n" and caplog.text.count("was deleted, and is written again") == 2
    current.write_text("")  # as a shell leaves it before it writes
    serve_some(one)
    wait_until(lambda: history() and not one.traffic.round.exists())
    assert history()[0]["outcome"] == "served" and one.serving.head == "head-0002"
    assert "learning: F" not in caplog.text and "cannot serve" not in caplog.text
    current.unlink()
    one.background.stopped.set()
    one.join()
    current.unlink(missing_ok=True)
    assert newest_head(Path("learned"), "given") == "learned/head-0002"  # not the first one once more


@pytest.fixture
def folder(tiny_path: Path, target: Target, tmp_path: Path) -> Path:
    save_head(make_head("eagle3", target), tmp_path / "given", target)
    return tmp_path


def facts(tiny_path: Path, *more: str) -> list[str]:
    given = [
        f"target={tiny_path}",
        "target.dtype=float32",
        "target.device=cpu",
        "served_model_name=tiny",
        "drafter=given/",
    ]
    return [*given, "learn=true", *more]


def text(server: Served, seed: int, **more: Any) -> str:
    body = {"prompt": PROMPT, "max_tokens": 24, "seed": seed, **more}
    status, _, said = server.post(json.dumps(body).encode(), "/v1/completions")
    assert status == 200, said
    return json.loads(said)["choices"][0]["text"]


def test_the_command_swaps_continues_and_keeps_out_what_is_not_to_be_stored(tiny_path: Path, folder: Path):
    learned = folder / "learned"
    with served(folder, *facts(tiny_path), "log_accepted=log", "log_text=true") as server:
        assert "token ids of prompts and answers are stored in learned" in server.log.read_text()
        expected = [text(server, seed, speculative=False) for seed in range(4)]
        text(server, 9, store=False)
        shutil.copytree(learned / "head-0001", learned / "head-0002")
        asked = text(server, 0)
        (learned / "current").write_text("head-0002\n")
        wait_until(lambda: (learned / "current").exists() and text(server, 0) == expected[0] and served_by(server, 2))
        assert [asked, *(text(server, seed) for seed in range(1, 4))] == expected
        rows = (learned / "new.jsonl").read_text()
        assert '"seed": 9' not in rows and rows.count("\n") == (folder / "log").read_text().count("\n")
        server.process.send_signal(signal.SIGKILL)
    with served(folder, *facts(tiny_path)) as server:
        assert text(server, 3) == expected[3] and served_by(server, 2) and not served_by(server, 1)
        assert (learned / "new.jsonl").read_text().startswith(rows)


def served_by(server: Served, number: int, tenant: str = "") -> float:
    return server.metric("foredraft_forwards_total", f'head="{tenant}head-000{number}"')


def test_each_tenant_has_texts_and_a_head_of_its_own(tiny_path: Path, folder: Path):
    more = [word for word in facts(tiny_path) if not word.startswith("served_model_name=")]
    with served(folder, *more, "learn.tenants=[one,two]", "cache_gib=1") as server:
        assert [model.id for model in server.client().models.list()] == ["one", "two"]
        expected = text(server, 3, speculative=False)
        learned = folder / "learned"
        shutil.copytree(learned / "two" / "head-0001", learned / "two" / "head-0002")
        (learned / "two" / "current").write_text("head-0002\n")
        wait_until(lambda: text(server, 3, model="two") == expected and served_by(server, 2, "two/"))
        with ThreadPoolExecutor(8) as pool:
            asked = list(pool.map(lambda number: text(server, 3, model=("one", "two")[number % 2]), range(8)))
        assert asked == [expected] * 8
        assert served_by(server, 1, "one/") and not served_by(server, 2, "one/")
        rows = {tenant: (learned / tenant / "new.jsonl").read_text().count("\n") for tenant in ("one", "two")}
        assert rows["one"] == 4 and rows["two"] > 4
        body = json.dumps({"prompt": PROMPT, "model": "three"}).encode()
        status, _, said = server.post(body, "/v1/completions")
        assert status == 404 and b"'one', 'two'" in said


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["drafter=ngram"], "learn=true trains the head that drafts: set drafter=DIRECTORY"),
        (["drafter=given/", "engine=llamacpp"], "set drafter=DIRECTORY and engine=foredraft"),
        (["drafter=given/", "learn.device_share=2"], "learn.device_share=2"),
        (["drafter=given/", "learn.keep=1"], "learn.keep=1"),
        (["drafter=given/", "learn.tenants=[a,a]"], "must be different names"),
        (["drafter=given/", "learn.tenants=[../a]"], "names are also folders"),
    ],
)
def test_what_cannot_learn_is_said_in_a_sentence(tiny_path: Path, folder: Path, arguments, sentence):
    done = script("scripts/serve.py", f"target={tiny_path}", "learn=true", *arguments, cwd=folder)
    assert done.code == 2 and sentence in done.err and not (folder / "learned" / "current").exists()


@pytest.mark.nightly
def test_a_round_by_the_real_trainer_and_judge(tiny_path: Path, folder: Path):
    few = ["trainer.max_steps=2", "max_length=32", "trainer.per_device_train_batch_size=2", "eval.final_num_prompts=2"]
    with served(folder, *facts(tiny_path, "learn.num_samples=24", f"learn.train={json.dumps(few)}")) as server:
        for seed in range(30):
            text(server, seed, prompt=f"{PROMPT}{seed}")
        history = folder / "learned" / "history.jsonl"
        wait_until(history.exists)
        (found,) = map(json.loads, history.read_text().splitlines())
        assert found["outcome"] in ("served", "no better") and len(found["recent"]) == 2, server.log.read_text()
        assert text(server, 3) == text(server, 3, speculative=False)


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "dspark", "p_eagle"])
def test_a_round_trains_a_head_of_the_same_depth(target, kind: str):
    head = make_head(kind, target)
    settings = composed("train", "data=accepted", *train_overrides(head)).head
    block = "block_size" in settings
    depth = settings.block_size - (not settings.sample_from_anchor) if block else settings[head.depth_key]
    assert depth == head.depth
