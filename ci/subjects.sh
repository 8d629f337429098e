#!/usr/bin/env bash
# Judges third-party trainers, each in a separate environment with the packages of its extra, and tries the findings
# about them. Verdicts are written to docs/subjects/, outcomes of findings to findings/trainers/.
#
#   ci/subjects.sh [EXTRA...]        for example: ci/subjects.sh fabric accelerate      (default: all)
#
# TORCH names the version of torch (default: that of the Makefile). Exit status 1 if a verdict or an outcome is another
# than the one that was kept, and 3 if a trainer could not be judged.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
torch=${TORCH:-$(sed -n 's/^DEFAULT_TORCH := //p' Makefile)}
extras=("$@")
[[ $# == 0 ]] && mapfile -t extras < <(sed -n 's/^subject-\([a-z-]*\) = .*/\1/p' pyproject.toml)
status=0
for extra in "${extras[@]}"; do
  directory=.venv-subject-$extra
  [[ -x $directory/bin/python ]] || "${PYTHON:-python3}" -m venv "$directory" || exit 3
  "$directory/bin/python" -m pip install --quiet "torch==$torch" --editable ".[subject-$extra]" || exit 3
  "$directory/bin/python" - "$extra" <<'PYTHON' || { code=$?; ((code > status)) && status=$code; }
import json, pathlib, subprocess, sys, tomllib

extra = sys.argv[1]
known = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"]
names = [name for name in known["entry-points"]["conformance.subjects"] if f"{name}-".startswith(f"{extra}-")]
packages = {requirement.partition("==")[0] for requirement in known["optional-dependencies"][f"subject-{extra}"]}
outcomes = pathlib.Path("findings/trainers/versions.json")


def run(*arguments: str) -> int:
    return subprocess.run([sys.executable, "-m", "conformance", *arguments], stdout=subprocess.DEVNULL).returncode


def kept(name: str) -> object:
    file = pathlib.Path("docs/subjects") / f"{name}.json"
    return json.loads(file.read_text())["laws"] if file.exists() else None


status = 0
for name in names:
    before = kept(name)
    judged = run("judge", name, "--keep") in (0, 1)
    same = judged and kept(name) == before
    print(f"{name}: {'as before' if same else 'other verdicts' if judged else 'could not be judged'}", flush=True)
    status = max(status, 0 if same else 1 if judged else 3)
about = {file.stem for file in outcomes.parent.glob("*.py") for p in packages if f"\npackage: {p}\n" in file.read_text()}
before = outcomes.read_text()
if about:
    ran = run("findings", *sorted(about), "--write") == 0
    same = ran and outcomes.read_text() == before
    print(f"findings: {'as before' if same else 'other outcomes' if ran else 'failed'}", flush=True)
    status = max(status, 0 if same else 1 if ran else 3)
sys.exit(status)
PYTHON
done
exit "$status"
