"""A client's request before its first step: under the same deadline as the rest, and ended when its client has gone."""

import asyncio
import itertools
import json
import logging
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
import uvicorn
from starlette.datastructures import Headers

from foredraft.heads import Target
from foredraft.inference.drafters import NgramDrafter
from foredraft.inference.serve import limits, service
from foredraft.inference.serve.app import create_app, run
from foredraft.inference.serve.openai.prompts import PromptEncoder
from foredraft.inference.serve.worker import Worker
from tests.support import ROOT

ECHO = {"prompt": ["def add", "return"], "max_tokens": 1, "echo": True, "logprobs": 1}
CHAT = {"messages": [{"role": "user", "content": "def"}], "max_tokens": 24}
PLAIN = (ROOT / "train" / "data" / "plain_chat.jinja").read_text()
PRIVATE = "access-control-request-private-network"
Receive = Callable[[], Awaitable[dict[str, Any]]]


@pytest.fixture
def endless(monkeypatch) -> list[int]:
    """Make scoring continue until it is stopped; return the lengths of the texts."""
    asked: list[int] = []

    def score(target, tokens, top) -> Iterator[list]:
        asked.append(len(tokens))
        return itertools.repeat([])

    monkeypatch.setattr(service, "score", score)
    return asked


def call(
    app, receive: Receive, path: str = "/v1/completions", method: str = "POST", **headers: str
) -> list[dict[str, Any]]:
    """Return what the application sends to one request."""
    headers = {"host": "localhost", "content-type": "application/json"} | headers
    named = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b""}
    scope |= {"headers": named, "http_version": "1.1", "scheme": "http", "root_path": "", "asgi": {"version": "3.0"}}
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    return sent


def body_then(wait: Callable[[], Awaitable[None]], asked: dict[str, Any] | str) -> Receive:
    """Make a client that sends this, waits, and leaves."""
    body = asked if isinstance(asked, str) else json.dumps(asked)
    parts = iter([{"type": "http.request", "body": body.encode(), "more_body": False}])

    async def receive() -> dict[str, Any]:
        for part in parts:
            return part
        await wait()
        return {"type": "http.disconnect"}

    return receive


async def forever() -> None:
    await asyncio.Event().wait()


def ended(thread: Worker) -> None:
    """Check that nothing of a request is left, and the next one is answered."""
    answer = call(
        create_app(thread, ["tiny"] * len(thread.engines)), body_then(forever, {"prompt": "def", "max_tokens": 2})
    )
    assert answer[0]["status"] == 200 and thread.open == 0 and thread.inbox.empty()
    thread.stop()
    thread.join(60)
    assert not thread.is_alive() and not thread.dead


def test_scoring_that_takes_too_long_is_ended(target: Target, endless):
    thread = Worker(target, NgramDrafter(), timeout=0.3)
    thread.start()
    answer = call(create_app(thread, ["tiny"]), body_then(forever, ECHO))
    assert answer[0]["status"] == 504 and b"longer than 0.3 seconds" in answer[1]["body"]
    assert len(endless) == 1  # the second prompt is not started
    thread.timeout = 60
    ended(thread)


def test_scoring_ends_when_its_client_goes(target: Target, endless):
    thread = Worker(target, NgramDrafter())
    thread.start()

    async def until_scored() -> None:
        while not endless:
            await asyncio.sleep(0.005)

    call(create_app(thread, ["tiny"]), body_then(until_scored, ECHO))
    assert len(endless) == 1
    ended(thread)


def test_a_client_that_goes_while_its_prompt_is_encoded_is_not_decoded(target: Target, monkeypatch):
    thread, encoding, gone = Worker(target, None), threading.Event(), threading.Event()
    thread.start()

    def slow(*_: Any) -> list[list[int]]:
        encoding.set()
        gone.wait(60)
        return [[1, 2]]

    async def until_encoding() -> None:
        await asyncio.to_thread(encoding.wait)
        asyncio.get_running_loop().call_later(0.05, gone.set)

    with monkeypatch.context() as patch:
        patch.setattr(PromptEncoder, "completion", slow)
        patch.setattr(Worker, "submit", lambda *_: pytest.fail("it was submitted"))
        call(create_app(thread, ["tiny"]), body_then(until_encoding, {"prompt": "def"}))
    ended(thread)


@pytest.mark.parametrize(
    "path, asked, text_of",
    [
        ("/v1/completions", {"prompt": "def"}, lambda event: event["choices"][0]["text"]),
        ("/v1/chat/completions", CHAT, lambda event: event["choices"][0]["delta"].get("content") or ""),
        ("/v1/responses", {"input": "def"}, lambda event: event.get("delta", "")),
    ],
)
def test_pings_are_events_that_add_nothing(target: Target, monkeypatch, path: str, asked: dict, text_of):
    """Check also that a proxy must not collect the events, and that the last one has a finish reason and no text: clients
    that drop it lose nothing."""
    monkeypatch.setattr(target.text_tokenizer, "chat_template", PLAIN)
    thread = Worker(target, NgramDrafter())
    thread.start()
    app, streams = create_app(thread, ["tiny"]), []
    for ping in (60.0, 0.0):
        monkeypatch.setattr(service, "PING", ping)
        start, *rest = call(app, body_then(forever, asked | {"stream": True, "seed": 1, "temperature": 1}), path)
        assert (b"x-accel-buffering", b"no") in start["headers"]
        blocks = b"".join(part["body"] for part in rest).decode().removesuffix("data: [DONE]\n\n").split("\n\n")[:-1]
        streams.append([json.loads(block.rpartition("data: ")[2]) for block in blocks])
    quiet, pinged = streams
    assert len(pinged) > len(quiet)
    assert "".join(map(text_of, quiet)) == "".join(map(text_of, pinged)) != ""
    if path != "/v1/responses":
        assert quiet[-1]["choices"][0]["finish_reason"] and not text_of(quiet[-1])
    ended(thread)


def test_a_request_that_is_nested_too_deeply_is_the_client_s_error(target: Target, monkeypatch):
    monkeypatch.setattr(target.text_tokenizer, "chat_template", PLAIN)
    thread = Worker(target, None)
    thread.start()
    app = create_app(thread, ["tiny"])
    for depth in (600, 900, 9000):
        for name in ("chat_template_kwargs", "structured_outputs"):
            body = json.dumps(CHAT | {name: "NESTED"}).replace('"NESTED"', '{"json":' * depth + "{}" + "}" * depth)
            (start, answer) = call(app, body_then(forever, body), "/v1/chat/completions")
            assert start["status"] == 400 and b"error" in answer["body"], answer
    ended(thread)


def test_a_load_balancer_and_a_page_of_a_named_origin_may_ask(target: Target):
    """Check HEAD, and the preflight of a page from the network for a server on this machine."""
    app = create_app(Worker(target, None), ["tiny"], cors=["https://chat.example"])
    assert call(app, body_then(forever, {}), "/health", "HEAD")[0]["status"] == 503  # the thread does not run
    asked = {"origin": "https://chat.example", "access-control-request-method": "POST"}
    (start, _) = call(app, forever, "/v1/completions", "OPTIONS", **asked, **{PRIVATE: "true"})
    assert start["status"] == 200 and (b"access-control-allow-private-network", b"true") in start["headers"]


def test_a_request_of_http_1_0_needs_no_host():
    gate = limits.Gate(None, None, 0, None, local_only=True)
    for host, refused in (({}, False), ({"host": ""}, True), ({"host": "evil.example"}, True)):
        assert (gate.refusal("GET", "/health", Headers(host)) is not None) == refused


def test_an_address_may_end_with_a_slash_and_a_body_must_be_utf_8(target: Target):
    app = create_app(Worker(target, None), ["tiny"])
    (start, body) = call(app, forever, "/v1/models/", "GET")
    assert start["status"] == 200 and json.loads(body["body"])["data"][0]["id"] == "tiny"
    parts = iter([{"type": "http.request", "body": '{"prompt": "é"}'.encode("latin-1")}])

    async def receive() -> dict[str, Any]:
        return next(parts)

    (start, body) = call(app, receive)
    assert start["status"] == 400 and "send JSON in UTF-8" in json.loads(body["body"])["error"]["message"]


def test_idle_connections_are_kept_longer_than_clients_keep_them(target: Target, monkeypatch):
    kept = []
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)
    monkeypatch.setattr(uvicorn.Server, "run", lambda server: kept.append(server.config.timeout_keep_alive))
    with pytest.raises(SystemExit):
        run(create_app(Worker(target, None), ["tiny"]), "127.0.0.1", 0)
    assert kept[0] > 90


def test_a_body_that_does_not_come_is_given_up(target: Target, monkeypatch):
    monkeypatch.setattr(limits, "BODY_SECONDS", 0.05)
    parts = iter([{"type": "http.request", "body": b'{"prompt"', "more_body": True}])

    async def receive() -> dict[str, Any]:
        for part in parts:
            return part
        await forever()
        raise AssertionError

    answer = call(create_app(Worker(target, None), ["tiny"]), receive)
    assert answer[0]["status"] == 408 and b"did not arrive" in answer[1]["body"]


@pytest.mark.parametrize(
    "kind", ["", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"]
)
def test_a_page_of_another_site_cannot_post_blindly(target: Target, kind: str):
    """Use the content types that a browser sends without asking; a Blob has none."""
    app = create_app(Worker(target, None), ["tiny"])
    answer = call(app, body_then(forever, {"prompt": "def"}), **{"content-type": kind})
    assert answer[0]["status"] == 415 and b"application/json" in answer[1]["body"]


def test_each_tenant_is_told_its_own_context(target: Target):
    """Check that larger trees leave less room for text."""
    small, large = NgramDrafter(depth=2), NgramDrafter(depth=60)
    thread = Worker(target, small, max_num_seqs=1, cache_gib=5e-4, others=[large])
    most, less = (thread.context(tenant=number) for number in (0, 1))
    assert most is not None and less is not None and most - less == 2 * 58
    thread.start()
    app = create_app(thread, ["small", "large"])
    for model, tokens, status in (("small", most, 200), ("large", most, 400), ("large", less, 200)):
        answer = call(app, body_then(forever, {"model": model, "prompt": [5] * 3, "max_tokens": tokens - 3}))
        assert answer[0]["status"] == status
        assert status == 200 or f"maximum context length is {less} tokens" in answer[1]["body"].decode()
    ended(thread)
