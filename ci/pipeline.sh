#!/usr/bin/env bash
# The jobs of .github/workflows/conformance.yml, for any other CI or a shell: ci/pipeline.sh JOB [i/n | DIRECTORY]
#
#   check          ruff and mypy
#   push           the suite's own tests, and profile smoke
#   changes        the defects, with their twins, that are defined in files which the commits since BASE have changed
#   pull-request   profile pr, or its i-th shard of n
#   nightly        profile nightly (or a shard), on TORCH=VERSION where that is set
#   nightly-tests  tests that are too long for each push; those of pages need Chrome with its driver, and Firefox
#   detection      every defect and its twin on the default torch: the suite must still catch the defects
#   versions       profile smoke on each of VERSIONS, and a table of laws by version
#   site           a static site in site/ of the reports by version that lie below DIRECTORY
#   cuda-build     profile smoke, and tests of ranks, on the CUDA builds of VERSIONS on a machine without a device
#   other-kernels  profile nightly (or a shard) with kernels that add in other orders, from a new seed each week
#   package        files of ci/ that run the suite elsewhere, by their linters, and a wheel in an empty environment
#   gpu            profile certify on this machine's devices: no waivers, no unsupported cases
#
# BASE is a commit, by default the one before the last. Reports are left in conformance-report/. Where
# GITHUB_STEP_SUMMARY names a file, the summaries are added to it.
# Exit status 1 if a job fails, 4 for an unknown job.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
job=${1:-} shard=${2:-}
versions=${VERSIONS:-2.6.0 2.7.1 2.8.0 2.9.1 2.10.0 2.11.0 2.12.1 2.13.0 2.14.0 2.15.0}
make=(make ${TORCH:+TORCH="$TORCH"})
status=0

conformance() { # PROFILE [ARGUMENTS]
  local arguments="${shard:+--shard $shard}${2:-}"
  "${make[@]}" conformance PROFILE="$1" ARGS="$arguments" || status=1
  summarize conformance-report/summary.md
}

summarize() { # FILE
  [[ -n ${GITHUB_STEP_SUMMARY:-} && -f $1 ]] && cat "$1" >>"$GITHUB_STEP_SUMMARY"
  return 0
}

case $job in
  check) make check || status=1 ;;
  push)
    "${make[@]}" test || status=1
    conformance smoke
    ;;
  changes)
    base=${BASE:-HEAD~1}
    if git rev-parse --quiet --verify "$base^{commit}" >/dev/null; then # not in a clone of one commit
      make environment || exit 1
      .venv/bin/python -m conformance defects --changed-since "$base" || status=1
    fi
    ;;
  pull-request) conformance pr ;;
  nightly) conformance nightly ;;
  nightly-tests)
    make environment || exit 1
    .venv/bin/python -m pytest -n 2 --dist loadfile tests/nightly \
      --ignore tests/nightly/ci --ignore tests/nightly/test_wheel.py --ignore tests/nightly/cuda_build || status=1
    ;;
  detection)
    make environment || exit 1
    .venv/bin/python -m conformance defects || status=1
    mkdir -p conformance-report && .venv/bin/python -m conformance laws >conformance-report/laws.md || status=1
    ;;
  versions)
    # shellcheck disable=SC2086 # one word for each version
    ci/run_versions.sh $versions || status=1
    summarize versions/table.md
    ;;
  site)
    make environment || exit 1
    mapfile -t reports < <(find "${shard:?directory of reports}" -path '*/versions/*' -name report.json | sort --version-sort)
    .venv/bin/python -m conformance site site "${reports[@]%/report.json}" \
      --kill-matrix docs/kill_matrix.md || status=1
    ;;
  cuda-build)
    export PYTHON=${PYTHON:-python3.12}
    for version in ${VERSIONS:-2.11.0 2.15.0}; do
      make conformance TORCH="$version" PROFILE=smoke ARGS="--report-dir conformance-report/torch-$version" || status=1
      ".venv-torch-$version/bin/python" -m pytest tests/nightly/cuda_build tests/ranks/run/ranks || status=1
      [[ ${KEEP_ENVIRONMENTS:-yes} == no ]] && rm -rf ".venv-torch-$version"
    done
    ;;
  other-kernels)
    week=$(date +%-V) orders=(ring tree)
    conformance nightly " --kernels other:${SEED:-$week} --sums ${orders[week % 2]}"
    ;;
  package)
    make environment || exit 1
    .venv/bin/python -m pytest tests/nightly/ci tests/nightly/test_wheel.py || status=1
    ci/try_wheel.sh "$(mktemp --directory)/wheel" -n auto --cells 'mesh = dp2' || status=1
    ;;
  gpu) conformance certify ;;
  *)
    sed -n '2,20s/^# \?//p' "${BASH_SOURCE[0]}" >&2
    exit 4
    ;;
esac
exit "$status"
