"""Measure a server under load:  python scripts/bench/bench_serve.py 'serve=["drafter=DIRECTORY"]' clients=[1,4]

N clients send M requests each, first without drafts (`speculative: false`) and then with them. Measured are total tokens/s,
the median time to the first token, and whether each text equals that of a single request. soak_minutes= repeats the requests
and shows the server's resident memory. FOREDRAFT_API_KEY is sent if it is set.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple

from omegaconf import DictConfig
from openai import APIConnectionError, OpenAI

from foredraft.cli import entry
from foredraft.words import SCRIPTS

PROMPTS = ("import os\n\n\ndef ", "class Reader:\n    def ", "def parse(text):\n    ", "try:\n    import ")


class Answer(NamedTuple):
    text: str
    tokens: int
    first: float  # seconds to the first token


class Asker:
    def __init__(self, cfg: DictConfig, url: str):
        key = os.environ.get("FOREDRAFT_API_KEY", "none").strip()
        self.cfg, self.client = cfg, OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=600)
        try:
            self.model = self.client.models.list().data[0].id
        except APIConnectionError as error:
            raise ValueError(f"url={url} does not answer: {error.__cause__}") from None

    def ask(self, number: int, speculative: bool = True) -> Answer:
        """Return the answer to question `number`, counted modulo `questions`."""
        number %= self.cfg.questions
        shortest, longest = self.cfg.max_tokens
        began, first, text, tokens = time.perf_counter(), 0.0, "", 0
        stream = self.client.completions.create(
            model=self.model,
            prompt=PROMPTS[number % len(PROMPTS)] + f"f{number}",
            max_tokens=shortest + 17 * number % (longest - shortest + 1),
            temperature=self.cfg.temperature,
            seed=number,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"speculative": speculative},
        )
        for chunk in stream:
            first = first or time.perf_counter() - began
            text += "".join(choice.text for choice in chunk.choices)
            tokens = chunk.usage.completion_tokens if chunk.usage else tokens
        return Answer(text, tokens, first)

    def load(self, clients: int, requests: int, speculative: bool) -> tuple[list[Answer], float]:
        """Return the answers to `requests` requests, and the seconds."""
        with ThreadPoolExecutor(clients) as pool:
            began = time.perf_counter()
            answers = list(pool.map(lambda number: self.ask(number, speculative), range(requests)))
            return answers, time.perf_counter() - began


@contextmanager
def server(cfg: DictConfig) -> Iterator[tuple[str, int | None]]:
    """Provide the URL of a server, and its process id if it is started here."""
    if cfg.url is not None:
        yield cfg.url, None
        return
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        command = [sys.executable, str(SCRIPTS / "serve.py"), "port=0", *cfg.serve]
        with log.open("w") as opened:
            process = subprocess.Popen(command, stdout=opened, stderr=opened)
        try:
            while not (found := re.search(r"running on (http://[\d.:]+)", log.read_text())):
                if process.poll() is not None:
                    raise ValueError(f"serve={list(cfg.serve)} does not start: {log.read_text().strip()[-500:]}")
                time.sleep(0.2)
            yield found[1], process.pid
        finally:
            process.terminate()
            process.wait()


def compare(asker: Asker, cfg: DictConfig) -> None:
    """Print a row per number of clients, without drafts and with drafts."""
    alone = [asker.ask(number, False).text for number in range(cfg.questions)]
    print("clients  drafts  tokens/s  gain  first token  as alone")
    for clients in cfg.clients:
        rates = dict[bool, float]()
        for speculative in (False, True):
            answers, seconds = asker.load(clients, clients * cfg.requests, speculative)
            rates[speculative] = sum(answer.tokens for answer in answers) / seconds
            same = sum(answer.text == alone[number % cfg.questions] for number, answer in enumerate(answers))
            first = 1000 * median(answer.first for answer in answers)
            gain, drafts = rates[speculative] / rates[False], "on" if speculative else "off"
            figures = f"{rates[speculative]:8.1f}  {gain:3.2f}x  {first:8.0f} ms"
            print(f"{clients:7}  {drafts:>6}  {figures}  {same} of {len(answers)}", flush=True)


def soak(asker: Asker, cfg: DictConfig, pid: int) -> None:
    """Print a row per tenth of the time: the number of answers and the server's memory."""
    clients, texts, answered, wrong = max(cfg.clients), dict[int, str](), 0, 0
    began = time.monotonic()
    print("minutes  answers  wrong  resident MiB")
    for part in range(11):
        print(f"{(time.monotonic() - began) / 60:7.1f}  {answered:7}  {wrong:5}  {resident(pid):12.1f}", flush=True)
        while part < 10 and time.monotonic() - began < 60 * cfg.soak_minutes * (part + 1) / 10:
            answers, _ = asker.load(clients, max(clients, cfg.questions), True)
            answered += len(answers)
            for number, answer in enumerate(answers):
                wrong += answer.text != texts.setdefault(number % cfg.questions, answer.text)


def resident(pid: int) -> float:
    """Return the resident MiB of a process."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


@entry("bench_serve")
def main(cfg: DictConfig) -> None:
    if cfg.soak_minutes and cfg.url is not None:
        raise ValueError(f"soak_minutes={cfg.soak_minutes} starts a separate server: remove url={cfg.url}")
    if len(cfg.max_tokens) != 2 or not 0 < cfg.max_tokens[0] <= cfg.max_tokens[1]:
        raise ValueError(
            f"max_tokens={list(cfg.max_tokens)}: set the lengths of the shortest and the longest answer, such as [24,72]"
        )
    if not cfg.clients or min(*cfg.clients, cfg.requests, cfg.questions) < 1:
        raise ValueError(
            f"clients={list(cfg.clients)} requests={cfg.requests} questions={cfg.questions}: at least 1 of each"
        )
    with server(cfg) as (url, pid):
        asker = Asker(cfg, url)
        if pid is not None and cfg.soak_minutes:
            soak(asker, cfg, pid)
        else:
            compare(asker, cfg)


if __name__ == "__main__":
    main()
