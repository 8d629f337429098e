"""Scripts on the simulated device whose lines have marks, to search races in.

Their processes are forked with torch loaded, whose import would take longest; the script gives them the device.
"""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from conformance.sim.recorded import Place
from conformance.sim_runs.races import runs
from conformance.sim_runs.races.exploring import explore
from conformance.sim_runs.races.findings import Exploration, Pair
from tests.support import forked

LIMIT_S = 120.0
HEAD = """
import conformance.simulated_device
import torch

main = torch.accelerator.current_stream()
side = torch.Stream(device="sim")


def ones():
    return torch.ones(1000, device="sim")
"""
CALLS = """

for case in CASES:
    for right in (False, True):
        print(case.__name__, right, case(right), flush=True)
        torch.accelerator.synchronize()
"""


class Script:
    """Script of which each interesting line ends in a comment, its mark."""

    def __init__(self, directory: Path, source: str) -> None:
        self.file = directory / "script.py"
        self.file.write_text(HEAD + source + (CALLS if "CASES" in source else ""))

    def explore(self, schedules: int) -> Exploration:
        forking = SimpleNamespace(**{**vars(subprocess), "Popen": _ForkedScript})
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with patch.object(runs, "subprocess", forking):
            return explore([sys.executable, str(self.file)], schedules, environment=environment, limit_s=LIMIT_S)

    def mark(self, place: Place | None) -> str:
        """Return the comment of a line."""
        assert place is not None
        assert place.file == str(self.file)
        return self.file.read_text().splitlines()[place.line - 1].partition("# ")[2]

    def marks(self, pair: Pair) -> tuple[str, ...]:
        return self.mark(pair.first.program), self.mark(pair.second.program)


class _ForkedScript:
    """Forked process of a script, with the part of `subprocess.Popen` that a run uses."""

    def __init__(self, command: Sequence[str], *, stdout: Any, env: Mapping[str, str], **_: Any) -> None:
        script, output = Path(command[1]), Path(stdout.name)
        self._process = forked.start(script.stem, (), cwd=script.parent, environment=env, out=output, err=output)
        self.pid = self._process.pid

    def wait(self, limit_s: float = LIMIT_S) -> int:
        """Return the exit status, negative for a signal, or kill the process if it is late."""
        self._process.join(limit_s)
        if self._process.exitcode is None:
            self._process.kill()
            raise subprocess.TimeoutExpired(self._process.name, limit_s)
        return self._process.exitcode
