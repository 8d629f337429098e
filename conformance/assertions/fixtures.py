"""Fixtures of the laws' tests, by name of a parameter: `run`, `measure` and `cell`."""

from typing import Protocol

from conformance.plan.cells import Cell
from conformance.run.experiment import Experiment, Result
from conformance.run.record import Record


class Run(Protocol):
    """Fixture `run`: the record of a cell, which runs at most once per session.

    `repeat=1` is a second run, `tapped` one with taps on all modules.
    """

    def __call__(self, cell: Cell, *, repeat: int = 0, tapped: bool = False) -> Record:
        """See `CaseRuns.run`."""


class Measure(Protocol):
    """Fixture `measure`: the results of an experiment, by rank of a cell's world or from a single process.

    A single process runs on the CPU, or with `on_device` on the device of the cell's ranks.
    """

    def __call__(self, experiment: Experiment[Result], cell: Cell, *, on_device: bool = False) -> list[Result]:
        """See `CaseRuns.measure`."""
