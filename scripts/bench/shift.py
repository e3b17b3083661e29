"""Traffic that shifts, for `foredraft serve learn=true` beside a frozen head:

    python scripts/bench/shift.py HEAD FOLDER code.jsonl gsm8k.jsonl chat.jsonl -- target.dtype=float32

Each file is a topic, of lines {"prompt": TEXT}. Of each in turn, 2 * 48 questions are asked of both servers, four at a time;
after 48 the learning one is left alone until its round is over. At last come 48 new questions of every topic. The first three
trainings are killed in the middle, and in the fourth the server is.
"""

import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from openai import OpenAI

from foredraft.train.cli import SCRIPTS

BURST, TOKENS = 48, 48


class Server:
    def __init__(self, log: Path, *arguments: str):
        self.log, self.command = log, [sys.executable, str(SCRIPTS / "serve.py"), "port=0", "model=m", *arguments]
        self.start()

    def start(self) -> None:
        with self.log.open("w") as opened:
            self.process = subprocess.Popen(self.command, stdout=opened, stderr=opened)
        while not (found := re.search(r"running on (http://[\d.:]+)", self.log.read_text())):
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.2)
        self.client = OpenAI(base_url=f"{found[1]}/v1", api_key="none", max_retries=0, timeout=600)

    def ask(self, prompts: Sequence[str], **more: Any) -> tuple[float, list[str]]:
        """Tokens per forward, and the texts."""
        settings: dict[str, Any] = {"model": "m", "max_tokens": TOKENS, "temperature": 0, "seed": 1, "extra_body": more}
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda one: self.client.completions.create(prompt=one, **settings), prompts))
        used = [usage for answer in answers if (usage := answer.usage.model_dump())["acceptance_length"]]
        gained = [usage["completion_tokens"] - 1 for usage in used]
        forwards = [count / usage["acceptance_length"] for count, usage in zip(gained, used, strict=True)]
        return sum(gained) / max(1.0, sum(forwards)), [answer.choices[0].text for answer in answers]

    def trainer(self) -> int:
        children = [path.read_text() for path in Path(f"/proc/{self.process.pid}/task").glob("*/children")]
        return int(" ".join(children))


def round_of(server: Server, learned: Path, number: int) -> dict[str, Any]:
    """What became of it."""
    history, kill = learned / "history.jsonl", number <= 4
    while not history.exists() or len(history.read_text().splitlines()) < number:
        if kill and any(learned.glob("round/from-*/checkpoints/checkpoint-*")):
            subprocess.run(["kill", "-9", str(server.trainer() if number <= 3 else server.process.pid)], check=True)
            kill = False
            if number == 4:
                server.process.wait()
                server.start()
        time.sleep(0.1)
    found = json.loads(history.read_text().splitlines()[-1])
    return {key: found[key] for key in ("outcome", "recent", "error", "replay", "seconds") if key in found}


def main() -> None:
    split = sys.argv.index("--")
    head, folder, files, given = sys.argv[1], Path(sys.argv[2]), sys.argv[3:split], sys.argv[split + 1 :]
    topics = {
        Path(file).stem: [json.loads(line)["prompt"] for line in Path(file).read_text().splitlines()] for file in files
    }
    common = ["drafter=head", f"drafter.spec={head}", "drafter.tree=fixed", *given]
    learned, began, number = folder / "learned", time.monotonic(), 0
    frozen = Server(folder / "frozen.log", *common)
    learning = Server(folder / "learning.log", *common, "learn=true", f"learn.directory={learned}", "learn.rows=44")
    print("minute  topic   serves     learning  frozen  texts that differ from frozen, plain", flush=True)
    for topic, part in [*((topic, part) for topic in topics for part in (0, 1)), *((topic, 2) for topic in topics)]:
        prompts, name = topics[topic][BURST * part : BURST * (part + 1)], (learned / "current").read_text().strip()
        with ThreadPoolExecutor(2) as pool:
            asked = [pool.submit(server.ask, prompts, store=part < 2) for server in (learning, frozen)]
            (ours, texts), (theirs, others) = (one.result() for one in asked)
        plain = frozen.ask(prompts[::8], speculative=False)[1]
        differ = [sum(a != b for a, b in zip(x, y, strict=True)) for x, y in ((texts, others), (texts[::8], plain))]
        minute = (time.monotonic() - began) / 60
        number += part < 2
        found = round_of(learning, learned, number) if part < 2 else ""
        print(f"{minute:6.1f}  {topic:6}  {name}  {ours:8.2f}  {theirs:6.2f}  {differ}  {found}", flush=True)
    for server in (frozen, learning):
        server.process.terminate()
        server.process.wait()


if __name__ == "__main__":
    main()
