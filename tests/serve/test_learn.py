"""`foredraft learn` and `serve learn=true`: what is kept of the traffic, when another head serves, and that answers notice
nothing."""

import asyncio
import json
import shutil
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foredraft.heads import Target, save_head
from foredraft.inference.drafters import load_drafter
from foredraft.inference.drafters.base import NoDrafter
from foredraft.inference.serve import followed_head
from foredraft.inference.serve.errors import ApiError
from foredraft.inference.serve.followed_head import FollowedHead
from foredraft.train import learn
from foredraft.train.judge import decode, rows_of, train_overrides
from foredraft.train.learn import Learner, acceptance, acceptance_difference, run_process, start_process, texts_of, wait
from foredraft.train.learned_heads import LearnedHeads
from tests.support.configs import composed
from tests.support.head_factory import make_head
from tests.support.processes import Served, on_cpu, script, served, start, wait_until

PROMPT = "def add(self, other):"
BETTER, SAME, WORSE = ([[emitted + i % 2, 10] for i in range(40)] for emitted in (30, 20, 10))
# A process that is killed as often as the file `kills` says.
KILLED = """
import os, pathlib
kills = pathlib.Path("kills")
if left := int(kills.read_text()):
    kills.write_text(str(left - 1))
    os.kill(os.getpid(), 9)
"""

# It starts a process that writes its number, and waits for it.
PARENT = """
from pathlib import Path
from foredraft.train.learn import start_process
start_process(["-uc", "import os, time; print(os.getpid()); time.sleep(600)"], Path("log")).wait()
"""

# It starts a process on a slow machine, and ends before that can ask to end with it.
ENDS_AT_ONCE = """
import os
from pathlib import Path
from foredraft.train import learn
learn.CHILD = "import time; time.sleep(1)" + learn.CHILD
process = learn.start_process(["-c", "open('ran', 'w')"], Path("log"))
print(process.pid, flush=True)
os._exit(0)
"""


def row(number: int) -> dict[str, Any]:
    """Return a text of one step that accepted two drafts, as a server logs it."""
    facts = {"id": f"a{number}", "prompt_ids": [number, number + 1], "ids": [1, 2, 3, 4]}
    return facts | {"accepted": [2], "drafted": [4], "seed": number, "temperature": 0.0}


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class Rounds:
    """Replace the processes of a learner: training copies the head, and judging finds `found`, of new heads and of those
    that are there."""

    def __init__(self, **settings: Any) -> None:
        self.heads, self.ran = LearnedHeads(Path("learned")), list[str]()
        self.found: dict[str, list[Any]] = {}  # name of a head -> counts of recent and of replayed texts
        given = Path("given")
        given.mkdir(exist_ok=True)
        (given / "config.json").write_text("{}")
        self.heads.start(self.heads.first("given"))
        self.learner = Learner(self.heads, {}, ["train"], **{"num_samples": 8, "keep": 8, "run": self.run} | settings)

    def run(self, arguments: list[str]) -> bool:
        given = dict(word.split("=", 1) for word in arguments[1:] if "=" in word)
        self.ran.append("train" if arguments[0] == "train" else Path(json.loads(arguments[2])["head"]).name)
        if arguments[0] == "train":
            shutil.copytree(given["init_from"], given["output_dir"] + "/head")
            Path(given["output_dir"], "metrics.json").touch()
            return True
        facts = json.loads(arguments[2])
        assert all(Path(file).exists() for file in facts["files"].values())
        recent, replay = self.found.get(Path(facts["head"]).name, [SAME, SAME])
        Path(facts["output"]).write_text(json.dumps({"recent": recent, "replay": replay, "train": []}))
        return True

    def serve(self, count: int = 40, first: int = 0) -> None:
        with self.learner.served.open("a") as file:
            file.writelines(json.dumps(row(number)) + "\n" for number in range(first, first + count))

    def run_round(self) -> dict[str, Any]:
        self.serve()
        self.learner.run_round_if_due()
        assert not self.learner.round.exists() and not self.learner.served.exists()
        return self.history()[-1]

    def history(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.learner.history.read_text().splitlines()]

    @property
    def current(self) -> str:
        return Path("learned/current").read_text().strip()


def test_the_texts_of_all_rounds_are_sampled_within_a_limit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(learn, "MAX_REPLAY", 20_000)
    rounds, last = Rounds(), 3000
    learner = rounds.learner
    for first in range(0, last, 500):
        rounds.serve(500, first)
        learner.prepare()
        trained, held = texts_of(learner.round / "train" / "new.jsonl"), texts_of(learner.round / "recent.jsonl")
        prompts = [{tuple(json.loads(line)["prompt_ids"]) for line in some} for some in (trained, held)]
        assert held and len(trained) > len(held) and not prompts[0] & prompts[1]
        known = texts_of(learner.round / "train" / "replay.jsonl")
        assert bool(known) == (first > 0) and len(known) <= len(trained)
        learner.run_round_if_due()
        assert learner.replay.stat().st_size <= 20_000
    ids = [int(json.loads(line)["id"][1:]) for line in texts_of(learner.replay)]
    assert len(ids) > 50 and abs(sum(ids) / len(ids) - last / 2) < last / 8  # not the newest alone


@pytest.mark.parametrize("numbers", [[3, 5, 8, 9, 3], [6, 6, 6, 6]])
def test_no_text_is_learned_and_held_out(numbers: list[int]):
    """Take prompts of which no hash says that they are held out."""
    lines = [json.dumps(row(number) | {"id": str(place)}).encode() + b"\n" for place, number in enumerate(numbers)]
    trained, held = learn.split(lines)
    assert sorted([*trained, *held]) == sorted(lines) and trained
    prompts = [{tuple(json.loads(line)["prompt_ids"]) for line in some} for some in (trained, held)]
    assert not prompts[0] & prompts[1] and bool(held) == (len(set(numbers)) > 1)


def test_no_text_is_learned_in_one_round_and_held_out_in_the_same():
    """Use few prompts, some in new texts and others in those of earlier rounds, and some in both."""
    rounds = Rounds()
    for number in range(6):
        for path, numbers in (
            (rounds.learner.served, (number, number + 1, number + 2)),
            (rounds.learner.replay, range(6)),
        ):
            path.write_bytes(b"".join(json.dumps(row(one)).encode() + b"\n" for one in numbers))
        rounds.learner.prepare()
        files = [[f"train/{name}.jsonl" for name in ("new", "replay")], [f"{name}.jsonl" for name in learn.SETS]]
        learned, held = (
            {learn.prompt_hash(line) for name in names for line in texts_of(rounds.learner.round / name)}
            for names in files
        )
        assert learned and held and not learned & held
        rounds.learner.finish()


def test_a_round_starts_after_enough_texts_and_half_a_row_is_none():
    rounds = Rounds()
    rounds.serve(7)
    rounds.learner.run_round_if_due()
    assert not rounds.ran
    with rounds.learner.served.open("ab") as file:
        file.write(b'{"id": "a2-0", "ids": [1,\n[1]\n3\n{"ids": null}\n')
    rounds.learner.prepare()
    kept = [
        json.loads(line)["id"]
        for part in ("train/new", "recent")
        for line in texts_of(rounds.learner.round / f"{part}.jsonl")
    ]
    assert sorted(set(kept)) == [f"a{number}" for number in range(7)]


def test_gains_are_compared_text_by_text():
    torch.manual_seed(0)
    old = [
        [int(steps * rate), steps] for steps, rate in zip(range(20, 60), (1 + 4 * torch.rand(40)).tolist(), strict=True)
    ]
    new = [[emitted + 2, steps] for emitted, steps in old]  # texts differ by far more than heads do
    difference, error = acceptance_difference(old, new)
    assert difference == pytest.approx(2 * 40 / sum(steps for _, steps in old)) and difference > 8 * error
    assert acceptance(old)[1].std() / 40**0.5 > 3 * difference
    assert acceptance_difference(new, old)[0] == pytest.approx(-difference)
    assert acceptance_difference([], []) == acceptance_difference(old[:1], new[:1]) == (0.0, float("inf"))


def test_a_small_gain_and_a_small_loss_are_told_from_large_ones():
    """Compare 40 texts: 2 better ones are 1.5 standard errors, and 6 are 2.7."""

    def outcome(better: int, replay: int) -> str:
        new = [[20 + number % 2 + (number < better), 10] for number in range(40)]
        old = {"recent": SAME, "replay": [[200, 100]]}
        return learn.compare(old, {"recent": new, "replay": [[replay, 100]]})["outcome"]

    assert (outcome(2, 200), outcome(6, 195)) == ("no better", "forgot too much")
    assert outcome(6, 200) == outcome(6, 197) == "better"


def test_a_training_has_the_minutes_and_the_share_that_are_typed(call, tiny_path: Path, monkeypatch):
    made: list[Any] = []
    monkeypatch.setattr(learn, "lower_priority", lambda: None)
    monkeypatch.setattr(learn.signal, "signal", lambda *given: None)
    monkeypatch.setattr(learn, "Learner", lambda *given: made.append(given) or sys.exit(3))
    arguments = f"target={tiny_path}", "max_minutes=7.5", "device_share=0.25", "output_dir=learned"
    assert call(learn.main, *arguments).code == 3
    assert "trainer.max_minutes=7.5" in made[0][2] and made[0][5].keywords["share"] == 0.25


def test_a_row_that_cannot_be_written_again_ends_no_round(target: Target, capsys):
    good = {"prompt_ids": [5, 6, 7], "ids": [0] * 20, "seed": 1, "temperature": 1}
    bad = [{"temperature": None}, {"temperature": "a"}, {"temperature": -1}, {"seed": None}, {"seed": 1.5}]
    bad += [{"prompt_ids": ["a"]}, {"ids": [[1]]}, {"prompt_ids": [10**6]}, {"prompt_ids": [5] * 300}]
    Path("rows.jsonl").write_text("".join(json.dumps(good | one) + "\n" for one in [*bad, {}]))
    assert len(decode(target, load_drafter("ngram", target), rows_of(Path("rows.jsonl")))) == 1
    assert capsys.readouterr().out.count("a text is left out") == len(bad)


def test_the_judge_writes_the_texts_that_were_served(target: Target):
    rows = [{"prompt_ids": [5, 6, 7 + i], "ids": [0] * 20, "seed": i, "temperature": i % 2} for i in range(3)]
    found = decode(target, load_drafter("ngram", target), rows)
    assert len(found) == 3 and all(emitted == 19 and 0 < steps <= 19 for emitted, steps in found)


@pytest.mark.parametrize(
    "old, new, outcome",
    [
        ([SAME, SAME], [BETTER, SAME], "served"),
        ([SAME, []], [BETTER, []], "served"),  # the first round
        ([SAME, SAME], [SAME, SAME], "no better"),
        ([SAME, SAME], [WORSE, BETTER], "no better"),
        ([SAME, BETTER], [BETTER, SAME], "forgot too much"),
        ([[], []], [[], []], "no better"),
    ],
)
def test_a_head_serves_where_it_is_better_and_has_not_forgotten(old, new, outcome):
    rounds = Rounds()
    rounds.found = {"head-0001": old, "head": new}
    facts = rounds.run_round()
    head = "head-0002" if outcome == "served" else "head-0001"
    assert facts["outcome"] == outcome and rounds.current == head and facts["parent"] == "head-0001"
    cards = sorted(path.parent.name for path in Path("learned").glob("head-*/README.md"))
    assert cards == ["head-0001", "head-0002"][: int(head[-1])]
    assert texts_of(rounds.learner.replay)


def test_a_training_that_is_killed_begins_again_and_one_that_fails_does_not(capsys):
    Path("kills").write_text("2")
    assert run_process(["-c", KILLED], Path("log"))
    assert capsys.readouterr().out.count("a process ended with -9") == 2
    assert not run_process(["-c", "raise SystemExit('no space left')"], Path("log"))
    assert capsys.readouterr().out == "a process ended with 1: no space left\n"
    rounds = Rounds(run=lambda arguments: False)
    assert rounds.run_round()["outcome"] == "failed" and rounds.current == "head-0001"


def test_a_round_goes_on_where_it_was_interrupted():
    rounds = Rounds()
    rounds.found = {"head": [BETTER, SAME]}
    rounds.serve()
    rounds.learner.run = lambda arguments: len(rounds.ran) == 2 or rounds.run(arguments)
    with pytest.raises(FileNotFoundError):  # as if it ended before the new head was judged
        rounds.learner.run_round_if_due()
    data = (rounds.learner.round / "train" / "new.jsonl").read_bytes()
    rounds.serve(5, first=100)  # of the next round
    again = Rounds()
    again.found = rounds.found
    again.learner.prepare()
    assert (rounds.learner.round / "train" / "new.jsonl").read_bytes() == data
    again.learner.run_round_if_due()
    assert rounds.ran == ["head-0001", "train"] and again.ran == ["head"] and again.current == "head-0002"
    assert len(texts_of(again.learner.served)) == 5 and len(texts_of(again.learner.replay)) == 40


def test_a_full_disk_after_a_head_was_added_is_not_the_end_of_learning():
    rounds = Rounds()
    rounds.found = {"head": [BETTER, SAME]}
    rounds.serve()

    def no_space(name: str) -> None:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr(rounds.heads, "choose", no_space)
        rounds.learner.run_round_if_due()
    rounds.learner.run_round_if_due()  # when there is space again
    card = rounds.heads.folder / rounds.current / "README.md"
    assert card.read_text().count("Learned while serving") == 1 and rounds.history()[-1]["head"] == rounds.current


def test_the_head_before_comes_back_by_hand_or_where_it_is_better():
    rounds = Rounds()
    rounds.found = {"head": [BETTER, SAME]}
    assert rounds.run_round()["head"] == "head-0002" == rounds.current
    rounds.found = {}  # no reason to go back
    assert rounds.run_round()["outcome"] == "no better" and rounds.ran[-1] == "head-0001"
    rounds.found = {"head-0001": [BETTER, SAME]}
    facts = rounds.run_round()
    assert facts["outcome"] == "back" and facts["head"] == "head-0001" == rounds.current
    assert facts["recent"] == [2.05, 3.05]
    rounds.heads.choose("head-0002")
    rounds.learner.run = lambda arguments: bool(rounds.run(arguments) and not rounds.heads.choose("head-0001"))
    rounds.found = {"head": [BETTER, SAME]}
    assert rounds.run_round()["outcome"] == "late" and rounds.current == "head-0001"
    Path("learned/current").write_text("")  # as a shell leaves it before it writes
    rounds.serve()
    rounds.learner.run_round_if_due()
    assert len(rounds.history()) == 4
    Path("learned/current").unlink()
    assert rounds.heads.current() == Path("learned/head-0002")
    assert rounds.heads.first("given") == "learned/head-0002"
    assert rounds.heads.first("learned/head-0001") == "learned/head-0001"
    rounds.heads.start("learned/head-0001")
    assert rounds.current == "head-0001"


def test_history_is_json_after_a_single_held_out_text_and_half_a_line_ends_no_round():
    rounds = Rounds()
    rounds.found = {name: [SAME[:1], SAME] for name in ("head", "head-0001")}
    assert rounds.run_round()["outcome"] == "no better"
    assert "Infinity" not in rounds.learner.history.read_text() and rounds.history()[-1]["error"] is None
    rounds.learner.history.write_bytes(b'{"head": "head-0001", "par\n[]\n')
    rounds.serve()
    rounds.learner.run_round_if_due()
    assert json.loads(rounds.learner.history.read_text().splitlines()[-1])["outcome"] == "no better"


@pytest.mark.linux
def test_a_process_runs_for_its_share_of_the_time():
    process = start_process(["-c", "import time; time.sleep(600)"], Path("log"))
    waiting = threading.Thread(target=wait, args=(process, 0.5))
    waiting.start()
    state = Path(f"/proc/{process.pid}/stat")
    for letter in ("T", "S", "T"):
        wait_until(lambda letter=letter: state.read_text().split()[2] == letter)
    process.kill()
    waiting.join()


@pytest.mark.linux
@pytest.mark.nightly
def test_a_process_ends_with_the_one_that_started_it():
    parent = start(sys.executable, "-c", PARENT, cwd=Path.cwd(), real=True)
    wait_until(lambda: Path("log").exists() and Path("log").read_text().endswith("\n"))
    child = Path(f"/proc/{int(Path('log').read_text())}")
    assert child.exists()
    parent.kill()
    wait_until(lambda: not child.exists() or "Z" in (child / "stat").read_text())
    parent.wait()


@pytest.mark.nightly
@pytest.mark.linux
def test_a_process_whose_starter_ended_at_once_does_not_run():
    parent = start(sys.executable, "-c", ENDS_AT_ONCE, cwd=Path.cwd(), real=True)
    child = Path("/proc", parent.communicate()[0].strip())
    wait_until(lambda: not child.exists() or "Z" in (child / "stat").read_text())
    assert not Path("ran").exists()


def test_the_oldest_heads_go_but_none_that_serves_or_may_come_back():
    rounds = Rounds(keep=2)
    rounds.found = {"head": [BETTER, SAME]}
    for _ in range(3):
        rounds.run_round()
    assert [head.name for head in rounds.heads.all()] == ["head-0003", "head-0004"]
    rounds.heads.choose("head-0003")
    rounds.run_round()
    assert [head.name for head in rounds.heads.all()] == ["head-0003", "head-0005"] and rounds.current == "head-0005"


def test_a_head_that_is_chosen_while_a_round_ends_is_not_removed(monkeypatch: pytest.MonkeyPatch):
    rounds = Rounds(keep=2)
    rounds.found = {"head": [BETTER, SAME]}
    rounds.run_round()
    finish = rounds.learner.finish
    monkeypatch.setattr(rounds.learner, "finish", lambda: finish() or rounds.heads.choose("head-0001"))
    rounds.run_round()
    assert rounds.heads.current() == Path("learned/head-0001")


@pytest.fixture
def folder(target: Target, tmp_path: Path) -> Path:
    save_head(make_head("eagle3", target), tmp_path / "given", target)
    return tmp_path


def facts(tiny_path: Path, *more: str) -> list[str]:
    return [*on_cpu(tiny_path), "served_model_name=tiny", "drafter=given/", "learn=true", *more]


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
        wait_until(lambda: text(server, 0) == expected[0] and served_by(server, 2))
        assert [asked, *(text(server, seed) for seed in range(1, 4))] == expected
        (learned / "current").write_bytes(b"\xff\xfe")  # another encoding, or a damaged disk
        wait_until(lambda: (learned / "current").read_bytes() == b"head-0002\n")
        (learned / "current").unlink()
        (learned / "current").mkdir()
        wait_until(lambda: "current cannot be read or corrected" in server.log.read_text())
        (learned / "current").rmdir()
        (learned / "current").write_text(f"{learned}/head-0001\n")
        wait_until(lambda: (learned / "current").read_text() == "head-0002\n")
        (learned / "current").write_text("head-9\n")
        wait_until(lambda: "head-9 cannot serve: learned/head-9 is not a directory" in server.log.read_text())
        wait_until(lambda: (learned / "current").read_text() == "head-0002\n")
        rows = (learned / "served.jsonl").read_text()
        assert '"seed": 9' not in rows and rows == (folder / "log").read_text()
        server.process.send_signal(signal.SIGKILL)
    with served(folder, *facts(tiny_path)) as server:
        assert text(server, 3) == expected[3] and served_by(server, 2) and not served_by(server, 1)
        assert (learned / "served.jsonl").read_text().startswith(rows)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 128 + signal.SIGTERM
    assert "learning ended" not in server.log.read_text()


def served_by(server: Served, number: int, tenant: str = "") -> float:
    return server.metric("foredraft_forwards_total", f'head="{tenant}head-000{number}"')


@pytest.mark.nightly
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
        rows = {tenant: (learned / tenant / "served.jsonl").read_text().count("\n") for tenant in ("one", "two")}
        assert rows["one"] == 4 and rows["two"] > 4
        body = json.dumps({"prompt": PROMPT, "model": "three"}).encode()
        status, _, said = server.post(body, "/v1/completions")
        assert status == 404 and b"'one', 'two'" in said


def test_a_log_with_a_limit_starts_again(tiny_path: Path, folder: Path):
    with served(folder, *facts(tiny_path)) as server:
        log = folder / "learned" / "served.jsonl"
        text(server, 1)
        with log.open("a") as file:
            file.write("x" * 2**26)
        text(server, 2)
        assert log.read_text().count("\n") == 1 and '"seed": 2' in log.read_text()


@pytest.mark.parametrize(
    "error, chosen, left",
    [
        (ValueError("damaged"), "head-2", "head-1"),
        (ValueError("damaged"), "head-3", "head-3"),  # chosen while the other one was loaded
        (ApiError(503, "the engine has stopped"), "head-2", "head-2"),
    ],
)
def test_only_the_name_of_a_head_that_cannot_serve_is_corrected(tmp_path: Path, error: Exception, chosen, left):
    (file := tmp_path / "current").write_text("head-1\n")
    (tmp_path / "head-2").mkdir()

    def fail(function: Any) -> None:
        file.write_text(chosen)
        raise error

    worker: Any = SimpleNamespace(engines=["engine"], heads={}, call=fail)
    asyncio.run(FollowedHead(worker, 0, file, lambda path: NoDrafter()).serve("head-2"))
    assert file.read_text().strip() == left and worker.heads == {"engine": "head-1"}


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


def test_what_a_server_cannot_read_is_said_once(tmp_path: Path, monkeypatch, caplog):
    """Look every millisecond, three times at an unreadable file, then at another fault."""
    worker: Any = SimpleNamespace(engines=["engine"], heads={})
    (file := tmp_path / "current").write_text("head-1")
    head = FollowedHead(worker, 0, file, lambda path: NoDrafter())
    faults = iter([OSError("damaged")] * 3 + [OSError("full"), asyncio.CancelledError()])

    def read_text(path: Path, **_: Any) -> str:
        raise next(faults)

    monkeypatch.setattr(followed_head, "POLL", 0.001)
    monkeypatch.setattr(Path, "read_text", read_text)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(head.follow())
    assert [record.message.rpartition(": ")[2] for record in caplog.records] == ["damaged", "full"]


def test_one_program_at_a_time_learns_in_a_directory(folder: Path, tiny_path: Path):
    (folder / "learned").mkdir()
    with learn.hold(folder / "learned", "output_dir"):
        done = script("train/learn.py", f"target={tiny_path}", cwd=folder)
    assert done.code == 2 and "output_dir=learned is being written by" in done.err


@pytest.mark.nightly
def test_a_round_by_the_real_trainer_and_judge(tiny_path: Path, folder: Path):
    few = ["trainer.max_steps=2", "max_length=32", "trainer.per_device_train_batch_size=2", "eval.final_num_prompts=2"]
    with served(folder, *facts(tiny_path, "learn.num_samples=8", f"learn.train={json.dumps(few)}")) as server:
        for seed in range(12):
            text(server, seed, prompt=f"{PROMPT}{seed}")
        history = folder / "learned" / "history.jsonl"
        wait_until(history.exists)
        (found,) = map(json.loads, history.read_text().splitlines())
        logs = (folder / "learned" / name for name in ("learn.log", "process.log"))
        assert found["outcome"] in ("served", "no better"), [log.read_text() for log in logs]
        assert len(found["recent"]) == 2 and text(server, 3) == text(server, 3, speculative=False)


def test_a_round_trains_a_head_of_the_same_window(target):
    for window in (None, 40):
        assert (
            composed("train", "data=accepted", *train_overrides(make_head("eagle3", target, window=window))).head.window
            == window
        )


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "dspark", "p_eagle"])
def test_a_round_trains_a_head_of_the_same_depth(target, kind: str):
    head = make_head(kind, target)
    settings = composed("train", "data=accepted", *train_overrides(head)).head
    block = "block_size" in settings
    depth = settings.block_size - (not settings.sample_from_anchor) if block else settings[head.depth_key]
    assert depth == head.depth
