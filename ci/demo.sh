#!/usr/bin/env bash
# Runs the demo on CPU, in a virtual environment of its own. Arguments go to the demo, see --help.
set -u
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

make_environment
# A copy, so that no build folder is left in the project, and none left there earlier gets in.
mkdir "$environment/source" || exit 2
for item in setup.py pyproject.toml README.md LICENSE paddle_fsdp_ckpt; do
    [[ ! -e $project/$item ]] || cp -r "$project/$item" "$environment/source/" || exit 2
done
install "$environment/source[cpu]"

python -m paddle_fsdp_ckpt.demo "$@"
