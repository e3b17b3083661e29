#!/usr/bin/env bash
# EAGLE-3 for Gemma 4 26B-A4B, a mixture of experts, whose weights are in shards over a node.
#
# Hardware:    8 GPUs with 80 GB
# Time:        0.81 hours for 500M tokens, planned by `foredraft plan` for H100s
# Memory:      18.6 GiB on each, planned
# Acceptance:  not measured yet
# Needs:       pip install 'foredraft[train]', and own.jsonl with the target's answers (foredraft regenerate)
set -euo pipefail

foredraft plan recipe=gemma4_26b_eagle3 gpus=8
torchrun --nproc-per-node 8 train/run.py recipe=gemma4_26b_eagle3 data.path=own.jsonl
foredraft evaluate target=google/gemma-4-26B-A4B-it target.sharding=layers drafter=outputs/gemma4_26b_eagle3/head prompts=mt_bench
foredraft export checkpoint=outputs/gemma4_26b_eagle3/head format=vllm output_dir=exported
