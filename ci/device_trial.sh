#!/usr/bin/env bash
# First run on a device: what teaches most in ten minutes, on a machine that has torch, one GPU, and no network.
#
#   ci/device_trial.sh OUT [WHEELS]
#
# WHEELS (default: device-wheels) is the folder that ci/device_wheels.sh has filled for this machine's Python. Everything
# is left under OUT, stage by stage, so that a trial that is cut off leaves what it had: a report and a log for each
# stage, the allocator's history of MEM-10 (records/**/snapshot-rank*.pickle), and summary.txt, which is printed at the
# end. TOTAL_S (default: 570) bounds the whole. A dry run without a device: ACCELERATOR=cpu.
#
# Exit status: 0 if every stage was as expected, 1 otherwise, 4 for wrong arguments.
set -uo pipefail
if [[ $# -lt 1 ]]; then
  echo "usage: ci/device_trial.sh OUT [WHEELS]" >&2
  exit 4
fi
mkdir -p "$1" && out=$(cd "$1" && pwd) || exit 4
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
wheels=${2:-device-wheels} python=${PYTHON:-python3} accelerator=${ACCELERATOR:-cuda}
race_status=1
[[ $accelerator == cpu ]] && race_status='0 5' # the CPU has no streams that could race, nor pinned memory
begin=$SECONDS total_s=${TOTAL_S:-570}
: >"$out/stages.tsv"

left_s() {
  echo $((total_s - (SECONDS - begin)))
}

install_wheels() { # into a folder of its own: the environment of torch stays as it is
  [[ -d $wheels ]] || return 0
  local chosen=()
  for wheel in "$wheels"/*.whl; do
    [[ $wheel == */numpy-* ]] && "$python" -c 'import numpy' 2>/dev/null && continue
    chosen+=("$wheel")
  done
  "$python" -m pip install --quiet --no-index --no-deps --upgrade --target "$out/packages" "${chosen[@]}" || return
  export PYTHONPATH="$out/packages${PYTHONPATH:+:$PYTHONPATH}"
}

stage() { # NAME LIMIT_S EXPECTED_STATUSES COMMAND...
  local name=$1 limit_s=$2 expected=$3 start=$SECONDS status
  shift 3
  ((limit_s > $(left_s) - 10)) && limit_s=$(($(left_s) - 10))
  if ((limit_s < 10)); then
    printf '%s\tnot run\t0\tno time left\n' "$name" >>"$out/stages.tsv"
    return
  fi
  echo "== $name, at most $limit_s s" >&2
  timeout --kill-after=10 "$limit_s" "$@" >"$out/$name.log" 2>&1
  status=$?
  local state="exit status $status, expected $expected"
  [[ " $expected " == *" $status "* ]] && state=expected
  [[ $status == 124 || $status == 137 ]] && state="cut off"
  printf '%s\t%s\t%s\t%s\n' "$name" "$state" "$((SECONDS - start))" "$*" >>"$out/stages.tsv"
}

session() { # NAME LIMIT_S EXPECTED_STATUSES ARGUMENTS...: a session with a report of its own
  local name=$1 limit_s=$2 expected=$3
  shift 3
  stage "$name" "$limit_s" "$expected" "$python" -m pytest -p conformance.pytest_plugin.plugin -n0 -q conformance/ \
    --accelerator "$accelerator" --profile nightly --shrink 0 --report-dir "$out/$name" "$@"
}

facts() {
  "$python" -m torch.utils.collect_env
  "$python" - <<'PYTHON'
import torch
print("NCCL", torch.cuda.nccl.version() if torch.cuda.is_available() else "not here: no device")
PYTHON
  command -v nvidia-smi >/dev/null && nvidia-smi && nvidia-smi topo -m
  return 0
}

install_wheels || echo "wheels were not installed" >>"$out/stages.tsv"
export -f facts
export python
stage environment 40 0 bash -c facts
session two-ranks 110 0 --laws 'ENV-*,PAR-1,PAR-2,PAR-5,PAR-9' \
  --cells 'id in (dp2-fp32-default-meta, dp2-bf16mp-default-meta, dp2-fp32-default-meta-integer-sgd-noclip-steps1)'
session four-ranks 130 0 --laws 'PAR-*,MP-*,CLIP-*,OFF-*' \
  --cells 'id in (dp2-tp2-fp32-default-meta, hsdp2x2-fp32-default-meta, dp2-fp32-default-meta-offloadcpu)'
session streams 100 0 --laws 'STREAM-*,MEM-10' \
  --cells 'id in (dp2-fp32-default-meta, dp2-fp32-default-meta-offloadcpu-pinned, dp2-tp2-fp32-default-meta-deep)'
if [[ $accelerator == cuda ]]; then # `replay` compares the history with the model, where torch is 2.13 or newer
  stage allocator 40 0 "$python" -m benchmarks.allocator_history record "$out/allocator_history.pickle"
fi
for race in all-reduce-buffer-released:hsdp2x2-bf16reduce-default-meta \
  offload-copy-not-awaited:dp2-fp32-default-meta-offloadcpu-pinned \
  offload-source-released:hsdp2x2-fp32-default-meta-offloadcpu; do
  session "race-${race%%:*}" 40 "$race_status" --defect "${race%%:*}" --laws STREAM-5 --cells "id = ${race#*:}"
done
rest_s=$(($(left_s) - 40))
((rest_s > 30)) && session smoke "$rest_s" 0 --profile smoke --budget "$((rest_s * 2 / 3))s"

"$python" - "$out" <<'PYTHON' | tee "$out/summary.txt"
import collections, json, pathlib, sys

out = pathlib.Path(sys.argv[1])
for line in (out / "stages.tsv").read_text().splitlines():
    name, state, seconds, *_ = [*line.split("\t"), "", ""]
    print(f"{name:<36} {state:<30} {seconds:>4} s")
    file = out / name / "report.json"
    if not file.exists():
        continue
    cases = json.loads(file.read_text())["cases"]
    counts = collections.Counter((case["substrate"], case["verdict"]) for case in cases)
    print("   ", ", ".join(f"{substrate} {verdict} {n}" for (substrate, verdict), n in sorted(counts.items())))
    for case in [case for case in cases if case["verdict"] in ("fail", "error", "crash", "timeout")][:4]:
        print("   ", case["verdict"], case["id"], (case["reason"] or "")[:110])
PYTHON
! grep -qvP '\texpected\t' "$out/stages.tsv"
