#!/usr/bin/env bash
# The first runs on a device, on a machine that has torch, one GPU, and no network: two calls, with thought in between.
#
#   ci/device_trial.sh first OUT [WHEELS]     facts, kernels, forks, communication, memory: 150 s
#   ci/device_trial.sh second OUT [WHEELS]    four ranks, races, cases of profile pr: 540 s
#
# Each call prints one screen of values (benchmarks/device_trial/) and leaves at most six files in OUT. WHEELS (default:
# .whl) is the folder that ci/device_wheels.sh has filled for this machine's Python; where the suite is installed, there
# need be none. If the first call names a recipe other than the suite's own variables, give it to the second:
# TRIAL_RECIPE='NCCL_CUMEM_ENABLE=0'. TOTAL_S bounds a call. A dry run without a device: ACCELERATOR=cpu or sim.
#
# Exit status: 0 if every stage was as expected, 1 otherwise, 4 for wrong arguments.
set -euo pipefail
if [[ $# -lt 2 || ! $1 =~ ^(first|second)$ ]]; then
  sed -n '4,5s/^#  *//p' "${BASH_SOURCE[0]}" >&2
  exit 4
fi
call=$1
mkdir -p "$2" && out=$(cd "$2" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/.."
wheels=${3:-.whl} python=${PYTHON:-python3} accelerator=${ACCELERATOR:-cuda}

site=$(mktemp --directory)
background=()
trap 'rm -rf "$site"; [[ ${#background[@]} == 0 ]] || kill "${background[@]}" 2>/dev/null || true' EXIT

install_wheels() { # into a separate folder: the environment of torch stays as it is, and its numpy
  local chosen=()
  for wheel in "$wheels"/*.whl; do
    [[ $wheel == */numpy-* ]] && "$python" -c 'import numpy' 2>/dev/null && continue
    chosen+=("$wheel")
  done
  "$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" \
    "${chosen[@]}"
  export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
}

if compgen -G "$wheels/*.whl" >/dev/null; then install_wheels; fi
if [[ $accelerator == cuda ]]; then
  ip link set lo up 2>/dev/null || true # ranks that share a device talk over the loopback
  # An open device keeps the driver loaded between processes; not by a process that computes, which ENV-4 would see.
  if command -v nvidia-smi >/dev/null; then
    nvidia-smi --loop=5 >/dev/null &
    background+=($!)
  fi
fi
status=0
"$python" -m benchmarks.device_trial "$call" "$out" --accelerator "$accelerator" ${TOTAL_S:+--total-s "$TOTAL_S"} ||
  status=$?
exit "$status"
