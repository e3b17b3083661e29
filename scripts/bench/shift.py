"""Traffic that shifts, for `foredraft serve learn=true` beside a frozen head and one that knew all topics before:

    python scripts/bench/shift.py spec=HEAD 'topics=[code.jsonl,gsm8k.jsonl,chat.jsonl]' 'train=["trainer.max_steps=60"]'

Half of all texts are drawn at temperature 1. The last 2 * burst of each topic are answered first, and a copy of the head is
trained on these answers. Then 2 * burst of each topic in turn are asked of all three servers, one after the other, four at a
time; after each burst the learning one is left alone until its round is over. At last come `burst` new questions of every
topic, and as many texts three times, during which heads are swapped all the time. The first three trainings are killed in the
middle, and in the fourth the server is. While it trains, a client asks for plain texts in pairs: the first after a pause, in
which training goes on, the second at once, so before it goes on again. shift.svg is a picture.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import quantiles
from threading import Event
from typing import Any, NamedTuple

from omegaconf import DictConfig
from openai import OpenAI

from foredraft.inference.serve.learned import write
from foredraft.inference.serve.traffic import Gains, acceptance, gain, lines
from foredraft.train.cli import SCRIPTS, entry

PAUSE = 0.6  # seconds before each pair of texts
COLOURS = {"learning": "#1a56c4", "frozen": "#767680", "knew": "#2b8a3e"}


class Asked(NamedTuple):
    gains: Gains  # of each text
    texts: list[str]
    rate: float  # tokens/s


class Server:
    def __init__(self, folder: Path, tokens: int, name: str, *arguments: str):
        """tokens: of a text."""
        self.folder, self.tokens, self.name, self.starts = folder, tokens, name, 0
        self.latencies = defaultdict[str, list[float]](list)
        self.command = [sys.executable, str(SCRIPTS / "serve.py"), "port=0", "model=m", *arguments]
        self.start()

    def start(self) -> None:
        log = self.folder / f"{self.name}-{self.starts}.log"
        self.starts += 1
        with log.open("w") as opened:
            self.process = subprocess.Popen(self.command, stdout=opened, stderr=opened)
        while not (found := re.search(r"running on (http://[\d.:]+)", log.read_text())):
            assert self.process.poll() is None, log.read_text()
            time.sleep(0.2)
        self.client = OpenAI(base_url=f"{found[1]}/v1", api_key="none", max_retries=0, timeout=600)

    def ask(self, prompts: Sequence[str], **more: Any) -> Asked:
        def one(number: int) -> Any:
            settings: Any = {"temperature": number % 2, "seed": number, "extra_body": more}
            return self.client.completions.create(model="m", prompt=prompts[number], max_tokens=self.tokens, **settings)

        began = time.monotonic()
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(one, range(len(prompts))))
        used = [answer.usage.model_dump() for answer in answers]
        gained = [[usage["completion_tokens"] - 1, usage["acceptance_length"]] for usage in used]
        gains = [[count, round(count / length)] for count, length in gained if count and length]
        tokens = sum(usage["completion_tokens"] for usage in used)
        return Asked(gains, [answer.choices[0].text for answer in answers], tokens / (time.monotonic() - began))

    def time_pair(self, prompt: str, state: str) -> None:
        """Seconds of a plain text after a pause, and at once after that."""
        time.sleep(PAUSE)
        for place in ("after a pause", "at once"):
            began, more = time.perf_counter(), {"speculative": False, "store": False}
            self.client.completions.create(model="m", prompt=prompt, max_tokens=32, temperature=0, extra_body=more)
            self.latencies[f"{state}, {place}"].append(time.perf_counter() - began)

    def children(self) -> list[int]:
        found = [path.read_text() for path in Path(f"/proc/{self.process.pid}/task").glob("*/children")]
        return [int(word) for word in " ".join(found).split()]

    def warnings(self) -> list[str]:
        logs = "\n".join(path.read_text() for path in sorted(self.folder.glob(f"{self.name}-*.log")))
        said = [json.loads(line)["message"] for line in logs.splitlines() if line.startswith("{")]
        return [message for message in said if message.startswith("learning: ")]


def rounds(learned: Path) -> list[dict[str, Any]]:
    file = learned / "history.jsonl"
    found = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [one for one in found if one["outcome"] not in ("back", "stays")]


def wait_for_round(server: Server, learned: Path, number: int, prompt: str, pairs: int) -> dict[str, Any]:
    """What became of it."""
    kill = number <= 4
    while len(rounds(learned)) < number:
        if kill and any(learned.glob("round/from-*/checkpoints/checkpoint-*")):
            kill = False
            os.kill(server.children()[0] if number <= 3 else server.process.pid, signal.SIGKILL)
            if number == 4:
                server.process.wait()
                server.start()
        if pairs and server.children():
            server.time_pair(prompt, "training")
            pairs -= 1
        time.sleep(0.1)
    found = rounds(learned)[-1]
    return {key: found[key] for key in ("outcome", "recent", "error", "replay", "seconds") if key in found}


def train(cfg: DictConfig, folder: Path, rows: Path) -> Path:
    """A copy of the head that has learned from these rows."""
    words = ["head=eagle3", "data=accepted", f"data.path={rows}", f"init_from={cfg.spec}", f"output_dir={folder}"]
    target = [word for word in cfg.serve if word.startswith("target")] or ["target=embedded"]
    few = [f"trainer.max_steps={cfg.steps}", "evaluate.eval_steps=0", "evaluate.prompts=4", "evaluate.proof=false"]
    with (folder.parent / "train.log").open("w") as log:
        command = [sys.executable, "-m", "foredraft", "train", *words, *target, *few]
        subprocess.run(command, check=True, stdout=log, stderr=log)
    return folder / "head"


def swap_all_the_time(current: Path, names: Sequence[str], over: Event) -> int:
    """Swaps that were asked for, one a second."""
    count = 0
    while not over.wait(1):
        write(current, names[count % len(names)])
        count += 1
    return count


def differing(some: Sequence[str], others: Sequence[str]) -> int:
    return sum(one != other for one, other in zip(some, others, strict=True))


def picture(points: Sequence[tuple[float, str, dict[str, float]]], served: Sequence[int]) -> str:
    """points: minute, topic and acceptance by arm. served: after how many of them another head began."""
    most = max(max(values.values()) for *_, values in points) + 0.2
    least = min(min(values.values()) for *_, values in points) - 0.2

    def at(number: float, value: float) -> str:
        return f"{50 + 640 * (number + 0.5) / len(points):.1f},{300 - 270 * (value - least) / (most - least):.1f}"

    parts = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 350" font-family="sans-serif" font-size="11">']
    parts.append('<title>Tokens per forward over time</title><rect width="720" height="350" fill="#fff"/>')
    for value in range(int(least * 2) + 1, int(most * 2) + 1):
        y = at(0, value / 2).split(",")[1]
        parts.append(f'<path d="M50,{y}H690" stroke="#ddd"/><text x="44" y="{y}" text-anchor="end">{value / 2}</text>')
    for number in served:
        x = at(number - 0.5, least).split(",")[0]
        parts.append(f'<path d="M{x},30V300" stroke="{COLOURS["learning"]}" stroke-dasharray="3 3"/>')
    for number, (arm, colour) in enumerate(COLOURS.items()):
        line = " ".join(at(place, values[arm]) for place, (*_, values) in enumerate(points))
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{60 + 90 * number}" y="20" fill="{colour}">{arm}</text>')
    for number, (minute, topic, _) in enumerate(points):
        x = at(number, least).split(",")[0]
        parts.append(f'<text x="{x}" y="316" text-anchor="middle">{topic}, {minute:.0f}</text>')
    below = "tokens per forward by topic and minute; a dotted line is a better head"
    parts.append(f'<text x="370" y="340" text-anchor="middle">{below}</text>')
    return "\n".join([*parts, "</svg>"])


def start(cfg: DictConfig, folder: Path, topics: dict[str, list[str]]) -> dict[str, Server]:
    common, given = ["drafter=head", "drafter.tree=fixed"], list(cfg.serve)
    seen = folder / "seen.jsonl"
    log = [f"log_accepted={seen}", "log_text=true"]
    frozen = Server(folder, cfg.tokens, "frozen", *common, f"drafter.spec={cfg.spec}", *given, *log)
    for prompts in topics.values():
        frozen.ask(prompts[3 * cfg.burst :])
    knowing = train(cfg, folder / "knew", seen)
    knew = Server(folder, cfg.tokens, "knew", *common, f"drafter.spec={knowing}", *given)
    learn = ["learn=true", f"learn.directory={folder / 'learned'}", f"learn.rows={cfg.burst - 4}"]
    learn.append(f"learn.train={json.dumps(list(cfg.train))}")
    learning = Server(folder, cfg.tokens, "learning", *common, f"drafter.spec={cfg.spec}", *given, *learn)
    return {"frozen": frozen, "knew": knew, "learning": learning}


@entry("shift")
def main(cfg: DictConfig) -> None:
    folder = Path(cfg.output_dir)
    topics = {
        Path(file).stem: [json.loads(row)["prompt"] for row in Path(file).read_text().splitlines()][: 5 * cfg.burst]
        for file in cfg.topics
    }
    folder.mkdir(parents=True)
    learned = folder / "learned"
    arms = start(cfg, folder, topics)
    learning = arms["learning"]
    print(
        "minute  topic   serves     tokens per forward, tokens/s: frozen, knew, learning   texts unlike frozen, plain"
    )
    began, number, stored, points, better = time.monotonic(), 0, 0, list[Any](), list[int]()
    for topic, part in [*((topic, part) for topic in topics for part in (0, 1)), *((topic, 2) for topic in topics)]:
        prompts = topics[topic][cfg.burst * part : cfg.burst * (part + 1)]
        name = (learned / "current").read_text().strip()
        for _ in range(cfg.pairs if part < 2 else 0):
            learning.time_pair(prompts[0], "not training")
        asked = {arm: server.ask(prompts, store=part < 2) for arm, server in arms.items()}
        plain = learning.ask(prompts, speculative=False, store=False)
        minute, texts = (time.monotonic() - began) / 60, asked["learning"].texts
        values = {arm: acceptance(one.gains) for arm, one in asked.items()}
        points.append((minute, topic, {arm: value for arm, (value, _) in values.items()}))
        figures = "  ".join(f"{value:.2f}±{error:.2f} {asked[arm].rate:5.0f}" for arm, (value, error) in values.items())
        unlike = [differing(texts, asked["frozen"].texts), differing(texts, plain.texts)]
        print(f"{minute:6.1f}  {topic:6}  {name}  {figures}  {unlike} of {len(texts)}", flush=True)
        if part == 2:
            difference, error = gain(asked["frozen"].gains, asked["learning"].gains)
            share = 100 / values["frozen"][0]
            print(f"        {topic}, new questions: {share * difference:+.1f} % ± {share * error:.1f} % of frozen")
            continue
        stored, number = stored + len(asked["learning"].gains), number + 1
        found = wait_for_round(learning, learned, number, prompts[0], cfg.pairs)
        print(f"        round {number}: {found}", flush=True)
        if found["outcome"] == "served":
            better.append(len(points))
    minutes, seconds = (time.monotonic() - began) / 60, sum(one["seconds"] for one in rounds(learned))
    print(f"training and judging: {seconds / 60:.1f} of {minutes:.1f} minutes, {100 * seconds / 60 / minutes:.0f} %")
    rows = {row for name in ("replay", "new", "older") for row in lines(learned / f"{name}.jsonl")}
    print(f"rows kept: {len(rows)} of {stored} texts that were drafted for and served to be learned from")
    shutil.copytree(folder / "knew" / "head", learned / "head-9999")
    swap(learning, plain.texts, prompts, learned)
    for state, times in learning.latencies.items():
        cut = [1000 * value for value in quantiles(times, n=20)]
        print(f"a plain text of 32 tokens, {state}: p50 {cut[9]:.0f} ms, p95 {cut[18]:.0f} ms, {len(times)} texts")
    print("\n".join(learning.warnings()))
    (folder / "shift.svg").write_text(picture(points, better))
    for server in arms.values():
        server.process.terminate()
        server.process.wait()


def swap(server: Server, plain: Sequence[str], prompts: Sequence[str], learned: Path) -> None:
    """The same texts once more while heads are swapped all the time."""
    over, names = Event(), [learned.joinpath("current").read_text().strip(), "head-9999"]
    with ThreadPoolExecutor(1) as pool:
        swaps = pool.submit(swap_all_the_time, learned / "current", names, over)
        asked = [server.ask(prompts, store=False) for _ in range(3)]
        over.set()
    unlike = sum(differing(one.texts, plain) for one in asked)
    print(f"{swaps.result()} swaps asked for while {3 * len(prompts)} texts were decoded: {unlike} unlike plain")


if __name__ == "__main__":
    main()
