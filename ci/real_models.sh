#!/usr/bin/env bash
# Tests with models of PaddleFormers and of Hugging Face's transformers, in a virtual environment of its own. Arguments go to pytest.
# Nothing is downloaded but packages: the models are tiny and made from scratch.
# Exit status: 0 where all is good, 1 where something is not, 2 where the environment can't be made.
set -u
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

make_environment
cd "$project" || exit 2
# Where pip's index has PyTorch for GPUs only (PyPI's takes gigabytes), name the index of its CPU builds, as pip's variables do:
# PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu bash ci/real_models.sh
install --editable '.[real-models]'

echo
echo "== pytest real_models $*"
pytest real_models "$@"
status=$?
exit $((status > 1 ? 1 : status))
