#!/usr/bin/env bash
# Prepare a Python environment for the suite; `make` calls this before each target that needs one.
#
#   PYTHON=python3 bash ci/setup_env.sh DIRECTORY TORCH [constraints of this torch]
#       a virtual environment in DIRECTORY, with torch==TORCH and the versions of ci/constraints.txt
#   PYTHON=python3 bash ci/setup_env.sh none
#       the environment of PYTHON itself: adds missing packages, and never changes its torch
#
# A stamp with the fingerprint of all inputs is written last: while the stamp is current, nothing is done.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON=${PYTHON:-python3}
target=$1
torch=${2:-}
torch_constraints=${3:-}
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

fail() {
    echo "ci/setup_env.sh: $*" >&2
    exit 1
}

fingerprint() { # of the files that decide what is installed, and of the arguments
    { echo "$@"; pwd; cat pyproject.toml ci/constraints*.txt ci/setup_env.sh; } | cksum
}

is_current() {
    [[ -f $stamp && $(<"$stamp") == "$inputs" ]] && { [[ $target == none ]] || [[ -x $target/bin/python ]]; }
}

require_python() {
    command -v "$PYTHON" >/dev/null || fail "no $PYTHON here: install Python >= 3.11, or name it with PYTHON=..."
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        fail "Python >= 3.11 is needed, $PYTHON is $("$PYTHON" --version 2>&1): name another with PYTHON=..."
}

torch_version() { # from the metadata: importing torch takes seconds
    "$PYTHON" -c 'import importlib.metadata as m; print(m.version("torch"))' 2>/dev/null
}

install_into_new_environment() {
    # Its scripts name the directory in which it was made: in a checkout that was moved or copied, make it again.
    if ! grep -qF "$(pwd -P)/$target/bin/python" "$target/bin/pip" 2>/dev/null ||
        ! "$target/bin/python" -c 'import pip' 2>/dev/null; then
        require_python
        "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null ||
            fail "$PYTHON has no venv and ensurepip (Debian: package python3-venv); VENV=none uses an active environment"
        "$PYTHON" -m venv --clear "$target"
    fi
    echo "ci/setup_env.sh: installing torch $torch and the pinned dependencies into $target" >&2
    local pins=(--constraint ci/constraints.txt ${torch_constraints:+--constraint "$torch_constraints"})
    # setuptools first: with it here, the suite is built without fetching another, unpinned one.
    "$target/bin/python" -m pip install "${pins[@]}" setuptools "torch==$torch"
    "$target/bin/python" -m pip install "${pins[@]}" "torch==$torch" --no-build-isolation --editable '.[dev,float8]'
}

install_into_active_environment() {
    "$PYTHON" -m pip --version >/dev/null 2>&1 || fail "$PYTHON has no pip: VENV=none needs it to add what is missing"
    echo "ci/setup_env.sh: adding what is missing to the environment of $PYTHON, keeping its torch $torch" >&2
    local constraint=build/active-environment.constraint
    mkdir -p build
    echo "torch==$torch" >"$constraint"
    "$PYTHON" -m pip install --constraint "$constraint" --editable '.[dev,float8]'
    [[ $(torch_version) == "$torch" ]] || fail "pip changed torch from $torch to $(torch_version)"
}

if [[ $target == none ]]; then
    require_python
    torch=$(torch_version) || fail "VENV=none: $PYTHON has no torch; install it, or leave out VENV=none"
    stamp=build/active-environment.stamp
    inputs=$(fingerprint none "$torch" "$("$PYTHON" -c 'import sys; print(sys.prefix)')")
else
    stamp=$target/installed.stamp
    inputs=$(fingerprint "$target" "$torch" "$torch_constraints")
fi
if is_current; then
    exit 0
fi

rm -f "$stamp"
if [[ $target == none ]]; then
    install_into_active_environment
else
    install_into_new_environment
fi
mkdir -p "$(dirname "$stamp")"
echo "$inputs" >"$stamp.part"
mv "$stamp.part" "$stamp"
