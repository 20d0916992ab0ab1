#!/usr/bin/env bash
# Feeds the readers of checkpoints with files that a fuzzer makes, each kind for some time, in a virtual environment of its own, without
# Paddle. SECONDS_EACH says for how long, by default 60.
# Exit status: 0 where a reader met every file rightly, 1 where one did not, 2 where the environment can't be made.
set -u
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

make_environment
cd "$project" || exit 2
install atheris --editable .
failed=0
for kind in header manifest metadata pickle; do
    log=$environment/$kind.log
    if (cd "$environment" && python "$project/ci/fuzz.py" "$kind" --seconds "${SECONDS_EACH:-60}") >"$log" 2>&1; then
        echo "$kind: $(grep -oP 'number_of_executed_units: *\K[0-9]+' "$log") files, no fault"
    else
        echo "$kind: FAILED"
        tail -40 "$log"
        failed=1
    fi
done
exit $failed
