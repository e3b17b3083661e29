"""Load on a running server:  foredraft serve drafter=DIRECTORY &  python scripts/bench/bench_serve.py clients=[1,4]

N clients ask M questions each, first without drafts (`speculative: false`) and then with them, of the same prompts: tokens/s
of all together, the median time to the first token, and whether each text is what it is alone. FOREDRAFT_API_KEY is given
where it is set.
"""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import NamedTuple

from omegaconf import DictConfig
from openai import OpenAI

from train.cli import entry

PROMPTS = ("import os\n\n\ndef ", "class Reader:\n    def ", "def parse(text):\n    ", "try:\n    import ")


class Answer(NamedTuple):
    text: str
    tokens: int
    first: float  # seconds to the first token


def ask(client: OpenAI, cfg: DictConfig, model: str, number: int, speculative: bool) -> Answer:
    began, first, text, tokens = time.perf_counter(), 0.0, "", 0
    stream = client.completions.create(
        model=model,
        prompt=PROMPTS[number % len(PROMPTS)] + f"f{number}",
        max_tokens=cfg.max_tokens,
        temperature=cfg.temperature,
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


@entry("bench_serve")
def main(cfg: DictConfig) -> None:
    key = os.environ.get("FOREDRAFT_API_KEY", "none")
    client = OpenAI(base_url=f"{cfg.url}/v1", api_key=key, max_retries=0, timeout=600)
    model = client.models.list().data[0].id
    most = max(cfg.clients) * cfg.requests
    alone = [ask(client, cfg, model, number, False).text for number in range(most)]
    print("clients  drafts  tokens/s  gain  first token  as alone")
    for clients in cfg.clients:
        rates = dict[bool, float]()
        for speculative in (False, True):
            with ThreadPoolExecutor(clients) as pool:
                began = time.perf_counter()
                numbers = range(clients * cfg.requests)
                jobs = [pool.submit(ask, client, cfg, model, number, speculative) for number in numbers]
                answers = [job.result() for job in jobs]
                rates[speculative] = sum(answer.tokens for answer in answers) / (time.perf_counter() - began)
            same = sum(answer.text == text for answer, text in zip(answers, alone))
            gain = rates[speculative] / rates[False]
            first = 1000 * median(answer.first for answer in answers)
            drafts = "on" if speculative else "off"
            figures = f"{rates[speculative]:8.1f}  {gain:3.2f}x  {first:8.0f} ms"
            print(f"{clients:7}  {drafts:>6}  {figures}  {same} of {len(answers)}", flush=True)


if __name__ == "__main__":
    main()
