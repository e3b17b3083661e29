"""Whatever one client of `foredraft serve` does, the others get their texts."""

import json
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from tests.support.processes import on_cpu, served, wait_until

KEY = "sk-a-secret-of-this-test"
SETTINGS = ["max_num_seqs=2", "max_waiting=2", "max_body=100000", "cache_gib=0.0008", "log_accepted=accepted.jsonl"]
LONG = {"prompt": "def add(self, other):", "max_tokens": 200, "seed": 1, "ignore_eos": True}
SHORT = {"model": "tiny", "prompt": "class Pair:", "max_tokens": 12, "seed": 2}


@pytest.fixture(scope="module")
def short(client: openai.OpenAI) -> str:
    return client.completions.create(**SHORT).choices[0].text


def bearer(key: str = KEY) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


BAD = {
    "invalid JSON": b'{"prompt": ',
    "bad UTF-8": b'{"prompt": "\xff\xfe"}',
    "no object": b"[]",
    "nothing": b"",
    "deep": b'{"prompt": ' + b"[" * 40_000 + b"]" * 40_000 + b"}",
    "half a surrogate pair": b'{"prompt": "\\ud800"}',
    "half a pair in a message": b'{"prompt": "a", "model": "\\ud800"}',
    "NaN": b'{"prompt": "a", "temperature": NaN}',
    "a huge number": b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
    "negative max_tokens": b'{"prompt": "a", "max_tokens": -5}',
    "an empty prompt": b'{"prompt": ""}',
    "an unknown token": b'{"prompt": [3, 320]}',
    "a token that is not a number": b'{"prompt": [3, "a"]}',
    "a giant prompt": json.dumps({"prompt": "word " * 10_000}).encode(),
    "more texts than the server takes": b'{"prompt": "a", "n": 100}',
    "more texts than anybody encodes": json.dumps({"prompt": ["word"] * 12_000, "n": 128}).encode(),
    "many biases": json.dumps({"prompt": "a", "logit_bias": {str(n): 1 for n in range(2000)}}).encode(),
    "more than the context": b'{"prompt": "a", "max_tokens": 256}',
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_is_the_client_s_error(server, client, short, name):
    status, _, body = server.post(BAD[name], "/v1/completions", **bearer())
    error = json.loads(body)["error"]
    assert status in (400, 404) and error["message"] and error["type"], body
    assert client.completions.create(**SHORT).choices[0].text == short


def test_a_large_body_is_refused_before_it_is_read(server):
    refused = "foredraft_requests_total", 'status="413"'
    before = server.metric(*refused)
    assert server.post(b"{", "/v1/completions", **bearer() | {"Content-Length": "10000000"})[0] == 413
    assert server.metric(*refused) == before + 1
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n".encode()
            + b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n20000\r\n"
            + b"a" * 0x20000  # of a body that says not how long it will be
        )
        wait_until(lambda: server.metric(*refused) == before + 2)


def test_headers_have_a_limit(server, client, short):
    assert server.post(b"{}", "/v1/completions", **{"X-Long": "a" * 100_000})[0] == 431
    assert client.completions.create(**SHORT).choices[0].text == short


def test_the_key_is_needed_and_never_shown(server):
    for wrong in ("", KEY[:-1], KEY + "a", "é"):
        status, _, body = server.post(b"{}", "/v1/completions", **bearer(wrong))
        assert status == 401 and b"invalid_api_key" in body
    for scheme in ("Bearer", "bearer"):  # HTTP compares schemes without case
        assert server.post(b"{}", "/v1/completions", Authorization=f"{scheme} {KEY}")[0] == 400  # the body is wrong
    with pytest.raises(openai.AuthenticationError):
        server.client("wrong").models.list()
    shown = server.log.read_text() + str(server.metric("foredraft_requests_total"))
    assert KEY not in shown


@pytest.mark.parametrize("path", ["/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/v1/nothing", "/page.html"])
def test_there_are_no_files_to_reach(server, path):
    status, _, body = server.post(b"{}", path, **bearer())
    assert status in (404, 405) and "error" in json.loads(body)


def test_errors_of_a_wrong_address_or_body_name_it_and_the_remedy(server):
    def said(*request) -> str:
        return json.loads(server.post(*request, **bearer())[2])["error"]["message"]

    wrong = said(b"{}", "/chat/completions")  # a client whose base URL lacks /v1
    assert "'/chat/completions' is not served here" in wrong and "base URL ends with /v1" in wrong
    assert said(b"{}", "/v1/models") == "POST is not supported by '/v1/models': use GET"
    assert said(b'{"prompt": a}', "/v1/completions") == "the body is not JSON: Expecting value at character 11"


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_frees_its_row(server, client, short, stream):
    before = len(server.logged())
    connection = server.raw(json.dumps(LONG | {"stream": stream}).encode(), "/v1/completions", **bearer())
    wait_until(lambda: server.metric("foredraft_running_requests") == 1)
    connection.close()
    wait_until(lambda: server.metric("foredraft_open_requests") == 0)
    assert client.completions.create(**SHORT).choices[0].text == short
    (gone, _) = [line for line in server.logged()[before:] if line["message"] == "request"]
    assert gone["finish_reasons"] == ["cancelled"] and gone["completion_tokens"] < 200


def test_a_full_queue_says_when_to_come_again(server, client, short):
    held = [server.raw(json.dumps(LONG | {"stream": True}).encode(), "/v1/completions", **bearer()) for _ in range(4)]
    wait_until(lambda: server.metric("foredraft_open_requests") == 4)
    with pytest.raises(openai.RateLimitError) as caught:
        client.completions.create(**SHORT)
    assert int(caught.value.response.headers["retry-after"]) >= 1
    for connection in held:
        connection.close()
    wait_until(lambda: server.metric("foredraft_open_requests") == 0)
    assert client.completions.create(**SHORT).choices[0].text == short


def test_a_reader_that_stops_reading_holds_up_nobody(server, client, short):
    idle = server.raw(json.dumps(LONG | {"stream": True, "trace": True}).encode(), "/v1/completions", **bearer())
    assert client.completions.create(**SHORT).choices[0].text == short
    wait_until(lambda: server.metric("foredraft_open_requests") == 0)
    assert read_all_until_done(idle).count(b"data: ") > 50


def read_all_until_done(connection: socket.socket) -> bytes:
    got = b""
    with connection:
        while b"data: [DONE]" not in got:
            part = connection.recv(65536)
            assert part
            got += part
    return got


@pytest.mark.nightly
def test_nothing_that_the_schema_allows_or_forbids_breaks_the_server(server, client, short, tmp_path):
    """Send a bounded number of schemathesis's requests; `-n 500` against a separate server is the long run."""
    checks = ["--checks", "not_a_server_error", "--phases", "examples,coverage,fuzzing", "-n", "10", "--max-time", "8"]
    checks += ["--no-shrink", "--seed", "1", "--generation-database", "none"]
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json", *checks]
    key = ["-H", f"Authorization: Bearer {KEY}"]
    done = subprocess.run([*command, *key], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    assert client.completions.create(**SHORT).choices[0].text == short


def test_texts_are_in_no_log_unless_asked_for(server, client):
    client.completions.create(**SHORT)
    lines = (server.log.parent / "accepted.jsonl").read_text().splitlines()
    assert lines and all(json.loads(line)["ids"] is json.loads(line)["prompt_ids"] is None for line in lines)
    log = server.log.read_text()
    assert "class Pair" not in log and KEY not in log


def test_a_broken_engine_ends_the_process(model, tmp_path):
    """Check that a request that meets a bug fails alone; if the engine's thread ends, all clients are told and the process
    ends too."""
    program = "tests/support/broken_server.py"
    with served(tmp_path, *on_cpu(model), "drafter=none", program=program) as running:
        client = running.client()
        with pytest.raises(openai.APIError, match="decoding this request failed"):
            list(client.completions.create(model="tiny", prompt=[1, 40], stream=True))
        assert running.metric("foredraft_failed_answers_total", 'status="500"') == 1
        (failed,) = [line for line in running.logged() if line["message"] == "request"]
        assert failed["finish_reasons"] == ["error"]
        assert any("RuntimeError: a bug" in line.get("trace", "") for line in running.logged())
        assert client.completions.create(**SHORT).choices[0].text
        with ThreadPoolExecutor(4) as pool:
            asked = [pool.submit(client.completions.create, **SHORT | {"prompt": [2, n]}) for n in range(40, 44)]
            for one in asked:
                with pytest.raises((openai.InternalServerError, openai.APIConnectionError)) as caught:
                    one.result(timeout=60)
                assert getattr(caught.value, "status_code", 503) == 503
        assert running.process.wait(timeout=60) == 1


def test_sigterm_lets_running_requests_end(model, tmp_path):
    with served(tmp_path, *on_cpu(model), "log_accepted=accepted.jsonl", FOREDRAFT_API_KEY=KEY) as running:
        client, answers = running.client(KEY), list[str]()
        asked = {"model": "tiny", "prompt": "a", "max_tokens": 200, "extra_body": {"ignore_eos": True}}
        ask = threading.Thread(
            target=lambda: answers.append(client.completions.create(**asked).choices[0].finish_reason)
        )
        ask.start()
        wait_until(lambda: running.metric("foredraft_running_requests") == 1)
        running.process.send_signal(signal.SIGTERM)
        ask.join(timeout=120)
        assert (answers, running.process.wait(timeout=60)) == (["length"], -signal.SIGTERM)
        assert KEY not in running.log.read_text()
