#!/usr/bin/env bash
# EAGLE-3 for SmolLM2-135M-Instruct without a GPU and without a data set: the model writes its own conversations.
#
# Hardware:    two CPU cores, 4 GB of memory (measured on an AMD EPYC with AVX512_BF16, 2026-11-24)
# Time:        about 2 hours of writing text (280,000 tokens at 60 tokens/s), 70 minutes of training on one core
# Acceptance:  2.44 tokens per forward at T=0 on held-out conversations (tree of 32), 1.41 on Spec-Bench with tree=auto
# Needs:       pip install 'foredraft[train,gguf]'
set -euo pipefail

foredraft train target=smollm2 head=eagle3 data=self data.tokens=280000 max_length=1024 head.draft_vocab_size=8192 \
    trainer.num_train_epochs=5 output_dir=outputs/smollm2_eagle3
foredraft evaluate target=smollm2 'drafter=[outputs/smollm2_eagle3/head,suffix]' prompts=mt_bench
foredraft export checkpoint=outputs/smollm2_eagle3/head target=smollm2 format=gguf output_dir=outputs/smollm2_gguf
foredraft chat target=smollm2 drafter=outputs/smollm2_eagle3/head+suffix color=true
