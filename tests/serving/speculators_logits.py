"""Draft logits of a `speculators` directory, by that package's own loader. Runs in the environment of scripts/vllm_env.sh:

python speculators_logits.py DIRECTORY INPUT.safetensors OUTPUT.safetensors
"""

import sys

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel
from speculators.models.eagle3 import Eagle3SpeculatorConfig

STEPS = 3


@torch.no_grad()
def main(directory: str, source: str, output: str) -> None:
    config = Eagle3SpeculatorConfig.from_pretrained(directory)
    config.transformer_layer_config._attn_implementation = "sdpa"
    model = SpeculatorModel.from_pretrained(directory, config=config).float().eval()
    seen: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda module, args, out: seen.append(out.float().contiguous()))
    given = load_file(source)
    documents = torch.zeros_like(given["tokens"])
    model(hidden_states=given["features"], input_ids=given["tokens"], document_ids=documents, ttt_steps=STEPS)
    save_file({str(step): logits.clone() for step, logits in enumerate(seen)}, output)


if __name__ == "__main__":
    main(*sys.argv[1:])
