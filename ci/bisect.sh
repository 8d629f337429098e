#!/usr/bin/env bash
# Finds the first bad release of torch: tries installable releases between a good and a bad one, each in an environment
# of its own, and halves the interval with every verdict; releases that cannot be judged are skipped.
#
#   ci/bisect.sh GOOD BAD [arguments of pytest]     for example: ci/bisect.sh 2.10.0 2.15.0 --profile smoke --cells 'id = dp2-*'
#
# VERSIONS, if set, is the list of releases (default: those that pip can install). Exit status 0 and one line with the
# first bad release; 1 if GOOD is not good or BAD is not bad; 4 for wrong usage.
set -uo pipefail
if [[ $# -lt 2 ]]; then
  echo "usage: ci/bisect.sh GOOD BAD [arguments of pytest]" >&2
  exit 4
fi
good=$1 bad=$2
shift 2
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
python=${PYTHON:-python3}

judge() { # VERSION: status 0 good, 1 bad, 125 cannot be judged
  echo "ci/bisect.sh: trying torch $1" >&2
  make environment TORCH="$1" >&2 || return 125
  local environment=.venv-torch-$1
  [[ -x $environment/bin/python ]] || environment=.venv # the default release
  PYTHON=$PWD/$environment/bin/python ci/judge.sh --report-dir "versions/$1" "${@:2}" >&2
}

available=${VERSIONS:-$("$python" -m pip index versions torch 2>/dev/null | sed -n 's/^Available versions: //p' | tr -d ,)}
mapfile -t releases < <(tr ' ' '\n' <<<"$available" | grep -E '^[0-9]+\.[0-9]+\.[0-9]+$' | sort -V |
  sed -n "/^${good//./\\.}\$/,/^${bad//./\\.}\$/p")
if [[ ${#releases[@]} -lt 2 || ${releases[-1]} != "$bad" ]]; then
  echo "ci/bisect.sh: $good and $bad must be releases that can be installed, in this order: ${available:-none found}" >&2
  exit 4
fi
low=0 high=$((${#releases[@]} - 1))
judge "$good" "$@" || { echo "torch $good is not good"; exit 1; }
judge "$bad" "$@"
[[ $? == 1 ]] || { echo "torch $bad is not bad"; exit 1; }
unjudged=()
while true; do
  # The middle of the releases that are left and not known to be unjudgeable.
  candidates=()
  for ((index = low + 1; index < high; index++)); do
    [[ " ${unjudged[*]-} " == *" $index "* ]] || candidates+=("$index")
  done
  [[ ${#candidates[@]} -gt 0 ]] || break
  middle=${candidates[$((${#candidates[@]} / 2))]}
  judge "${releases[middle]}" "$@"
  case $? in
    0) low=$middle ;;
    1) high=$middle ;;
    *) unjudged+=("$middle") ;;
  esac
done
if [[ $((high - low)) == 1 ]]; then
  echo "first bad release: ${releases[high]}"
else
  echo "first bad release: one of ${releases[*]:low+1:high-low}; those before ${releases[high]} cannot be judged"
fi
