"""Answer questions with EAGLE's own code (SafeAILab, package eagle-llm): a line of JSON comes in, a line goes out.

Runs in the environment of eagle_env.sh as `python eagle_worker.py job.json` (written by spec_bench.py).
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from eagle.model import ea_model
from safetensors.torch import load_file


def load(job: dict) -> ea_model.EaModel:
    # Prompts are token ids; besides, this version of transformers does not know newer tokenizers.
    end = -1 if job["ignore_eos"] else job["eos_token_ids"][0]
    ea_model.AutoTokenizer = SimpleNamespace(from_pretrained=lambda path: SimpleNamespace(eos_token_id=end))
    with tempfile.TemporaryDirectory() as folder:  # this version reads pickled weights only
        head, exported = Path(folder), Path(job["head"])
        (head / "config.json").write_text((exported / "config.json").read_text())
        torch.save(load_file(exported / "model.safetensors"), head / "pytorch_model.bin")
        facts = {"torch_dtype": getattr(torch, job["dtype"])}
        return ea_model.EaModel.from_pretrained(base_model_path=job["target"], ea_model_path=folder, **facts).eval()


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    model, steps, forward = load(job), [0], ea_model.tree_decoding

    def count(*inputs: Any) -> Any:
        steps[0] += 1
        return forward(*inputs)

    ea_model.tree_decoding = count
    limit = {"max_new_tokens": job["max_new_tokens"] - 1, "max_length": job["max_model_len"]}
    for line in sys.stdin:
        (ids,) = json.loads(line)
        steps[0], started, used = 0, time.perf_counter(), time.process_time()
        text = model.eagenerate(torch.tensor([ids]), temperature=0.0, **limit)[0, len(ids) :].tolist()
        answer: dict[str, Any] = {"seconds": time.perf_counter() - started, "cpu": time.process_time() - used}
        # The last step may write more than was asked for.
        answer |= {"forwards": steps[0], "emitted": len(text) - 1, "texts": [text]}
        print("answer " + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
