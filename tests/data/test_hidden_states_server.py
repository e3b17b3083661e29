"""Hidden states of an engine: the losses of hidden_states=online, what dies meanwhile, a wrong address."""

import http.client
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save, save_file
from transformers import LlamaForCausalLM

from foredraft.heads import Target
from foredraft.heads.base import PackedBatch
from foredraft.scripts import extract
from foredraft.train.data.packing import Packed
from foredraft.train.hidden_states import online
from foredraft.train.hidden_states.engine import EngineError
from foredraft.train.hidden_states.probe import final_norm, on_host, read_states
from foredraft.train.hidden_states.server import server
from tests.support import ROOT
from tests.support.architectures import FAMILIES, pair
from tests.support.batches import batch_of, documents
from tests.support.processes import (
    ONE,
    SMALL_EAGLE3,
    children,
    complaint,
    end,
    losses,
    program,
    reserved_port,
    script,
    start,
    succeeded,
    until,
)
from tests.support.tiny import tiny_config, without_layers

STEPS, LAYERS = 6, [1, 3, 4]
DEATHS = ("asked", "answered", "half")  # when it is asked, when it has answered, with half a file written
FAILURES = ("busy", "not json", "other tokens")
RUN = [*SMALL_EAGLE3, ONE, "trainer.optim=adamw", f"trainer.max_steps={STEPS}", "trainer.save_steps=2"]
WORKERS = "trainer.dataloader_num_workers=2"


def started(*command: str) -> tuple[subprocess.Popen, str]:
    """Start a process, and return it with the address in its first line."""
    process = start(sys.executable, *command, cwd=ROOT)
    line = until(process, "http")
    return process, next(word for word in line.replace(",", " ").split() if word.startswith("http"))


def extracting(target: Path, folder: Path) -> tuple[subprocess.Popen, str]:
    given = [f"target.path={target}", "target.device=cpu", "target.dtype=float32", "port=0"]
    layers = f"layers={LAYERS}".replace(" ", "")
    return started("scripts/extract.py", *given, layers, f"output_dir={folder}")


@pytest.fixture(scope="module")
def engine(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Start an engine, and return its address and its folder."""
    folder = tmp_path_factory.mktemp("states")
    process, url = extracting(tiny_path, folder)
    yield url, folder
    process.terminate()
    process.wait(30)


@pytest.fixture(scope="module")
def given(tiny_path: Path, folder: Path) -> list[str]:
    return [*RUN, f"target.path={tiny_path}", f"data.path={folder}"]


@pytest.fixture(scope="module")
def alone(given: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train with online hidden states."""
    cwd = tmp_path_factory.mktemp("alone")
    succeeded(end(program(*given, "output_dir=out", cwd=cwd)))
    return cwd / "out"


def served(url: str, *more: str) -> list[str]:
    return ["hidden_states=server", f"hidden_states.url={url}", WORKERS, *more]


def test_rows_are_what_the_target_reads_in_the_process(target: Target, engine: tuple[str, Path], tmp_path: Path):
    """Check that layers are in the head's order, and that the last one is after the final norm."""
    url, folder = engine
    packed = Packed(documents(40, 25, 33, 60, 21, 50, 3), length=32, seed=0)
    layers = [target.num_layers, 4, 1]
    urls = [url, url.replace("127.0.0.1", "localhost")]
    batch = batch_of(server(packed, target, layers, 2, urls, str(tmp_path), timeout=60, patience=10))
    aux_hidden_states, last = online.forward_target(target, PackedBatch(**batch_of(packed)), layers)
    real = batch["documents"] >= 0
    torch.testing.assert_close(batch["features"][real], aux_hidden_states[real], rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(batch["last"][real], last[real], rtol=1e-5, atol=1e-4)
    assert not list(folder.iterdir())


def test_losses_are_those_of_features_online(
    given: list[str], alone: Path, engine: tuple[str, Path], here, target: Target, tmp_path: Path
):
    """Train while the files of the target's layers are missing."""
    url, folder = engine
    ends = without_layers(target, tmp_path / "ends")
    ended = succeeded(here(*given, *served(url), f"target.path={ends}", "output_dir=out"))
    assert (
        f"nothing was measured, because only the target's ends are loaded here: foredraft evaluate target={ends}"
        in (ended.out)
    )
    found = losses(tmp_path / "out")
    assert len(found) == STEPS
    torch.testing.assert_close(torch.tensor(found), torch.tensor(losses(alone)), rtol=0, atol=1e-5)
    assert not list(folder.iterdir())


@pytest.mark.nightly
def test_deaths_on_both_sides_change_nothing(given: list[str], alone: Path, tiny_path: Path, tmp_path: Path):
    """Kill the engine four times, by the request, and the trainer up to twice, anywhere."""
    seed, states = os.environ.get("FOREDRAFT_KILL_SEED", "0"), tmp_path / "states"
    mortal, url = started(__file__, str(tiny_path), str(states), seed, "4")
    try:
        done = script("tests/support/kill_probe.py", seed, "2", *given, *served(url), "output_dir=out", cwd=tmp_path)
    finally:
        mortal.terminate()
    ends = json.loads(done.out.splitlines()[-1])
    assert ends[-1] == 0 and -signal.SIGKILL in ends, (ends, done.err[-2000:])
    met = end(mortal).out.split("\n")
    assert {"asked", "answered", "half"} <= set(met)
    torch.testing.assert_close(torch.tensor(losses(tmp_path / "out")), torch.tensor(losses(alone)), rtol=0, atol=1e-5)
    ours, theirs = (load_file(path / "head/model.safetensors") for path in (tmp_path / "out", alone))
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-5)
    assert not list(states.iterdir())  # what nobody read is deleted by who comes next


@pytest.mark.linux
@pytest.mark.nightly  # by day test_resume.py stops a run with workers
def test_an_interrupted_trainer_leaves_no_files(given: list[str], engine: tuple[str, Path], tmp_path: Path):
    url, folder = engine
    process = program(*given, *served(url), "trainer.max_steps=100000", "output_dir=out", cwd=tmp_path, real=True)
    until(process, "^step 3/")
    for pid in children(process):  # a terminal and a scheduler send them to all processes
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    ended = end(process)
    assert ended.code == 130 and "the same command resumes from there" in ended.out, ended.err
    assert ended.err.count("stopping after this step") == 1
    assert not list(folder.iterdir())


def test_an_engine_that_stays_away_is_named(given: list[str], tiny_path: Path, tmp_path: Path):
    mortal, url = extracting(tiny_path, tmp_path / "states")
    more = ["trainer.max_steps=100000", "hidden_states.patience=0.5", "output_dir=out"]
    process = program(*given, *served(url), *more, cwd=tmp_path)
    until(process, "^step 3/")
    mortal.kill()
    ended = end(process)
    assert ended.code == 2 and "Traceback" not in ended.err, ended.err
    (said,) = re.findall("^error: .*", ended.err, re.MULTILINE)  # another process may say that it asks again after it
    assert said.startswith(f"error: hidden_states.url={url} has given no hidden states for 0.5 s (")
    assert said.endswith("): see that the engine runs; the same command continues from the newest checkpoint")


# Who is wrong


def test_an_engine_of_other_layers_is_refused(given: list[str], engine: tuple[str, Path], here):
    said = complaint(here(*given, *served(engine[0]), "head.target_layer_ids=[1,2,4]", "output_dir=out"))
    assert said.startswith(
        f"hidden_states.url={engine[0]} gives layers [1, 3, 4, 6] and the head needs [1, 2, 4, 6]: start"
    )


def test_another_model_is_refused(given: list[str], engine: tuple[str, Path], here, tiny_path: Path, tmp_path: Path):
    """Give the trainer another model."""
    shutil.copytree(tiny_path, tmp_path / "other")
    torch.manual_seed(9)
    LlamaForCausalLM(tiny_config()).save_pretrained(tmp_path / "other")
    other = f"target.path={tmp_path / 'other'}"
    said = complaint(here(*given, *served(engine[0]), other, "output_dir=out"))
    assert said.startswith(
        f"hidden_states.url={engine[0]} serves another model than {tmp_path / 'other'}: it writes token "
    )


@pytest.mark.parametrize(
    "path, message",
    [
        ("/v1", "answers without hidden states: start it as in conf/hidden_states/server.yaml"),
        ("", "status 404"),
        ("/v1", r"names .*mine.safetensors, which is not a file of this request"),
    ],
)
def test_a_server_that_is_no_engine_is_refused_and_its_file_stays(
    path: str, message: str, target: Target, tmp_path: Path
):
    mine = tmp_path / "mine.safetensors"
    mine.write_text("not an engine's")
    body: dict[str, Any] = {"data": [{"id": "tiny"}], "choices": []}
    body |= {"kv_transfer_params": {"hidden_states_path": str(mine)}} if "mine" in message else {}

    class Answers(BaseHTTPRequestHandler):
        def log_message(self, *words: Any) -> None:
            pass

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(200 if self.path.startswith("/v1/") else 404)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        do_GET = do_POST

    other = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=other.serve_forever, daemon=True).start()
    packed, url = Packed(documents(40, 25), length=32, seed=0), f"http://127.0.0.1:{other.server_port}{path}"
    with pytest.raises(EngineError, match=message):
        server(packed, target, [2], 1, url, str(tmp_path), patience=30)
    other.shutdown()
    assert mine.exists()


def test_bad_requests_are_answered_and_harm_nobody(engine: tuple[str, Path]):
    address = urllib.parse.urlsplit(engine[0]).netloc
    too_long = json.dumps({"prompt": [1] * 100_000})
    for body in ("{", "[]", '{"prompt": "text"}', '{"prompt": []}', '{"prompt": [-1]}', '{"prompt": [true]}', too_long):
        connection = http.client.HTTPConnection(address, timeout=30)
        connection.request("POST", "/v1/completions", body)
        answer = connection.getresponse()
        assert answer.status == 400 and json.load(answer)["error"]["message"].startswith("prompt: "), body
    connection = http.client.HTTPConnection(address, timeout=30)
    connection.putrequest("POST", "/v1/completions")
    connection.putheader("Content-Length", "many")
    connection.endheaders()
    assert connection.getresponse().status == 400
    connection = http.client.HTTPConnection(address, timeout=30)
    connection.request("GET", "/v1/models")
    assert connection.getresponse().status == 200


@pytest.mark.parametrize("family", FAMILIES)
def test_the_final_norm_of_every_family(family: str):
    target = pair(family, "eager").target
    norm, tokens = final_norm(target), [3, 7, 11, 5, 2]
    before = read_states(target, norm, tokens, [target.num_layers])[:, 0]
    after = target.forward(torch.tensor([tokens]), layers=[target.num_layers]).aux_hidden_states[0]
    assert not torch.allclose(before, after) and torch.equal(on_host(norm)(before), after)


class Mortal(extract.Handler):
    """Serve hidden states, but fail and die on the way."""

    draw: random.Random
    left: int  # requests until it dies
    death: str
    way = ""

    def do_POST(self) -> None:
        Mortal.left -= 1
        self.way = self.death if self.left == 0 else self.draw.choice(FAILURES) if self.draw.random() < 0.1 else ""
        if self.way:
            print(self.way, flush=True)
        if self.way == "asked":
            die()
        super().do_POST()

    def send(self, body: dict[str, Any], status: int = 200) -> None:
        if self.way == "not json":
            self.send_response(200)
            self.send_header("Content-Length", "3")
            self.end_headers()
            self.wfile.write(b"oh!")
        else:
            super().send(body, status)
        if self.way == "answered":
            die()

    def answer(self, name: str, tensors: dict[str, torch.Tensor]) -> None:
        if self.way == "busy":
            self.send({"error": {"message": "later"}}, 503)
        elif self.way == "not json":
            self.send({})
        elif self.way == "other tokens":
            super().answer(name, tensors | {"token_ids": tensors["token_ids"] + 1})
        else:
            super().answer(name, tensors | ({"half": torch.ones(1)} if self.way == "half" else {}))


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def save_or_die(tensors: dict[str, torch.Tensor], path: Path) -> None:
    if "half" in tensors:
        path.write_bytes(save(tensors)[:500])
        die()
    save_file(tensors, path)


def main(path: str, folder: str, seed: str, deaths: str) -> None:
    """Serve in one life after another, each of which is a fork of this process. When and how one fails or dies is drawn with
    the seed. The last life lives on. Print the address, and then every failure and death."""
    torch.set_num_threads(1)
    if os.getpgrp() != os.getpid():
        os.setpgrp()
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))  # this process and its present life
    target, draw = Target.from_pretrained(path, dtype="float32", device="cpu"), random.Random(int(seed))
    port = reserved_port()
    print(f"http://127.0.0.1:{port}/v1", flush=True)
    order = draw.sample(DEATHS, len(DEATHS))  # three deaths are one of each
    for life in range(int(deaths) + 1):
        Mortal.draw, Mortal.death = random.Random(draw.random()), order[life % len(order)]
        Mortal.left = draw.randint(1, 7) if life < int(deaths) else -1
        pid = os.fork()
        if pid == 0:
            extract.Handler, extract.save_tensors = Mortal, save_or_die
            extract.Extractor(target, LAYERS, Path(folder), "127.0.0.1", port).serve_forever()
        os.waitpid(pid, 0)
        time.sleep(draw.random() / 2)


if __name__ == "__main__":
    main(*sys.argv[1:])
