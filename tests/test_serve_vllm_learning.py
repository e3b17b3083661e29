"""`foredraft serve engine=vllm learn=true` before a program in vLLM's place; tests/serving has it before the real one."""

import json
import os
import shutil
import stat
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from foredraft.heads import Target, save_head
from foredraft.inference.serve.vllm_learning import samples_of
from tests.support import ROOT
from tests.support.head_factory import make_head
from tests.support.serving import Served, served, wait_until


@pytest.fixture
def server(tiny_path: Path, target: Target, tmp_path: Path) -> Iterator[Served]:
    save_head(make_head("eagle3", target), tmp_path / "given", target)
    fake = tmp_path / "bin" / "vllm"
    fake.parent.mkdir()
    fake.write_text(f'#!/bin/sh\nexec {sys.executable} {ROOT}/tests/support/fake_vllm.py "$@"\n')
    fake.chmod(0o755)
    facts = [f"target={tiny_path}", "target.device=cpu", "drafter=given/", "engine=vllm", "model=m", "learn=true"]
    environment = {"PATH": f"{fake.parent}:{os.environ['PATH']}", "RECORD": "record"}
    with served(tmp_path, *facts, **environment) as running:
        yield running


def ask(server: Served, prompt: str, **more: object) -> tuple[int, str]:
    status, _, said = server.post(json.dumps({"prompt": prompt, **more}).encode(), "/v1/completions")
    return status, said.decode()


def test_what_vllm_serves_is_kept_and_a_better_head_taken_over(server: Served, target: Target, tmp_path: Path):
    learned = tmp_path / "learned"
    for number in range(3):
        status, said = ask(server, "x" * number, stream=number == 2, temperature=0.5)
        assert status == 200 and ("DONE" in said) == (number == 2)
    assert ask(server, "left out", store=False)[0] == 200 and ask(server, "wrong")[0] == 400
    rows = [json.loads(line) for line in (learned / "new.jsonl").read_text().splitlines()]
    assert [row["prompt_ids"] for row in rows] == [[1, 2, 0], [1, 2, 1], [1, 2, 2]]
    assert all(row["ids"] == [3, 4] and row["temperature"] == 0.5 for row in rows)
    for path in ("/pause", "/v1/../pause", "/update_weights"):
        assert server.post(b"{}", path)[0] == 404
    assert server.metric("foredraft_head", 'head="head-0001"') == 1 and server.metric("vllm_requests") == 3
    record = tmp_path / "record"
    started = record.read_text().splitlines()
    process, socket, extension = started[0].split(" ", 2)
    assert len(started) == 1 and extension == 'foredraft_weights.Extension {"backend": "foredraft"}'
    folder = Path(socket).parent
    assert not folder.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO) and (folder / "foredraft_weights.py").exists()

    shutil.copytree(learned / "head-0001", learned / "head-0002")
    (learned / "current").write_text("head-0002\n")
    with ThreadPoolExecutor(4) as pool:  # some of them while the weights change
        wait_until(
            lambda: {ask(server, "y")[0] for _ in pool.map(lambda _: None, range(4))} == {200} and head(server) == 2
        )
    changes = [line.split(" ")[0] for line in record.read_text().splitlines()[1:]]
    updated = ["start_draft_weight_update?", "update_weights?", "finish_weight_update?"]
    assert changes == ["pause?mode=keep", *updated, "resume?"]
    assert '"head-0002"' in record.read_text() and f"{folder}/head-0002" in record.read_text()

    other = make_head("eagle3", target, draft_vocab_size=60)
    save_head(other, learned / "head-0003", target)
    (learned / "current").write_text("head-0003\n")
    wait_until(lambda: (learned / "current").read_text() == "head-0002\n")
    assert "head-0003 cannot serve: vLLM can only replace the weights of a head" in server.log.read_text()
    assert record.read_text().count("pause?") == 1 and ask(server, "z")[0] == 200

    os.kill(int(process), 9)
    assert server.process.wait(60) == 1 and "vLLM has ended with -9" in server.log.read_text()
    assert not folder.exists()


def head(server: Served) -> int:
    return next(number for number in (1, 2) if server.metric("foredraft_head", f'head="head-000{number}"'))


def test_rows_of_a_chat_are_read_from_its_chunks():
    chunks = [
        {"id": "a", "prompt_token_ids": [1, 2], "choices": [{"index": 0, "delta": {}}, {"index": 1, "delta": {}}]},
        {"id": "a", "choices": [{"index": 1, "token_ids": [3]}]},
        {"id": "a", "choices": [{"index": 1, "token_ids": [4]}]},
        {"id": "a", "choices": []},
    ]
    sent = b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks)
    (row,) = samples_of({"seed": 7}, sent + b'data: [DONE]\n\ndata: {"cut')
    assert (row["prompt_ids"], row["ids"], row["seed"], row["accepted"]) == ([1, 2], [3, 4], 7, [])


@pytest.mark.parametrize(
    "asked, seed, temperature",
    [
        ({"temperature": None, "seed": None}, 0, 1.0),
        ({"temperature": "0.5", "seed": "3"}, 3, 0.5),
        ({"temperature": [1], "seed": {}}, 0, 1.0),
        ({"temperature": 0}, 0, 0.0),
    ],
)
def test_a_row_has_the_numbers_that_drew_it(asked, seed, temperature):
    chunk = {"id": "a", "prompt_token_ids": [1, 2], "choices": [{"index": 0, "token_ids": [3]}]}
    (row,) = samples_of(asked, b"data: " + json.dumps(chunk).encode())
    assert (row["seed"], row["temperature"]) == (seed, temperature)
