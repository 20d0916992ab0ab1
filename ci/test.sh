#!/usr/bin/env bash
# Checks everything, in a virtual environment of its own: ruff, mypy, then the tests. Arguments go to pytest.
# Exit status: 0 where all is good, 1 where something is not, 2 where the environment can't be made.
set -u
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

make_environment
cd "$project" || exit 2
install --editable '.[dev]'

failed=()
check() {
    echo
    echo "== $*"
    "$@" || failed+=("$*")
}

check ruff check .
check ruff format --check .
check mypy --no-error-summary
# Two tests at a time: many have one process only, or ranks that wait for each other.
check pytest --numprocesses 2 --dist loadfile "$@"

if ((${#failed[@]})); then
    printf 'FAILED: %s\n' "${failed[@]}" >&2
    exit 1
fi
