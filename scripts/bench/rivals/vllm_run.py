"""One client of vLLM: the prompts of a job, one at a time. Runs in the environment of scripts/vllm_env.sh:

python vllm_run.py job.json     written by table.py; "speculative" is null or vLLM's speculative_config
"""

import importlib.metadata
import json
import sys
import time
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.v1.metrics.reader import Counter, Vector


def counters(llm: LLM) -> dict[str, list[int]]:
    """What it has drafted so far: spec_decode_num_drafts and others, each as a list."""
    found = {}
    for metric in llm.get_metrics():
        name = metric.name.removeprefix("vllm:spec_decode_num_")
        if name != metric.name and isinstance(metric, Counter | Vector):
            found[name] = [metric.value] if isinstance(metric, Counter) else list(metric.values)
    return found


def load(job: dict[str, Any]) -> LLM:
    return LLM(
        model=job["target"],
        dtype=job["dtype"],
        speculative_config=job["speculative"],
        max_model_len=job["max_model_len"],
        max_num_seqs=job["max_num_seqs"],
        kv_cache_memory_bytes=job["cache_bytes"],
        disable_log_stats=False,
        enable_prefix_caching=False,
        enforce_eager=job["eager"],
    )


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    llm = load(job)
    settings = SamplingParams(temperature=0.0, max_tokens=job["new_tokens"], ignore_eos=True, detokenize=False)

    def decode(row: list[int]) -> list[int]:
        return list(llm.generate([{"prompt_token_ids": row}], settings, use_tqdm=False)[0].outputs[0].token_ids)

    decode(job["prompts"][0])  # what it compiles at first
    before, texts, seconds = counters(llm), [], []
    for row in job["prompts"]:
        start = time.perf_counter()
        texts.append(decode(row))
        seconds.append(time.perf_counter() - start)
    counted = {name: [b - a for a, b in zip(before[name], values)] for name, values in counters(llm).items()}
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    out = {"texts": texts, "seconds": seconds, "counted": counted, "versions": versions}
    Path(job["output"]).write_text(json.dumps(out))


if __name__ == "__main__":
    main()
