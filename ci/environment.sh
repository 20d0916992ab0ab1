# Sourced by the scripts beside it: makes a fresh virtual environment in a temporary folder, which goes when the script ends.
#
# PYTHON names the interpreter; by default the first suitable one on the path.

project=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

suitable() {
    "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' >/dev/null 2>&1
}

find_python() {
    local candidate
    if [[ -n ${PYTHON:-} ]]; then
        suitable "$PYTHON" && echo "$PYTHON" && return
        echo "PYTHON=$PYTHON is not a Python 3.10, 3.11 or 3.12" >&2
        return 1
    fi
    for candidate in python3.11 python3.12 python3.10 python3; do
        suitable "$candidate" && echo "$candidate" && return
    done
    echo "no Python 3.10, 3.11 or 3.12 found: install one, or name it: PYTHON=/path/to/python bash $0" >&2
    return 1
}

# make_environment: puts a fresh environment first on the path; its folder is $environment.
make_environment() {
    local python
    python=$(find_python) || exit 2
    environment=$(mktemp -d) || exit 2
    trap 'rm -rf "$environment"' EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
    echo "Making a virtual environment with $("$python" --version) ..."
    if ! "$python" -m venv "$environment/venv"; then
        echo "could not make a virtual environment; on Debian and Ubuntu, install python3-venv first" >&2
        exit 2
    fi
    unset PYTHONPATH PYTHONHOME
    export VIRTUAL_ENV=$environment/venv PATH=$environment/venv/bin:$PATH
}

# install ARGUMENTS: what pip installs, quietly; ends the script where it can't.
install() {
    echo "Installing (PaddlePaddle is large) ..."
    if ! python -m pip install --quiet --disable-pip-version-check "$@"; then
        echo "pip install failed" >&2
        exit 2
    fi
}
