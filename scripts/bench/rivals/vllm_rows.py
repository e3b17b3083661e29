"""Texts by vLLM: a line of JSON with prompts comes in, one with what they are continued by goes out. Runs in the environment
of scripts/vllm_env.sh:

python vllm_rows.py job.json     written by rows.py; "speculative" is null or vLLM's speculative_config
"""

import json
import sys
from pathlib import Path

from vllm import SamplingParams
from vllm_run import load


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    llm = load(job)
    settings = SamplingParams(temperature=0.0, max_tokens=job["new_tokens"], ignore_eos=True, detokenize=False)
    for line in sys.stdin:
        outs = llm.generate([{"prompt_token_ids": row} for row in json.loads(line)], settings, use_tqdm=False)
        print("texts " + json.dumps([list(out.outputs[0].token_ids) for out in outs]), flush=True)


if __name__ == "__main__":
    main()
