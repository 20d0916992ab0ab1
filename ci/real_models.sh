#!/usr/bin/env bash
# Tests with models of PaddleFormers and of Hugging Face's transformers, in a virtual environment of its own. Arguments go to pytest.
# Nothing but packages is downloaded: the models are tiny and made from scratch.
# Exit status: 0 where all is good, 1 where something is not, 2 where the environment can't be made.
#
# The PyTorch that pip finds by itself for Linux brings gigabytes for GPUs. To have the small one, put the address of PyTorch's own index
# of builds for CPU, which its installation page names, into PIP_EXTRA_INDEX_URL.
set -u
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

make_environment
cd "$project" || exit 2
if ! (install --editable '.[real-models]'); then
    echo "PaddleFormers, PyTorch, transformers or peft can't be had for $(python --version); the tests with real models did not run" >&2
    exit 2
fi

pytest real_models "$@"
status=$?
exit $((status ? 1 : 0))
