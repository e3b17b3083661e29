"""Texts by vLLM: a line of JSON with prompts comes in, one with what they are continued by goes out. Runs in the environment
of scripts/vllm_env.sh:

python vllm_rows.py job.json     written by rows.py; "speculative" is null or vLLM's speculative_config
"""

import json
import sys
from pathlib import Path

from vllm import LLM, SamplingParams


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    llm = LLM(
        model=job["target"],
        dtype=job["dtype"],
        speculative_config=job["speculative"],
        max_model_len=job["max_model_len"],
        max_num_seqs=job["max_num_seqs"],
        kv_cache_memory_bytes=1 << 30,
        enable_prefix_caching=False,
        enforce_eager=job["eager"],
    )
    settings = SamplingParams(temperature=0.0, max_tokens=job["new_tokens"], ignore_eos=True, detokenize=False)
    for line in sys.stdin:
        outs = llm.generate([{"prompt_token_ids": row} for row in json.loads(line)], settings, use_tqdm=False)
        print("texts " + json.dumps([list(out.outputs[0].token_ids) for out in outs]), flush=True)


if __name__ == "__main__":
    main()
