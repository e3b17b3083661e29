#!/usr/bin/env bash
# EAGLE-3 for Qwen3-8B on one GPU: regenerate answers with vLLM, train, measure, export to vLLM.
#
# Hardware:    one GPU with 80 GB
# Time:        1.9 hours of training per 100M tokens, planned by `foredraft plan`; answers are not counted
# Memory:      24.1 GiB, planned
# Acceptance:  not measured yet
# Needs:       pip install 'foredraft[train,regenerate,serve]', and vLLM in a separate environment
set -euo pipefail

foredraft plan target=Qwen/Qwen3-8B head=eagle3 tokens=100000000

vllm serve Qwen/Qwen3-8B --port 8000 &
server=$!
trap 'kill $server 2>/dev/null || true' EXIT
until curl -sf http://localhost:8000/health >/dev/null; do sleep 5; done
foredraft regenerate target=Qwen/Qwen3-8B data=ultrachat endpoint=http://localhost:8000/v1 output=own.jsonl
kill $server && wait $server || true

foredraft preview target=Qwen/Qwen3-8B data=conversations data.path=own.jsonl
foredraft train target=Qwen/Qwen3-8B head=eagle3 data=conversations data.path=own.jsonl output_dir=outputs/qwen3_8b
foredraft evaluate target=Qwen/Qwen3-8B 'drafter=[outputs/qwen3_8b/head,ngram]' prompts=mt_bench
foredraft export checkpoint=outputs/qwen3_8b/head format=vllm output_dir=exported
foredraft parity checkpoint=outputs/qwen3_8b/head exported=exported
