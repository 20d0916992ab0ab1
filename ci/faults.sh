#!/usr/bin/env bash
# The long run of the fault injection, in a virtual environment of its own: 200 saves killed at random moments, 1,000 flipped bits,
# 100 truncations; as root also a full and a read-only file system. Arguments go to tests/faults/long_run.py (try --help).
# Exit status: 0 where every fault was met rightly, 1 where one was not, 2 where the environment can't be made.
set -u
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

make_environment
cd "$project" || exit 2
install --editable '.[dev]'
PYTHONPATH=.:tests python tests/faults/long_run.py "$@"
