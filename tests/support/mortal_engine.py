"""scripts/extract.py, but it fails and dies on the way:  python -m tests.support.mortal_engine TARGET FOLDER SEED DEATHS

Each life is a fork of this process, which spares it the imports; after that number of deaths the last one lives on. When
and how one fails or dies is drawn with SEED. Prints its address, and then every failure and death.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save, save_file

from foredraft.heads import Target
from foredraft.scripts import extract
from tests.support.processes import reserved_port

LAYERS = [1, 3, 4]
DEATHS = ("asked", "answered", "half")  # when it is asked, when it has answered, with half a file written
FAILURES = ("busy", "not json", "other tokens")


class Mortal(extract.Handler):
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
            extract.Handler, extract.save_file = Mortal, save_or_die
            extract.Extractor(target, LAYERS, Path(folder), "127.0.0.1", port).serve_forever()
        os.waitpid(pid, 0)
        time.sleep(draw.random() / 2)


if __name__ == "__main__":
    main(*sys.argv[1:])
