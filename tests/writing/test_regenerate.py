"""The target's own answers: every row once, whatever the server does and whenever the run is killed."""

import asyncio
import fcntl
import json
import re
import shutil
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
import torch
from openai.types.chat import ChatCompletion
from transformers import AutoModelForCausalLM

from foredraft.inference import generate
from foredraft.train.data.chat_template import ChatFormat
from foredraft.train.data.layouts import SkippedRow
from foredraft.train.data.sources import Row, Source
from foredraft.train.writing import writers as writing
from foredraft.train.writing.regeneration import GenerationSettings, Questions, Regeneration, questions
from foredraft.train.writing.writers import Server, in_process, through_server
from foredraft.train.writing.written_rows import RowFile
from tests.support import ROOT, nightly_but
from tests.support.chats import CHATML, tokenizer
from tests.support.processes import end, start, succeeded

SAMPLING = GenerationSettings(1.0, None, 16, 7)
WAYS = ("fine", "busy", "broken", "late", "cut", "not json", "no choices", "text")
MODELS = json.dumps({"object": "list", "data": [{"id": "tiny", "object": "model"}]})


class BadServer(ThreadingHTTPServer):
    """Speak OpenAI's protocol and misbehave: the first time it is asked something it may fail in many ways."""

    daemon_threads = True

    def __init__(self, ways: tuple[str, ...] = WAYS, slow: float = 0.0, models: str = MODELS):
        super().__init__(("127.0.0.1", 0), Handler)
        self.ways, self.slow, self.models = ways, slow, models
        self.asked: dict[str, list[float]] = {}  # times at which each request came, by its body
        self.met: set[str] = set()  # the ways in which it has failed
        self.now, self.most, self.lock = 0, 0, threading.Lock()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Any
    protocol_version = "HTTP/1.1"

    def log_message(self, *words: Any) -> None:
        pass

    def send(
        self, body: str, status: int = 200, kind: str = "application/json", missing: int = 0, **headers: str
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body.encode()) + missing))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body.encode())

    def do_GET(self) -> None:
        self.send(self.server.models)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        server = self.server
        with server.lock:
            before = server.asked.setdefault(body, [])
            before.append(time.monotonic())
            # Which way depends on the question alone, so that a second run of a test is the first one again.
            way = server.ways[sum(body.encode()) % len(server.ways)] if len(before) == 1 else "fine"
            server.met.add(way)
            server.now += 1
            server.most = max(server.most, server.now)
        try:
            time.sleep(server.slow)
            self.answer(json.loads(body), way)
        except (BrokenPipeError, ConnectionResetError):
            pass  # a client that gave up waiting
        finally:
            with server.lock:
                server.now -= 1

    def answer(self, asked: dict, way: str) -> None:
        """Return how many turns it was asked with, and the last question's words."""
        last = asked["messages"][-1]["content"]
        message = {"role": "assistant", "content": f"{len(asked['messages'])}: {last}"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        good = json.dumps({"id": "1", "object": "chat.completion", "created": 1, "model": "tiny", "choices": [choice]})
        half = len(good) // 2
        answers: dict[str, tuple[str, dict]] = {
            "busy": ("{}", {"status": 429, "Retry_After": "1"}),
            "broken": ("oh", {"status": 500, "kind": "text/plain"}),
            "cut": (good[:half], {"missing": len(good) - half}),
            "not json": (good[:-20], {}),
            "no choices": ("{}", {}),
            "text": ("try later", {"kind": "text/plain"}),
        }
        if "refuse" in last:
            return self.send('{"error": {"message": "too long"}}', status=400)
        if way == "late":
            time.sleep(4.0)
        elif way == "cut":
            self.close_connection = True
        body, how = answers.get(way, (good, {}))
        return self.send(body, **how)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Write 32 conversations of one or two questions, and two samples without any."""
    rows: list[dict] = [{"prompt": f"question {i}", "response": "old"} for i in range(16)]
    rows += [
        {"messages": [{"role": r, "content": f"{r} {i} {n}"} for n in (1, 2) for r in ("user", "assistant")]}
        for i in range(15)
    ]
    rows += [{"id": 4}, {"text": "raw"}, {"prompt": "please refuse"}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def opened(output: Path, sampling: GenerationSettings = SAMPLING, **facts: str) -> RowFile:
    return RowFile(output, {"settings": sampling._asdict() | facts}, "output")


def answer(server: Server, asked: Iterable[Questions], output: Path, concurrency: int = 4, **facts: str) -> None:
    with opened(output, **facts) as rows:
        left = Regeneration(SAMPLING).remaining(asked, rows)
        through_server(server, left, rows, concurrency, lambda texts: None)


def regenerate(file: Path, output: Path, server: BadServer, timeout: float = 2.0, retries: int = 6) -> None:
    asked = Server(server.endpoint, None, timeout, retries)
    answer(asked, questions(Source(str(file)), {}), output, 8, model=asked.model)


def check(output: Path) -> None:
    """Check that every sample appears once, with each answer given after the answers before."""
    rows = sorted((json.loads(line) for line in output.read_text().splitlines()), key=lambda row: row["number"])
    assert [row["number"] for row in rows] == list(range(32))
    assert [row["seed"] for row in rows] == list(range(7, 39))
    for i, row in enumerate(rows[:16]):
        assert [m["content"] for m in row["messages"]] == [f"question {i}", f"1: question {i}"]
        assert row["finish_reasons"] == ["stop"]
    for i, row in enumerate(rows[16:31]):
        asked = [f"user {i} 1", f"1: user {i} 1", f"user {i} 2", f"3: user {i} 2"]
        assert [m["content"] for m in row["messages"]] == asked
        assert [m["role"] for m in row["messages"]] == ["user", "assistant"] * 2
    assert "too long" in rows[31]["error"] and "messages" not in rows[31]
    assert json.loads(output.with_suffix(".about.json").read_text())["settings"]["model"] == "tiny"


@pytest.mark.nightly
def test_a_bad_server_costs_no_row(file: Path, tmp_path: Path):
    server = BadServer()
    regenerate(file, tmp_path / "out.jsonl", server)
    check(tmp_path / "out.jsonl")
    assert server.met == set(WAYS)  # it did fail in every way
    assert 1 < server.most <= 8 + 2  # at once, but no more than asked for (two answer late to nobody)
    asked = {body: times for body, times in server.asked.items() if "refuse" not in body}
    busy = [times for body, times in asked.items() if WAYS[sum(body.encode()) % len(WAYS)] == "busy"]
    assert busy and all(times[1] - times[0] >= 1.0 for times in busy)  # Retry-After


def test_a_server_that_stays_broken_ends_the_run_with_what_is_done_kept(file: Path, tmp_path: Path):
    server = BadServer()
    server.shutdown(), server.server_close()
    with pytest.raises(ValueError, match=r"gives no answer.*the same command continues"):
        regenerate(file, tmp_path / "out.jsonl", server, retries=0)


@pytest.mark.parametrize("models", ["<html>a page</html>", '{"data": null}', '["tiny"]', '{"data": []}'])
def test_an_address_that_lists_no_model_is_named(models: str):
    with pytest.raises(ValueError, match=r"/models does not list a model. Check the address.*or set model=NAME"):
        Server(BadServer(models=models).endpoint, None)


def test_an_error_with_status_200_is_shown(file: Path, tmp_path: Path):
    with pytest.raises(ValueError, match=r"gives no answer.*not an answer: ChatCompletion"):
        regenerate(file, tmp_path / "out.jsonl", BadServer(("no choices",)), retries=0)


def test_an_answer_with_half_a_character_costs_its_row_only(tmp_path: Path):
    async def create(question: str, **_: Any) -> dict:
        return {"message": {"content": "yes \ud83d"}} if question == "half" else {}

    half, good = rows_of(stubbed(create), ["half", "good"], tmp_path / "out.jsonl")
    assert "half a character" in half["error"] and "error" not in good


def test_questions_about_images_are_left_out_and_counted(tmp_path: Path):
    """The target would answer without having seen them."""
    parts = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "What is it?"}]
    shown = [{"messages": [{"role": "user", "content": parts}]}]
    shown.append({"messages": [{"role": "user", "content": "<image> What is it?"}], "images": ["a.png"]})
    shown.append({"question": "What is it?", "answer": "A cat.", "image": "a.png"})
    rows = [*shown, {"messages": [{"role": "user", "content": "What is 1 + 1?"}]}]
    file, dropped = tmp_path / "rows.jsonl", dict[str, int]()
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [one.turns[0]["content"] for one in questions(Source(str(file)), dropped)] == ["What is 1 + 1?"]
    assert dropped == {"images, which the target would answer without seeing them": 3}


def test_raw_texts_are_asked_about_where_there_are_tasks(tmp_path: Path):
    rows = [{"text": "first"}, {"prompt": "a question"}, {"text": "second"}, {"text": "third"}]
    file, dropped = tmp_path / "rows.jsonl", dict[str, int]()
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = ("Summarize:\n{text}", "In one word?", "{text}\nWho is meant?")
    asked = [
        [turn["content"] for turn in one.turns if turn["role"] == "user"]
        for one in questions(Source(str(file)), dropped, tasks)
    ]
    assert not dropped and asked == [
        ["Summarize:\nfirst", "In one word?"],
        ["a question"],
        ["Summarize:\nsecond", "In one word?"],
        ["third\nWho is meant?", "In one word?"],
    ]
    assert [one.number for one in questions(Source(str(file)), dropped)] == [0] and dropped == {"no question in it": 3}


def test_an_empty_answer_does_not_cost_its_question(tmp_path: Path):
    asked = [{"role": "user", "content": "Why?"}]
    rows: list[dict] = [{"messages": [*asked, {"role": "assistant", "content": text}]} for text in ("", "\n", None)]
    rows.append({"prompt": "Why?", "response": ""})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dropped: dict[str, int] = {}
    found = [one.turns for one in questions(Source(str(tmp_path / "rows.jsonl")), dropped)]
    assert not dropped and found == [asked] * len(rows)


def test_other_settings_other_questions_and_a_changed_file_are_refused(file: Path, tmp_path: Path):
    output, server = tmp_path / "out.jsonl", BadServer(("fine",))
    regenerate(file, output, server)
    lines = output.read_text().splitlines(keepends=True)
    with pytest.raises(ValueError, match=r"other settings \(max_new_tokens 16\)"):
        opened(output, SAMPLING._replace(max_new_tokens=3))
    with output.open("ab") as other, pytest.raises(ValueError, match=r"being written by (another )?process"):
        fcntl.flock(other, fcntl.LOCK_EX)
        opened(output)
    output.write_text("".join([*lines, lines[0]]))
    with pytest.raises(ValueError, match=r"line 33 is row \d+ once more"):
        opened(output)
    output.write_text("".join(lines))
    file.write_text(file.read_text().replace("question 3", "question three"))
    with pytest.raises(ValueError, match=r"another question as row 3 than rows.jsonl:4 asks"):
        regenerate(file, output, server)


def test_a_kill_loses_and_doubles_nothing(file: Path, tmp_path: Path):
    output, server = tmp_path / "out.jsonl", BadServer(("fine",), slow=0.1)
    given = [
        "data=conversations",
        f"data.path={file}",
        f"endpoint={server.endpoint}",
        f"output={output}",
        "concurrency=4",
    ]
    given += ["timeout=5.0", "max_new_tokens=16", "seed=7"]
    command = [sys.executable, str(ROOT / "scripts" / "regenerate.py"), *given]
    process = start(*command, cwd=tmp_path)
    while not (output.exists() and output.read_bytes().count(b"\n") >= 3):
        assert process.poll() is None
        time.sleep(0.02)
    process.kill()
    process.wait()
    before = output.read_bytes()
    assert before.count(b"\n") < 32
    output.write_bytes(before + b'{"number": 3')  # as if the kill had come within a line
    ended = succeeded(end(start(*command, cwd=tmp_path)))
    check(output)
    assert output.read_bytes().startswith(before)  # nothing was written twice
    assert "no conversation and no text in it" in ended.out and "no question in it" in ended.out
    assert "32 rows in " in ended.out and "1 of them lack an answer" in ended.out


def test_rows_of_a_target_whose_weights_were_replaced_are_refused(tiny_path: Path, tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "def", "response": "x"}\n')
    shutil.copytree(tiny_path, tmp_path / "target")
    given = [f"target={tmp_path / 'target'}", "data=conversations", "data.template=plain", "data.path=rows.jsonl"]
    given += ["target.device=cpu", "output=out.jsonl", "max_new_tokens=2"]
    command = [sys.executable, str(ROOT / "scripts" / "regenerate.py"), *given]
    assert "1 rows in " in succeeded(end(start(*command, cwd=tmp_path))).out
    (tmp_path / "rows.txt").write_text("Why?\nSo\n")
    table = end(start(*command, "data.path=rows.txt", "output=none.jsonl", cwd=tmp_path))
    assert table.code == 2 and "data.path=rows.txt contains no question to answer: {'not JSON': 2}" in table.err
    assert not (tmp_path / "none.jsonl").exists()
    model = AutoModelForCausalLM.from_pretrained(tiny_path)
    model.model.layers[0].self_attn.q_proj.weight.data += 0.1
    model.save_pretrained(tmp_path / "target")
    again = end(start(*command, cwd=tmp_path))
    assert again.code == 2 and "was written by" in again.err and "not by these weights of" in again.err


@pytest.mark.parametrize("temperature", nightly_but([0.0, 1.0], 1.0))
def test_in_process_rows_do_not_depend_on_the_batch(file: Path, tmp_path: Path, target, temperature: float):
    form = ChatFormat(target.tokenizer, template=str(ROOT / "train" / "data" / "plain_chat.jinja"))
    sampling = SAMPLING._replace(temperature=temperature, max_new_tokens=6)
    written = []
    for batch in (3, 32):
        with opened(tmp_path / f"{batch}.jsonl", sampling) as output:
            asked = questions(Source(str(file), max_samples=20), {})
            left = Regeneration(sampling, target, form).remaining(asked, output)
            in_process(target, left, output, batch, lambda texts: None)
        rows = [json.loads(line) for line in (tmp_path / f"{batch}.jsonl").read_text().splitlines()]
        written.append(sorted(rows, key=lambda row: row["number"]))
    assert written[0] == written[1]
    rows = written[0]
    assert len(rows) == 20
    for row in rows[14:18]:
        for number, message in enumerate(row["messages"]):
            if message["role"] == "assistant":
                ids = torch.tensor([form.prompt(row["messages"][:number])])
                alone = generate(
                    target, None, ids, max_new_tokens=6, temperature=temperature, seed=row["seed"]
                ).new_tokens[0]
                assert message["content"] == target.tokenizer.decode(alone, skip_special_tokens=True)
                start, end = row["written"][number // 2]
                assert row["tokens"][start:end] == alone
                ended = alone[-1] in target.eos_token_ids
                assert row["finish_reasons"][number // 2] == ("stop" if ended else "length")


def stubbed(create: Callable[..., Awaitable[dict]], retries: int = 0) -> Server:
    """Return a server whose answers `create` gives: the question -> the contents of a choice and a response."""
    server = Server("http://127.0.0.1:9", "tiny", 1.0, retries)

    async def answer(messages: list[dict], **request: Any) -> ChatCompletion:
        choice = {"index": 0, "finish_reason": "stop"} | await create(messages[-1]["content"], **request)
        choice["message"] = {"role": "assistant", "content": "yes"} | choice.get("message", {})
        return ChatCompletion.model_validate(
            {"id": "1", "object": "chat.completion", "created": 1, "model": "tiny", "choices": [choice]}
        )

    server.client = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=answer)), close=closed)
    return server


async def closed() -> None:
    pass


def rows_of(server: Server, questions: list[str], output: Path, concurrency: int = 4) -> list[dict]:
    asked = [Questions(n, "", [{"role": "user", "content": text}]) for n, text in enumerate(questions)]
    answer(server, asked, output, concurrency)
    return sorted((json.loads(line) for line in output.read_text().splitlines()), key=lambda row: row["number"])


def test_a_target_is_shown_the_tools_and_the_template_variables_of_a_row(tmp_path: Path):
    """Check that a row without ids keeps them, so that training shows the head what the target saw."""
    tool, options = {"type": "function", "function": {"name": "f", "parameters": {}}}, {"custom": "Arr."}
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "q", "tools": [tool], "chat_template_kwargs": options}))
    (asked,) = questions(Source(str(tmp_path / "rows.jsonl")), {})
    sent: list[dict] = []

    async def create(question: str, **fields: Any) -> dict:
        sent.append(fields)
        return {}

    server = stubbed(create)
    server.chat = {"chat_template_kwargs": {"thinking": True}}
    row = asyncio.run(Regeneration(SAMPLING).answer(asked, server.ask))
    assert sent[0]["extra_body"]["chat_template_kwargs"] == {"custom": "Arr.", "thinking": True}
    assert sent[0]["tools"] == row["tools"] == [tool] and row["chat_template_kwargs"] == options
    words = tokenizer("{{ custom }}" + CHATML)
    request = Regeneration(SAMPLING, SimpleNamespace(eos_token_ids=[0]), ChatFormat(words)).request(asked, asked.turns)
    assert words.decode(request.prompt).startswith("Arr.<")


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_thoughts_are_kept_by_either_name_and_an_answer_without_content_says_so(name: str, tmp_path: Path):
    """Use content: null, which engines return if all of max_tokens went into reasoning: asked again, they would do the
    same."""
    asked: list[str] = []

    async def create(question: str, **_: Any) -> dict:
        asked.append(question)
        if question == "short":
            return {"message": {name: "hm"}}
        return {"finish_reason": "length", "message": {"content": None} | ({name: "hm"} if question == "long" else {})}

    short, long, nothing = rows_of(stubbed(create), ["short", "long", "nothing"], tmp_path / "out.jsonl")
    assert short["messages"][-1] == {"role": "assistant", "content": "yes", "reasoning_content": "hm"}
    assert long["error"] == nothing["error"] == "an answer without content (finish_reason length)"
    assert asked == ["short", "long", "nothing"] and "messages" not in nothing
    read = Source("x").conversation(Row("", long))[-1]
    assert read == {"role": "assistant", "content": "", "reasoning_content": "hm", "finish_reason": "length"}
    with pytest.raises(SkippedRow, match="no answer came"):
        Source("x").conversation(Row("", nothing))


def test_a_conversation_that_a_server_always_fails_at_does_not_end_the_run(tmp_path: Path):
    async def create(question: str, **_: Any) -> dict:
        return {"finish_reason": 7} if question == "bad" else {}  # no answer's, which is asked for again

    found = rows_of(stubbed(create), ["bad", "good", "bad"], tmp_path / "out.jsonl")
    assert [row.get("error", "")[:13] for row in found] == ["tried 1 times", "", "tried 1 times"]
    assert rows_of(stubbed(create), ["bad", "good", "bad", "good"], tmp_path / "out.jsonl")[:3] == found
    for count in (2, 40):  # it answers none: nothing is written, for a server that is mended
        with pytest.raises(ValueError, match="gives no answer"):
            rows_of(stubbed(create), ["bad"] * count, tmp_path / f"{count}.jsonl")
        assert not (tmp_path / f"{count}.jsonl").read_text()


def test_a_long_answer_does_not_keep_the_engine_waiting(tmp_path: Path):
    """Check that the allowed number of requests is in flight to the end, and results are written at once."""
    answered, flying, most = 0, 0, []

    async def create(question: str, **_: Any) -> dict:
        nonlocal answered, flying
        flying += 1
        while question == "first" and answered < 99:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        most.append(flying)
        flying -= 1
        answered += 1
        return {}

    found = rows_of(stubbed(create), ["first", *["next"] * 99], tmp_path / "out.jsonl")
    assert len(found) == 100 and set(most[4:-4]) == {4}
    assert json.loads((tmp_path / "out.jsonl").read_text().splitlines()[-1])["number"] == 0


def refusal(kind: type[openai.APIStatusError], status: int, message: str) -> openai.APIStatusError:
    return kind(message, response=SimpleNamespace(status_code=status, headers={}, request=None), body=None)


def test_a_server_that_takes_fewer_requests_for_a_while_gets_all_of_them_again(tmp_path: Path, monkeypatch):
    """Try a quota of no request at a time: no refused request is lost."""
    monkeypatch.setattr(writing, "PAUSE", 0.001)
    flying, answered, refused, most = 0, 0, 0, 0

    async def create(question: str, **_: Any) -> dict:
        nonlocal flying, answered, refused, most
        if answered >= 10 and refused < 20:
            refused += 1
            raise refusal(openai.RateLimitError, 429, "too many requests are waiting")
        flying += 1
        await asyncio.sleep(0.001)
        most = max(most, flying) if refused else 0
        flying -= 1
        answered += 1
        return {}

    found = rows_of(stubbed(create), ["next"] * 200, tmp_path / "out.jsonl", concurrency=8)
    assert len(found) == 200 and not any("error" in row for row in found)
    assert refused == 20 and most == 8


def test_a_server_that_refuses_everything_ends_the_run(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(writing, "PAUSE", 0.001)

    async def create(question: str, **_: Any) -> dict:
        raise refusal(openai.RateLimitError, 429, "quota of this month")

    server = stubbed(create)
    server.patience = 0.05
    with pytest.raises(ValueError, match=r"gives no answer.*quota of this month.*the same command continues"):
        rows_of(server, ["next"] * 9, tmp_path / "out.jsonl")


def test_a_server_that_answers_nothing_is_named_while_it_is_waited_for(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(writing, "PAUSE", 0.3)
    monkeypatch.setattr(writing, "QUIET", 0.05)
    refused = False

    async def create(question: str, **_: Any) -> dict:
        nonlocal refused
        if not refused:
            await asyncio.sleep(0.3)
            refused = True
            raise refusal(openai.RateLimitError, 429, "slow down")
        return {}

    assert len(rows_of(stubbed(create), ["next"], tmp_path / "out.jsonl")) == 1
    told = capsys.readouterr().err.splitlines()
    assert re.search(r"has answered nothing for \d+ s \(it may be busy with 4 conversations\)", told[0])
    assert told[-1].endswith("(slow down)")


def test_an_engine_that_refuses_to_tell_ids_is_asked_without(tmp_path: Path):
    async def create(question: str, extra_body: dict | None = None, **_: Any) -> dict:
        if extra_body:
            raise refusal(openai.BadRequestError, 400, "Unrecognized request argument: return_token_ids")
        return {}

    (row,) = rows_of(stubbed(create), ["a"], tmp_path / "out.jsonl")
    assert row["messages"][-1]["content"] == "yes" and "tokens" not in row


CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": '{"x": 1}'}}]}
TRACE = [
    {"role": "user", "content": "q"},
    CALL,
    {"role": "tool", "content": "5"},
    {"role": "assistant", "content": "So it is 5."},
    {"role": "user", "content": "And then?"},
    {"role": "assistant", "content": "No more."},
]


def test_the_last_answer_after_results_of_tools_is_written_too(tmp_path: Path):
    """Check that the target writes it in the conversation of the data set, whose own answers are not learned."""
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": TRACE}) + "\n" + json.dumps({"messages": TRACE[:3]}) + "\n")
    asked = list(questions(Source(str(path)), {}))
    assert [[turn["content"] for turn in each.turns] for each in asked] == [["q"], ["And then?"], ["q"], ["5"]]
    assert [len(each.before) for each in asked] == [0, 4, 0, 2] and [each.number for each in asked] == [0, 1, 2, 3]
    assert len({each.digest for each in asked}) == 3  # two conversations start alike
    sent: list[list[dict]] = []

    async def create(question: str, **fields: Any) -> dict:
        return {"finish_reason": "length"}

    server = stubbed(create)
    answer_messages = server.client.chat.completions.create

    async def noted(messages: list[dict], **fields: Any) -> ChatCompletion:
        sent.append(messages)
        return await answer_messages(messages, **fields)

    server.client.chat.completions.create = noted
    row = asyncio.run(Regeneration(SAMPLING).answer(asked[1], server.ask))
    call, result = sent[0][1]["tool_calls"][0], sent[0][2]
    assert call["function"] == {"name": "f", "arguments": '{"x": 1}'} and call["id"] == result["tool_call_id"]
    assert not any("weight" in message for message in sent[0])
    (tmp_path / "own.jsonl").write_text(json.dumps(row))
    source = Source(str(tmp_path / "own.jsonl"))
    (kept,) = [source.conversation(each) for each in source.rows()]
    answers = [message for message in kept if message["role"] == "assistant"]
    learned = [(message.get("weight", 1), message.get("finish_reason")) for message in answers]
    assert learned == [(0, None), (0, None), (1, "length")]

    form = ChatFormat(tokenizer(CHATML))
    request = Regeneration(SAMPLING, SimpleNamespace(eos_token_ids=[0]), form).request(
        asked[1], [*asked[1].before, *asked[1].turns]
    )
    assert "So it is 5." in form.tokenizer.decode(request.prompt) and "No more." not in form.tokenizer.decode(
        request.prompt
    )


def test_a_conversation_that_is_not_answered_keeps_no_answer_of_the_data_set(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": TRACE}))

    async def refused(request: Any) -> Any:
        raise SkippedRow("too long")

    rows = [asyncio.run(Regeneration(SAMPLING).answer(each, refused)) for each in questions(Source(str(path)), {})]
    assert [row["error"] for row in rows] == ["too long"] * 2 and not any("messages" in row for row in rows)
