"""Scripts on the simulated device whose lines have marks, to search races in."""

import os
import sys
from pathlib import Path

from conformance.project import PROJECT
from conformance.sim.recorded import Place
from conformance.sim_runs.races.exploring import explore
from conformance.sim_runs.races.findings import Exploration, Pair

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
        command = [sys.executable, str(self.file)]
        environment = {**os.environ, "PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1"}
        return explore(command, schedules, environment=environment, limit_s=LIMIT_S)

    def mark(self, place: Place | None) -> str:
        """Return the comment of a line."""
        assert place is not None
        assert place.file == str(self.file)
        return self.file.read_text().splitlines()[place.line - 1].partition("# ")[2]

    def marks(self, pair: Pair) -> tuple[str, ...]:
        return self.mark(pair.first.program), self.mark(pair.second.program)
