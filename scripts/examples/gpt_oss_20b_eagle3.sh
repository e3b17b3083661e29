#!/usr/bin/env bash
# EAGLE-3 for gpt-oss-20b on a node of 8 GPUs, by its recipe.
#
# Hardware:    8 GPUs with 80 GB
# Time:        0.70 hours for 500M tokens, planned by `foredraft plan` for H100s
# Memory:      21.4 GiB on each, planned
# Acceptance:  not measured yet
# Needs:       pip install 'foredraft[train]', and own.jsonl with the target's answers (foredraft regenerate)
set -euo pipefail

foredraft plan recipe=gpt_oss_20b_eagle3 gpus=8
torchrun --nproc-per-node 8 train/run.py recipe=gpt_oss_20b_eagle3 data.path=own.jsonl
foredraft evaluate target=openai/gpt-oss-20b drafter=outputs/gpt_oss_20b_eagle3/head prompts=mt_bench
foredraft export checkpoint=outputs/gpt_oss_20b_eagle3/head format=sglang output_dir=exported
