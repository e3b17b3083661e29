#!/usr/bin/env bash
# The main job from nothing: makes the environment (see env.sh), trains a draft head and measures what it gained.
# Arguments go to `foredraft demo`, e.g. `bash scripts/demo.sh head=medusa`; relative paths start at the repository.
#
#   bash scripts/demo.sh target=smollm2                         decodes with the head of scripts/smollm2
#   bash scripts/demo.sh target=smollm2 trainer.max_minutes=10  trains that head further first, for so long
set -euo pipefail
extras=train
case " $* " in *" target=smollm2 "*) shipped=yes ;; *) shipped= ;; esac
case " $* " in *" target=smollm2 "* | *.gguf\ *) extras=train,gguf ;; esac
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

started=$(mktemp)
trap 'rm -f "$started"' EXIT

# Where the results are: in output_dir=, else below outputs/; a sweep has several.
output=outputs
for argument in "$@"; do
    case $argument in output_dir=*) output=${argument#output_dir=} ;; esac
done

if [ -z "$shipped" ]; then
    say "training and measuring: foredraft demo $*"
    "$python" -m foredraft demo "$@"
else
    head=scripts/smollm2/eagle3 decoded=outputs/smollm2_decoded
    if [ $# -gt 1 ]; then
        [ "$output" != outputs ] || output=outputs/smollm2
        more=("init_from=$head" data.path=scripts/smollm2/self_written.jsonl data.tokens=0
            trainer.max_minutes=10 "output_dir=$output")
        say "training: python train/run.py ${more[*]} $*"
        "$python" train/run.py "${more[@]}" "$@"
        [ -d "$output/head" ] || exit 0 # nothing ran: --help, --cfg job
        head=$output/head decoded=$output/decoded
    fi
    decode=("drafter=[$head,$head+suffix,suffix]" prompts=scripts/smollm2/prompts.jsonl limit=0 max_new_tokens=64
        repeats=1 "temperature=[0]" rivals=false output_dir="$decoded")
    say "decoding: python scripts/evaluate.py target=smollm2 ${decode[*]}"
    "$python" scripts/evaluate.py target=smollm2 "${decode[@]}"
fi

[ -d "$output" ] || exit 0 # nothing ran: --help, --cfg job
find "$output" -name report.html -newer "$started" | sort | while read -r report; do
    say "done: the report is $report"
    [ ! -d "$(dirname "$report")/head" ] || say "the head is in $(dirname "$report")/head"
done
