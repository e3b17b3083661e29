#!/usr/bin/env bash
# Fine-tune the multi-token-prediction layer that Qwen3.5-9B ships, on its own answers, and write it back into its checkpoint.
#
# Hardware:    one GPU with 80 GB
# Time:        planned by `foredraft plan`, which the first command prints
# Acceptance:  not measured yet
# Needs:       pip install 'foredraft[train]', and the target's weights on disk
set -euo pipefail

foredraft plan target=Qwen/Qwen3.5-9B head=mtp tokens=100000000
foredraft train target=Qwen/Qwen3.5-9B head=mtp data=self data.tokens=20000000 output_dir=outputs/qwen35_9b_mtp
foredraft evaluate target=Qwen/Qwen3.5-9B drafter=outputs/qwen35_9b_mtp/head prompts=mt_bench
foredraft export checkpoint=outputs/qwen35_9b_mtp/head format=mtp output_dir=exported
vllm serve exported --speculative-config '{"method": "mtp", "num_speculative_tokens": 3}'
