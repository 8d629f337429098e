#!/usr/bin/env bash
# Runs a profile on several versions of torch, each in a separate environment, and writes a table of laws by version and
# a site.
#
#   ci/run_versions.sh VERSION...              for example: ci/run_versions.sh 2.6.0 2.13.0 2.15.0
#
# PROFILE (default: smoke), ACCELERATORS (default: auto; "auto sim" runs each version twice) and ARGS (more arguments of
# pytest) are taken from the environment. With KEEP_ENVIRONMENTS=no
# each environment, of several GB, is removed before the next is made. Reports, with their records, are left in
# versions/VERSION (or VERSION-ACCELERATOR), the table in versions/table.md, the site in versions/site. A version whose environment cannot be made, or whose session leaves
# no report, is named and left out of the table. Exit status 1 if a session was not conformant or a version is left out;
# 4 for no version at all.
set -uo pipefail
if [[ $# -eq 0 ]]; then
  echo "usage: ci/run_versions.sh VERSION..." >&2
  exit 4
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
profile=${PROFILE:-smoke}
status=0
reports=() others=()
last=
for version in "$@"; do
  [[ ${KEEP_ENVIRONMENTS:-yes} == no && -n $last ]] && rm -rf ".venv-torch-$last"
  last=$version
  for accelerator in ${ACCELERATORS:-auto}; do
    directory=versions/$version
    [[ $accelerator == auto ]] || directory+=-$accelerator
    arguments="--report-dir $directory --accelerator $accelerator ${ARGS:-}"
    make conformance TORCH="$version" PROFILE="$profile" ARGS="$arguments" || status=1
    if [[ ! -f $directory/report.json ]]; then
      echo "ci/run_versions.sh: torch $version has left no report of $accelerator" >&2
      status=1
    elif [[ $accelerator == auto ]]; then
      reports+=("$directory")
    else
      others+=("$directory")
    fi
  done
done
python=${PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo ".venv-torch-$last/bin/python")}
[[ ${#reports[@]} -gt 0 ]] && "$python" -m conformance versions "${reports[@]}" | tee versions/table.md
[[ ${#reports[@]} -gt 0 ]] && "$python" -m conformance site versions/site "${reports[@]}" "${others[@]}"
exit "$status"
