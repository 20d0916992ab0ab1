#!/usr/bin/env bash
# Saves 2,000 times on 2 ranks in the background, with retention, in a virtual environment of its own. Arguments go to soak.py.
set -u
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

make_environment
mkdir "$environment/source" || exit 2
for item in setup.py pyproject.toml README.md LICENSE paddle_fsdp_ckpt; do
    [[ ! -e $project/$item ]] || cp -r "$project/$item" "$environment/source/" || exit 2
done
install "$environment/source[cpu]"

cd "$environment" || exit 2
python -m paddle.distributed.launch --nproc_per_node 2 "$project/ci/soak.py" --root "$environment/root" "$@"
status=$?
grep -h 'saves:' log/workerlog.*
exit $status
