#!/usr/bin/env bash
# For `git bisect run ci/judge.sh`, with the torch of the active environment, such as a build of the checkout that is
# bisected: exit status 0 conformant, 1 not conformant, 125 cannot be judged (suite error, usage, incomplete).
#
#   ci/judge.sh [arguments of pytest]        for example: ci/judge.sh --profile smoke --cells 'mesh = dp2'
#
# PYTHON names the interpreter (default: python3).
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 125
"${PYTHON:-python3}" -m pytest -n auto conformance/ "$@"
status=$?
[[ $status == 0 || $status == 1 ]] && exit "$status"
exit 125
