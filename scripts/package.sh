#!/usr/bin/env bash
# The files of a release: a source distribution, and a wheel that is built from it. Both are checked, each is installed into a
# separate environment, and `foredraft --version` and `foredraft env` have to run there, outside of the checkout.
#
#   bash scripts/package.sh DIRECTORY [VERSION]     VERSION: what `foredraft --version` has to print, e.g. that of a tag
#
# The packages of the checkout are links (foredraft/heads -> ../heads), which neither file has: a wheel from the source
# distribution shows that both are complete.
set -euo pipefail
mkdir -p "$1"
output=$(cd "$1" && pwd) version=${2:-}
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"${PYTHON:-python3}" -m venv "$scratch/build"
"$scratch/build/bin/python" -m pip install -q --disable-pip-version-check build twine
"$scratch/build/bin/python" -m build --outdir "$output" .
"$scratch/build/bin/python" -m twine check --strict "$output"/*
for file in "$output"/foredraft-*.tar.gz "$output"/foredraft-*.whl; do
    echo "== installing $(basename "$file")"
    "${PYTHON:-python3}" -m venv --clear "$scratch/user"
    (
        cd "$scratch"
        unset PYTHONPATH
        "$scratch/user/bin/python" -m pip install -q --disable-pip-version-check -c "$root/constraints.txt" "foredraft[cli] @ file://$file"
        printed=$("$scratch/user/bin/foredraft" --version)
        [ -z "$version" ] || [ "$printed" = "foredraft $version" ] || { echo "error: $printed is not version $version" >&2; exit 1; }
        echo "$printed"
        "$scratch/user/bin/foredraft" env
    )
done
