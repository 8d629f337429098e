"""Run one call of the trial; `ci/device_trial.sh` sets up the machine.

    python -m benchmarks.device_trial first|second OUT [--accelerator cuda|cpu|sim] [--total-s N]

Exit status 0 if every stage has ended as expected, 1 otherwise.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

from benchmarks.device_trial.calls import CALLS, TOTAL_S, recipe_file, stages_of
from benchmarks.device_trial.screen import pack, screen
from benchmarks.device_trial.stages import Trial

_RECIPE_VARIABLE = "TRIAL_RECIPE"
"""Variable with the recipe that the first call has printed, for the second: `NCCL_CUMEM_ENABLE=0 ...`."""


def main() -> int:
    """Run the stages, print the screen, and pack the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("call", choices=CALLS)
    parser.add_argument("out", type=Path)
    parser.add_argument("--accelerator", choices=("cuda", "cpu", "sim"), default="cuda")
    parser.add_argument("--total-s", type=float)
    options = parser.parse_args()
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # those of the machine, and the suite's own, which is named
    os.environ["PYTHONUNBUFFERED"] = "1"
    work = Path(tempfile.mkdtemp(prefix="device-trial-"))
    trial = Trial(work, options.total_s or TOTAL_S[options.call], recipe_file(work))
    given = dict(setting.split("=", 1) for setting in os.environ.get(_RECIPE_VARIABLE, "").split())
    trial.recipe.write_text(json.dumps(given))
    for stage in stages_of(options.call, accelerator=options.accelerator, work=work):
        trial.run(stage)
        print(f"{trial.outcomes[-1].name}: {trial.outcomes[-1].state}, {trial.left_s:.0f} s left", file=sys.stderr)
    (work / "screen.txt").write_text(screen(trial.outcomes, left_s=trial.left_s) + "\n")
    print((work / "screen.txt").read_text(), end="")
    pack(work, options.out, call=options.call)
    shutil.rmtree(work, ignore_errors=True)
    return int(not all(outcome.is_expected for outcome in trial.outcomes))


if __name__ == "__main__":
    sys.exit(main())
