#!/usr/bin/env bash
# Shows that foredraft resolves into one environment with each engine and trainer that users have: by metadata only, nothing
# is installed. Prints the shared versions, or uv's reason for a conflict; fails if there is one.
#
#   bash scripts/resolve.sh [requirement ...]     needs uv; without arguments, those below
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
extras=cli,train,serve,gguf
shared="transformers|torch|tokenizers|huggingface-hub|llguidance|fastapi|starlette|datasets"
[ $# -gt 0 ] || set -- vllm==0.33.0 sglang==0.5.23 speculators==0.9.0 nemo-automodel==0.7.0
failed=()
for other in "$@"; do
    echo "== foredraft[$extras] with $other"
    # SGLang has wheels for glibc 2.34 and later only. An extra index may lack what the first one has.
    if resolved=$(printf '%s\n' "foredraft[$extras] @ file://$root" "$other" |
        uv pip compile -q --no-header --no-annotate --index-strategy unsafe-best-match \
            --python-version 3.12 --python-platform x86_64-manylinux_2_34 -); then
        grep -E "^($shared)==" <<<"$resolved" | paste -sd' '
    else
        failed+=("$other")
    fi
done
[ ${#failed[@]} -eq 0 ] || { echo "in conflict: ${failed[*]}" >&2; exit 1; }
