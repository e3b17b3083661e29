#!/usr/bin/env bash
# The environments of the client tests (tests/serving/test_clients.py): load generators and clients of OpenAI's protocol as
# their users install them. Each has its own, because their requirements differ from the project's and from each other's.
#
#   bash scripts/clients_env.sh [directory]     default .venv-clients in the repository; a second run finds them ready
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
folder=${1:-$root/.venv-clients}
base=${PYTHON:-python3}

make() { # NAME PACKAGE...
    local venv=$folder/$1 wanted="${*:2}"
    if [ "$(cat "$venv/serving.stamp" 2>/dev/null)" = "$wanted" ]; then
        echo "== $venv is ready"
        return
    fi
    echo "== making $venv with $base: $wanted"
    "$base" -m venv --clear "$venv"
    "$venv/bin/python" -m pip --disable-pip-version-check install -q "${@:2}"
    echo "$wanted" >"$venv/serving.stamp"
}

make litellm litellm==1.110.2
make langchain langchain-openai==1.7.4
make agents openai-agents==0.24.0
make outlines outlines==1.3.3 openai==3.57.0
make lm_eval 'lm_eval[api]==0.4.13' transformers==5.23.0
make guidellm guidellm==0.8.1 torch==2.13.0
