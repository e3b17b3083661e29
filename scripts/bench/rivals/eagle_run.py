"""One client of EAGLE's own code (SafeAILab, package eagle-llm): the prompts of a job, one at a time. Runs in the environment
of eagle_env.sh:

python eagle_run.py job.json     written by table.py
"""

import importlib.metadata
import json
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from eagle.model import ea_model
from safetensors.torch import load_file


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    # Prompts are token ids, and texts are of equal length; besides, this transformers does not know newer tokenizers.
    ea_model.AutoTokenizer = SimpleNamespace(from_pretrained=lambda path: SimpleNamespace(eos_token_id=-1))
    with tempfile.TemporaryDirectory() as folder:  # this version reads pickled weights only
        head, exported = Path(folder), Path(job["head"])
        (head / "config.json").write_text((exported / "config.json").read_text())
        torch.save(load_file(exported / "model.safetensors"), head / "pytorch_model.bin")
        facts = {"torch_dtype": getattr(torch, job["dtype"])}
        model = ea_model.EaModel.from_pretrained(base_model_path=job["target"], ea_model_path=folder, **facts)
    model.eval()
    steps, read = [0], ea_model.tree_decoding

    def counted(*inputs):
        steps[0] += 1
        return read(*inputs)

    ea_model.tree_decoding = counted

    def decode(row: list[int]) -> list[int]:
        limit = {"max_new_tokens": job["new_tokens"] - 1, "max_length": job["max_model_len"]}
        return model.eagenerate(torch.tensor([row]), temperature=0.0, **limit)[0, len(row) :].tolist()

    decode(job["prompts"][0])
    steps[0], texts, seconds = 0, [], []
    for row in job["prompts"]:
        start = time.perf_counter()
        texts.append(decode(row))
        seconds.append(time.perf_counter() - start)
    per_forward = sum(map(len, texts)) / steps[0]  # the last step may write more than was asked for
    versions = {name: importlib.metadata.version(name) for name in ("eagle-llm", "torch", "transformers")}
    out = {"texts": texts, "seconds": seconds, "acceptance_length": per_forward, "versions": versions}
    Path(job["output"]).write_text(json.dumps(out))


if __name__ == "__main__":
    main()
