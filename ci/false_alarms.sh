#!/usr/bin/env bash
# False alarms: repeats a profile with other weights, data and dropout. A verdict other than pass, waived and unsupported
# is a false alarm, or a fault of torch. Needs the environment that `make environment` makes, or an active one.
#
#   ci/false_alarms.sh PROFILE SEEDS [more arguments of pytest]     for example: ci/false_alarms.sh pr 20
#
# SEEDS is the number of seeds, from 1 on, or FIRST-LAST. TURN in an argument stands for 1, 2, 3 ...: with
# `--shard TURN/20`, each of twenty seeds judges another twentieth of the cells.
#
# Usual causes: a property of the workload that depends on the seed, too few steps (all fp16 steps overflow), an oracle
# that misses a cast of a newer torch, an expectation that a world of one rank cannot meet.
#
# Leaves a report for each seed in false-alarms/seed-N, prints a line for each seed and the number of alarms; exit status
# 1 for any alarm.
set -uo pipefail
if [[ $# -lt 2 || ! $2 =~ ^([0-9]+-)?[1-9][0-9]*$ ]]; then
  echo "usage: ci/false_alarms.sh PROFILE SEEDS [arguments of pytest]" >&2
  exit 4
fi
profile=$1 last=${2#*-} first=1
[[ $2 == *-* ]] && first=${2%-*}
shift 2
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
python=${PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python3)}
alarms=0
log=$(mktemp)
trap 'rm -f "$log"' EXIT
for ((seed = first; seed <= last; seed++)); do
  directory=false-alarms/seed-$seed
  "$python" -m pytest -n auto conformance/ --profile "$profile" --seed "$seed" --report-dir "$directory" -q \
    "${@//TURN/$((seed - first + 1))}" >"$log" 2>&1
  status=$?
  "$python" - "$directory/report.json" "$seed" <<'PYTHON' || cat "$log"
import json, sys
report = json.load(open(sys.argv[1]))
print(f"seed {sys.argv[2]}: {report['verdicts']} in {report['duration_s']:.0f} s", flush=True)
harmless = ("pass", "waived", "unsupported")
for case in report["cases"]:
    if case["verdict"] not in harmless:
        print(f"  {case['verdict']}: {case['id']}: {case['reason']}", flush=True)
PYTHON
  if [[ $status == 0 ]]; then
    rm -rf "$directory/records" # large, and of no use without an alarm
  else
    alarms=$((alarms + 1))
  fi
done
echo "$alarms of $((last - first + 1)) sessions raised an alarm"
[[ $alarms == 0 ]]
