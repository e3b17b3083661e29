"""A server that speaks OpenAI's protocol and misbehaves: the first time it is asked something it may fail in many ways.

Run as a program it prints its address. An answer tells how many turns it was asked with and the last question's words.
"""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

WAYS = ("fine", "busy", "broken", "late", "cut", "not json", "no choices", "text")
MODELS = json.dumps({"object": "list", "data": [{"id": "tiny", "object": "model"}]})


class BadServer(ThreadingHTTPServer):
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
