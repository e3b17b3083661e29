"""Decode prompts in vLLM and print what it drafted, as JSON. Runs in the environment of scripts/vllm_env.sh:

python engine.py job.json       {"target", "speculative": null or vLLM's speculative_config, "prompts", "new_tokens"}
"""

import json
import sys
from pathlib import Path

from vllm import LLM, SamplingParams, _custom_ops
from vllm.v1.metrics.reader import Counter, Vector

rms_norm = _custom_ops.rms_norm


def by_layer(out, x, weight, epsilon):
    """Normalize the keys of each layer of DFlash separately. It norms those of all layers in one call, by weights (layers,
    dim), and vLLM 0.32's CPU kernel uses the first layer's for all; CUDA's does not."""
    if weight.dim() == 1:
        rms_norm(out, x, weight, epsilon)
    else:
        for part in zip(out, x, weight, strict=True):
            rms_norm(*part, epsilon)


_custom_ops.rms_norm = by_layer


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
