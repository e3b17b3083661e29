"""The target's own answers: every row once and in order, whatever the server does and whenever the run is killed."""

import asyncio
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from foredraft.inference import generate
from foredraft.train.data.chat_template import ChatFormat
from foredraft.train.data.generation_clients import Server, in_process, through_server
from foredraft.train.data.regeneration import ConversationRequest, GenerationSettings, Output, questions
from foredraft.train.data.sources import Source
from tests.support.bad_server import WAYS, BadServer
from tests.support.processes import end, start

ROOT = Path(__file__).resolve().parent.parent
SAMPLING = GenerationSettings(1.0, None, 16, 7)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """32 conversations of one or two questions, and two rows without any."""
    rows: list[dict] = [{"prompt": f"question {i}", "response": "old"} for i in range(16)]
    rows += [
        {"messages": [{"role": r, "content": f"{r} {i} {n}"} for n in (1, 2) for r in ("user", "assistant")]}
        for i in range(15)
    ]
    rows += [{"id": 4}, {"text": "raw"}, {"prompt": "please refuse"}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def regenerate(file: Path, output: Path, server: BadServer, timeout: float = 2.0, retries: int = 6) -> None:
    async def work() -> None:
        asked = Server(server.endpoint, None, timeout, retries, SAMPLING, {})
        await asked.start()
        kept = Output(output, SAMPLING._asdict() | {"model": asked.model})
        await through_server(asked, kept.remaining(questions(Source(str(file)), {})), 8, kept)

    asyncio.run(work())


def check(output: Path) -> None:
    """Every row once, in order, each answer given in the light of the answers before."""
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["number"] for row in rows] == list(range(32))
    assert [row["seed"] for row in rows] == list(range(7, 39))
    for i, row in enumerate(rows[:16]):
        assert [m["content"] for m in row["messages"]] == [f"question {i}", f"1: question {i}"]
        assert row["finish_reasons"] == ["stop"] and row["settings"]["model"] == "tiny"
    for i, row in enumerate(rows[16:31]):
        asked = [f"user {i} 1", f"1: user {i} 1", f"user {i} 2", f"3: user {i} 2"]
        assert [m["content"] for m in row["messages"]] == asked
        assert [m["role"] for m in row["messages"]] == ["user", "assistant"] * 2
    assert "too long" in rows[31]["error"] and "messages" not in rows[31]


def test_a_bad_server_costs_no_row(file: Path, tmp_path: Path):
    server = BadServer()
    regenerate(file, tmp_path / "out.jsonl", server)
    check(tmp_path / "out.jsonl")
    assert server.met == set(WAYS)  # it did fail in every way
    assert 1 < server.most <= 8 + 2  # at once, but no more than asked for (two answer late to nobody)
    busy = [times for body, times in server.asked.items() if WAYS[sum(body.encode()) % len(WAYS)] == "busy"]
    assert busy and all(times[1] - times[0] >= 1.0 for times in busy)  # Retry-After


def test_a_server_that_stays_broken_ends_the_run_with_what_is_done_kept(file: Path, tmp_path: Path):
    server = BadServer()
    server.shutdown(), server.server_close()
    with pytest.raises(ValueError, match=r"gives no answer.*the same command continues"):
        regenerate(file, tmp_path / "out.jsonl", server, retries=0)


def test_other_settings_other_questions_and_a_changed_file_are_refused(file: Path, tmp_path: Path):
    output, server = tmp_path / "out.jsonl", BadServer(("fine",))
    regenerate(file, output, server)
    lines = output.read_text().splitlines(keepends=True)
    with pytest.raises(ValueError, match=r"other settings \(max_tokens 16\)"):
        Output(output, SAMPLING._replace(max_tokens=3)._asdict())
    with pytest.raises(ValueError, match="another process"):
        holder = Output(output, SAMPLING._asdict())
        Output(output, SAMPLING._asdict())
    holder.file.close()
    output.write_text("".join(lines[1:]))
    with pytest.raises(ValueError, match="line 1 is row 1"):
        Output(output, SAMPLING._asdict())
    output.write_text("".join(lines))
    file.write_text(file.read_text().replace("question 3", "question three"))
    with pytest.raises(ValueError, match=r"line 4 answers another question than rows.jsonl:4 asks"):
        regenerate(file, output, server)


def test_a_kill_loses_and_doubles_nothing(file: Path, tmp_path: Path):
    output, server = tmp_path / "out.jsonl", BadServer(slow=0.1)
    given = [
        "data=conversations",
        f"data.path={file}",
        f"endpoint={server.endpoint}",
        f"output={output}",
        "concurrency=4",
    ]
    given += ["timeout=5.0", "max_tokens=16", "seed=7"]
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
    ended = end(start(*command, cwd=tmp_path))
    assert ended.code == 0, ended.err
    check(output)
    assert output.read_bytes().startswith(before)  # nothing was written twice
    assert "no conversation and no text in it" in ended.out and "no question in it" in ended.out


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_in_process_rows_do_not_depend_on_the_batch(file: Path, tmp_path: Path, target, temperature: float):
    form = ChatFormat(target.tokenizer, template=str(ROOT / "train" / "data" / "plain_chat.jinja"))
    sampling = SAMPLING._replace(temperature=temperature, max_tokens=6)
    written = []
    for batch in (3, 32):
        output = Output(tmp_path / f"{batch}.jsonl", sampling._asdict())
        in_process(
            target, form, output.remaining(questions(Source(str(file), max_rows=20), {})), batch, sampling, output
        )
        written.append((tmp_path / f"{batch}.jsonl").read_bytes())
    assert written[0] == written[1]
    rows = [json.loads(line) for line in written[0].splitlines()]
    assert len(rows) == 20
    for row in rows[14:18]:
        for number, message in enumerate(row["messages"]):
            if message["role"] == "assistant":
                ids = torch.tensor([form.prompt(row["messages"][:number])])
                alone = generate(
                    target, None, ids, max_new_tokens=6, temperature=temperature, seed=row["seed"]
                ).new_tokens[0]
                assert message["content"] == target.tokenizer.decode(alone, skip_special_tokens=True)
                ended = alone[-1] in target.eos_token_ids
                assert row["finish_reasons"][number // 2] == ("stop" if ended else "length")


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_thoughts_are_kept_by_either_name_and_an_answer_without_content_drops_its_row(name: str):
    """Engines say content: null where all of max_tokens went into thoughts: asked again, they would say the same."""
    asked: list[str] = []

    async def create(messages: list[dict], **request: object) -> SimpleNamespace:
        asked.append(messages[-1]["content"])
        text, reason = (None, "length") if "long" in asked[-1] else ("yes", "stop")
        message = SimpleNamespace(content=text, model_extra={name: "hm"})
        return SimpleNamespace(choices=[SimpleNamespace(message=message, finish_reason=reason)])

    async def converse(question: str) -> dict:
        server = Server("http://127.0.0.1:9", "tiny", 1.0, 6, SAMPLING, {})
        server.client = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))
        return await server.converse(ConversationRequest(0, "", [{"role": "user", "content": question}]))

    found = asyncio.run(converse("short"))
    assert found["messages"][-1] == {"role": "assistant", "content": "yes", "reasoning_content": "hm"}
    assert asyncio.run(converse("long")) == {"error": "an answer without content (finish_reason length)"}
    assert asked == ["short", "long"]
