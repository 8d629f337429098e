#!/usr/bin/env bash
# Fills a folder with the wheels that the suite needs beside torch and numpy, for a machine that cannot fetch any: see
# ci/device_trial.sh. They are for Linux on x86-64, and for the Python that PYTHON_VERSION names (default: 3.12).
#
#   ci/device_wheels.sh DIRECTORY
#
# Needs PyPI, or a pip configuration that names a mirror. Prints the size; exit status 1 if a wheel is missing or the
# folder is larger than MAX_MIB (default: 40, what a loan of a machine may carry), 4 for no directory.
set -euo pipefail
if [[ $# -ne 1 ]]; then
  echo "usage: ci/device_wheels.sh DIRECTORY" >&2
  exit 4
fi
checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
version=${PYTHON_VERSION:-3.12}
mkdir -p "$1"
"$python" - "$checkout/pyproject.toml" >"$1/requirements.txt" <<'PYTHON'
import sys, tomllib
with open(sys.argv[1], "rb") as file:
    for requirement in tomllib.load(file)["project"]["dependencies"]:
        if not requirement.startswith(("torch", "numpy")):
            print(requirement)
PYTHON
"$python" -m pip download --quiet --disable-pip-version-check --only-binary :all: --implementation cp \
  --python-version "$version" --platform manylinux2014_x86_64 --platform manylinux_2_17_x86_64 \
  --platform manylinux_2_27_x86_64 --platform manylinux_2_28_x86_64 --platform manylinux_2_12_x86_64 \
  --constraint "$checkout/ci/constraints.txt" --requirement "$1/requirements.txt" --dest "$1"
size_mib=$(du --summarize --block-size=1M "$1" | cut -f1)
echo "$1: $(find "$1" -name '*.whl' | wc -l) wheels for Python $version, $size_mib MiB"
((size_mib <= ${MAX_MIB:-40}))
