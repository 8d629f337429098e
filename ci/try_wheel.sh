#!/usr/bin/env bash
# Installs the suite as other projects do, a wheel in an empty environment, and uses it in a directory that is no
# checkout. Needs PyPI, or a pip configuration that names a mirror.
#
#   ci/try_wheel.sh DIRECTORY [arguments of pytest]     for example: ci/try_wheel.sh /tmp/try --cells 'mesh = dp2'
#
# TORCH (default: the Makefile's) and PYTHON (default: python3) are taken from the environment. DIRECTORY must not exist.
# Exit status: that of pytest; 4 for a directory that exists, or none.
set -euo pipefail
if [[ $# -eq 0 || -e $1 ]]; then
  echo "usage: ci/try_wheel.sh DIRECTORY [arguments of pytest], with a DIRECTORY that does not exist" >&2
  exit 4
fi
checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
torch=${TORCH:-$(sed -n 's/^DEFAULT_TORCH := //p' "$checkout/Makefile")}
mkdir -p "$1/elsewhere"
directory=$(cd "$1" && pwd)
shift
"${PYTHON:-python3}" -m venv "$directory/builder"
"$directory/builder/bin/python" -m pip install --quiet build
"$directory/builder/bin/python" -m build --outdir "$directory" "$checkout" >"$directory/build.log"
"${PYTHON:-python3}" -m venv "$directory/env"
"$directory/env/bin/python" -m pip install --quiet "torch==$torch" "$directory"/*.whl
export PATH="$directory/env/bin:$PATH"
cd "$directory/elsewhere"
set -x
conformance list --profile smoke | grep '^profile'
conformance show PAR-1
conformance predict --model llama3-8b --mesh dp8
conformance --print-completion bash | bash -n
pytest --pyargs conformance.laws --profile smoke "$@"
