"""Decode prompts in vLLM and print what it drafted, as JSON. Runs in the environment of scripts/vllm_env.sh:

python engine.py job.json       {"target", "speculative": null or vLLM's speculative_config, "prompts", "new_tokens"}
"""

import json
import sys
from pathlib import Path

from vllm import LLM, SamplingParams
from vllm.v1.metrics.reader import Counter, Vector


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    llm = LLM(
        model=job["target"],
        dtype="float32",
        speculative_config=job["speculative"],
        enforce_eager=True,
        kv_cache_memory_bytes=256 * 2**20,
        max_model_len=512,
        max_num_seqs=8,
        disable_log_stats=False,
        enable_prefix_caching=False,
    )
    settings = SamplingParams(temperature=0.0, max_tokens=job["new_tokens"], ignore_eos=True, detokenize=False)
    outs = llm.generate([{"prompt_token_ids": row} for row in job["prompts"]], settings, use_tqdm=False)
    counted = {}
    for metric in llm.get_metrics():
        name = metric.name.removeprefix("vllm:spec_decode_num_")
        if name != metric.name and isinstance(metric, Counter | Vector):
            counted[name] = metric.value if isinstance(metric, Counter) else metric.values
    texts = [list(out.outputs[0].token_ids) for out in outs]
    Path(job["output"]).write_text(json.dumps({"texts": texts, "counted": counted}))


if __name__ == "__main__":
    main()
