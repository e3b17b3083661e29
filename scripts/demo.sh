#!/usr/bin/env bash
# The main job from nothing: makes the environment (see env.sh), trains a draft head and measures what it gained.
# Arguments go to train/run.py, e.g. `bash scripts/demo.sh head=medusa`; relative paths start at the repository.
set -euo pipefail
extras=train
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

started=$(mktemp)
trap 'rm -f "$started"' EXIT

say "training and measuring: python train/run.py $*"
"$python" train/run.py "$@"

# Where the results are: in output_dir=, else below outputs/; a sweep has several.
output=outputs
for argument in "$@"; do
    case $argument in output_dir=*) output=${argument#output_dir=} ;; esac
done
[ -d "$output" ] || exit 0 # nothing ran: --help, --cfg job
find "$output" -name report.html -newer "$started" | sort | while read -r report; do
    say "done: the report is $report, the head is in $(dirname "$report")/head"
done
