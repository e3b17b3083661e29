#!/usr/bin/env bash
# The environment of eagle_worker.py: EAGLE's own package, and the transformers of its time.
#
#   bash scripts/bench/rivals/eagle_env.sh [directory]        default .venv-eagle in the repository
#
# The package is installed without its dependencies, of which its decoding needs these alone.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
venv=${1:-$root/.venv-eagle}
"${PYTHON:-python3}" -m venv --clear "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
pip install -q torch==2.13.0 transformers==4.40.2 accelerate==0.30.1 sentencepiece protobuf 'numpy<2'
pip install -q --no-deps eagle-llm==1.2.1
"$venv/bin/python" -c 'from eagle.model.ea_model import EaModel; print("==", EaModel.__module__, "is ready")'
