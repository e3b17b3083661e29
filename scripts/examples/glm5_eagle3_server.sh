#!/usr/bin/env bash
# EAGLE-3 for GLM-5: another node serves the target, this one trains the head on the hidden states that it sends.
#
# Hardware:    8 GPUs with 80 GB for the trainer, and what the server of the target needs
# Time:        1.3 hours of the trainer for 500M tokens, planned by `foredraft plan` for H100s; the server may be slower
# Memory:      23.3 GiB on each GPU of the trainer, planned
# Acceptance:  not measured yet
# Needs:       pip install 'foredraft[train]', a vLLM server that both nodes share a disk with (docs/tutorials/hidden-states.md)
set -euo pipefail

foredraft plan recipe=glm5_eagle3 gpus=8
torchrun --nproc-per-node 8 train/run.py recipe=glm5_eagle3 data.path=own.jsonl hidden_states.url=http://SERVER:8000/v1
foredraft export checkpoint=outputs/glm5_eagle3/head format=vllm output_dir=exported gate=false
