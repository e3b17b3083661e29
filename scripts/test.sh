#!/usr/bin/env bash
# Everything that must hold: makes the environment (see env.sh), then lint, format, types and tests.
# Arguments go to pytest, e.g. `bash scripts/test.sh -k entry`, or `-m "not serving and not conformance and not real"` for what is
# marked nightly, too. Fails if any part fails; every part runs.
#
#   bash scripts/test.sh oldest [arguments]   the tests alone, with the oldest versions that pyproject.toml admits (env.sh)
set -euo pipefail
if [ "${1:-}" = oldest ]; then
    export FOREDRAFT_VERSIONS=oldest
    shift
fi
extras=train,dev
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

failed=()
check() {
    say "$*"
    "$python" -m "$@" || failed+=("$1 ${2:-}")
}
if [ "${FOREDRAFT_VERSIONS:-}" != oldest ]; then
    check ruff check .
    check ruff format --check .
    check mypy
fi
[ ${#failed[@]} -eq 0 ] || say "failed so far: ${failed[*]}"
# Two workers, of one thread each: threads of two torch processes would wait for each other. A file's tests share fixtures and
# stay together; the slowest files are first (tests/conftest.py). Last, so that its summary ends the output.
export OMP_NUM_THREADS=1
check pytest -q -n 2 --dist loadfile --no-loadscope-reorder --durations 15 "$@"
[ ${#failed[@]} -eq 0 ]
