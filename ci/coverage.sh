#!/usr/bin/env bash
# Line coverage of conformance/ and reference_trainer/ by the suite's own tests, ranks and sub-processes included. Needs
# the environment that `make environment` makes. Prints a table; files are left in .coverage-data.
#
#   ci/coverage.sh [arguments of pytest]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python3)}
"$python" -m coverage --version >/dev/null 2>&1 || "$python" -m pip install --quiet coverage
rm -rf .coverage-data && mkdir .coverage-data
cat >.coverage-data/rc <<RC
[run]
source = conformance, reference_trainer
data_file = $PWD/.coverage-data/data
parallel = true
sigterm = true
patch = subprocess, fork, _exit
[report]
format = markdown
exclude_also =
    if TYPE_CHECKING:
    \.\.\.
RC
export COVERAGE_PROCESS_START="$PWD/.coverage-data/rc" COVERAGE_RCFILE="$PWD/.coverage-data/rc"
PYTHONPATH="$PWD/ci/coverage${PYTHONPATH:+:$PYTHONPATH}" "$python" -m pytest -n 2 --dist loadfile tests/ "$@" || echo "some tests failed"
"$python" -m coverage combine --quiet
"$python" -m coverage report --sort=cover
