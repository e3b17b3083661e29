#!/usr/bin/env bash
# Everything that must hold: makes the environment (see env.sh), then lint, format, types, style, documentation and tests.
# Arguments go to pytest, e.g. `bash scripts/test.sh -k entry`, or `-m "not serving and not conformance and not real"` for what is
# marked nightly, too. Fails if any part fails; every part runs.
#
#   bash scripts/test.sh oldest [arguments]   the tests alone, with the oldest versions that pyproject.toml admits (env.sh)
#   bash scripts/test.sh transformers==5.19.0 [arguments]   the tests alone, with that version of transformers
set -euo pipefail
case ${1:-} in
    oldest | transformers==*)
        export FOREDRAFT_VERSIONS=$1
        shift
        ;;
esac
extras=train,dev
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

failed=()
check() {
    say "$*"
    "$python" -m "$@" || failed+=("$1 ${2:-}")
}
if [ -z "${FOREDRAFT_VERSIONS:-}" ]; then
    check ruff check .
    check ruff format --check .
    check mypy
    check scripts.style_check
    NO_MKDOCS_2_WARNING=1 check mkdocs build --strict --quiet
fi
[ ${#failed[@]} -eq 0 ] || say "failed so far: ${failed[*]}"
# Two to four workers, as the machine has cores, of one thread each: threads of two torch processes would wait for each other.
# A file's tests share fixtures and stay together; the slowest files are first (tests/conftest.py). Last, so that its summary
# ends the output.
export OMP_NUM_THREADS=1
workers=$("$python" -c "import os; print(min(4, max(2, os.cpu_count() or 2)))")
check pytest -q -n "$workers" --dist loadfile --no-loadscope-reorder --durations 15 "$@"
[ ${#failed[@]} -eq 0 ]
