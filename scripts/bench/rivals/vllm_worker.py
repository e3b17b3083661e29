"""Answer questions with vLLM: a line of JSON with prompts comes in, a line with answers goes out.

Runs in the environment of scripts/vllm_env.sh as `python vllm_worker.py job.json` (written by spec_bench.py). The job's
"speculative" is null or vLLM's speculative_config.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.v1.metrics.reader import Counter


def counted(llm: LLM) -> int:
    """Return how many times it has drafted so far."""
    found = {metric.name: metric.value for metric in llm.get_metrics() if isinstance(metric, Counter)}
    return int(found.get("vllm:spec_decode_num_drafts", 0))


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    llm = LLM(
        model=job["target"],
        dtype=job["dtype"],
        speculative_config=job["speculative"],
        max_model_len=job["max_model_len"],
        max_num_seqs=job["batch_size"],
        kv_cache_memory_bytes=1 << 30,
        disable_log_stats=False,
        enable_prefix_caching=False,
        enforce_eager=job["eager"],
    )
    settings = SamplingParams(
        temperature=0.0,
        max_tokens=job["max_new_tokens"],
        ignore_eos=job["ignore_eos"],
        stop_token_ids=[] if job["ignore_eos"] else job["eos_token_ids"],
        detokenize=False,
    )
    for line in sys.stdin:
        prompts = [{"prompt_token_ids": ids} for ids in json.loads(line)]
        before, started, used = counted(llm), time.perf_counter(), time.process_time()
        outs = llm.generate(prompts, settings, use_tqdm=False)
        answer: dict[str, Any] = {"seconds": time.perf_counter() - started, "cpu": time.process_time() - used}
        answer["texts"] = [list(out.outputs[0].token_ids) for out in outs]
        # vLLM counts accepted drafts behind the end of a text, too.
        answer["emitted"] = sum(len(text) - 1 for text in answer["texts"])
        answer["forwards"] = counted(llm) - before if job["speculative"] else answer["emitted"]
        print("answer " + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
