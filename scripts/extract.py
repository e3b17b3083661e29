"""Serve hidden states of a target to hidden_states=server:  python scripts/extract.py target=ORG/NAME 'layers=[2,16,29]'

transformers runs the target, one text at a time. The protocol is that of vLLM's `extract_hidden_states`, which is faster for
large targets. output_dir must be on a disk that the trainer can access; the trainer reads the files and deletes them.
"""

import contextlib
import fcntl
import json
import os
import re
import threading
import uuid
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig

from foredraft.cli import entry
from foredraft.heads.target_model import Target
from foredraft.heads.target_model.files import save_tensors
from foredraft.inference.evaluation.progress import Progress
from foredraft.inference.serve.address import check_address
from foredraft.train.hidden_states.probe import final_norm, read_states


class Extractor(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, target: Target, layers: Sequence[int], folder: Path, host: str, port: int):
        """Listen at the address. Raises ValueError for layers that the target does not have."""
        self.layers = sorted({*layers, target.num_layers})
        if self.layers[0] < 0 or self.layers[-1] > target.num_layers:
            raise ValueError(
                f"layers={list(layers)} must be from 0 (the embedding) to {target.num_layers} for {target.name}"
            )
        folder.mkdir(parents=True, exist_ok=True)
        self.target, self.norm, self.folder, self.lock = target, final_norm(target), folder.absolute(), threading.Lock()
        self.progress = Progress("hidden states of", unit="texts")
        super().__init__((host, port), Handler)

    def states(self, tokens: list[int]) -> dict[str, torch.Tensor]:
        with self.lock:
            states = read_states(self.target, self.norm, tokens, self.layers)
            written = self.target.logits(self.norm(states[-1:, -1])).argmax(-1)
            self.progress.add()
        return {"hidden_states": states.cpu().contiguous(), "token_ids": torch.tensor(tokens), "written": written.cpu()}


class Handler(BaseHTTPRequestHandler):
    server: Extractor
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *arguments: Any) -> None:
        pass

    def send(self, body: dict[str, Any], status: int = 200) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
        self.wfile.flush()

    def do_GET(self) -> None:
        if self.path != "/v1/models":
            return self.send({"error": {"message": "GET /v1/models, POST /v1/completions"}}, 404)
        self.send({"object": "list", "data": [{"id": self.server.target.name, "object": "model"}]})

    def do_POST(self) -> None:
        target = self.server.target
        try:
            tokens = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))))["prompt"]
            valid = isinstance(tokens, list) and all(type(t) is int and 0 <= t < target.vocab_size for t in tokens)
            if not valid or not 0 < len(tokens) <= (target.context or len(tokens)):
                raise ValueError(f"must be a list of up to {target.context} token ids below {target.vocab_size}")
        except (ValueError, KeyError, TypeError) as error:
            return self.send({"error": {"message": f"prompt: {error}"}}, 400)
        name = re.sub(r"[^\w.-]", "", self.headers.get("X-Request-Id", "")) or uuid.uuid4().hex
        with contextlib.suppress(ConnectionError):  # the client has disconnected and needs no file
            self.answer(f"cmpl-{name}-0", self.server.states(tokens))

    def answer(self, name: str, tensors: dict[str, torch.Tensor]) -> None:
        """Send the answer, then write the file, which is locked until it is complete."""
        path = self.server.folder / f"{name}.safetensors"
        choice = {"index": 0, "text": "", "finish_reason": "length", "token_ids": tensors["written"].tolist()}
        answer = {"id": name, "object": "text_completion", "model": self.server.target.name, "choices": [choice]}
        lock = Path(f"{path}.lock")
        with lock.open("w") as opened:
            fcntl.flock(opened, fcntl.LOCK_EX)
            try:
                parameters = {"hidden_states_path": str(path), "layers": self.server.layers}
                self.send(answer | {"kv_transfer_params": parameters})
            except ConnectionError:
                lock.unlink()
                raise
            save_tensors(tensors, path)


@entry("extract")
def main(cfg: DictConfig) -> None:
    check_address(cfg.host, cfg.port)
    target = instantiate(cfg.target)
    with Extractor(target, cfg.layers, Path(cfg.output_dir), cfg.host, cfg.port) as server:
        where = f"http://{cfg.host}:{server.server_port}/v1"
        print(
            f"layers {server.layers} of {target.name} at {where}, files in {server.folder} (pid {os.getpid()})",
            flush=True,
        )
        server.serve_forever()


if __name__ == "__main__":
    main()
