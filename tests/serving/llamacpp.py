"""Decode prompts in llama.cpp's server; what it drafted, as JSON. Runs in the environment of scripts/llamacpp_env.sh:

python llamacpp.py job.json     {"target", "head": null or a GGUF file, "method", "depth", "prompts", "new_tokens", "cache",
                                 "flash": is attention the fused one, "output"}
"""

import json
import re
import sys
import time
import urllib.request
from pathlib import Path

import xllamacpp as llama

METHODS = {
    name: llama.common_speculative_type[f"COMMON_SPECULATIVE_TYPE_DRAFT_{name.upper()}"]
    for name in ("eagle3", "dflash", "dspark", "mtp")
}
ACCEPTED = re.compile(
    r'^llamacpp:spec_decode_num_accepted_tokens_per_pos_total\{position="(\d+)"\} (\d+)', re.MULTILINE
)


def parameters(job: dict) -> llama.CommonParams:
    params = llama.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.n_batch = job["target"], 1024, 1, 512
    params.warmup, params.endpoint_metrics, params.verbosity, params.n_gpu_layers = False, True, 0, 0
    params.n_ctx_checkpoints = 0
    params.cache_type_k = params.cache_type_v = llama.ggml_type[f"GGML_TYPE_{job['cache'].upper()}"]
    flash = "ENABLED" if job["flash"] else "DISABLED"
    params.flash_attn_type = llama.llama_flash_attn_type[f"LLAMA_FLASH_ATTN_TYPE_{flash}"]
    for cpu in (params.cpuparams, params.cpuparams_batch):
        cpu.n_threads, cpu.poll = 1, 0  # threads that poll for work take the machine's other cores
    if job["head"] is not None:
        params.speculative.types = [METHODS[job["method"]]]
        draft = params.speculative.draft
        draft.mparams.path, draft.n_max, draft.n_min, draft.p_min = job["head"], job["depth"], 0, 0.0
        draft.cache_type_k, draft.cache_type_v = params.cache_type_k, params.cache_type_v
        draft.cpuparams.n_threads, draft.cpuparams.poll = 1, 0
        draft.cpuparams_batch.n_threads, draft.cpuparams_batch.poll = 1, 0
    return params


def ask(address: str, body: dict | None = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        return answer.read().decode()


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    server = llama.Server(parameters(job))
    settings = {"n_predict": job["new_tokens"], "temperature": 0, "top_k": 1, "ignore_eos": True, "return_tokens": True}
    settings |= {"cache_prompt": False, "n_probs": job.get("n_probs", 0)}
    texts, drafted, accepted, logprobs = [], 0, 0, []
    begun = time.perf_counter()
    for row in job["prompts"]:
        answer = json.loads(ask(f"{server.listening_address}/completion", settings | {"prompt": row}))
        texts.append(answer["tokens"])
        drafted += answer["timings"].get("draft_n", 0)
        accepted += answer["timings"].get("draft_n_accepted", 0)
        logprobs.append(answer.get("completion_probabilities"))
    seconds = time.perf_counter() - begun
    positions = ACCEPTED.findall(ask(f"{server.listening_address}/metrics"))
    out = {"texts": texts, "drafted": drafted, "accepted": accepted, "seconds": seconds}
    out |= {
        "per_position": [int(count) for _, count in positions],
        "probabilities": logprobs if job.get("n_probs") else None,
    }
    Path(job["output"]).write_text(json.dumps(out))


if __name__ == "__main__":
    main()
