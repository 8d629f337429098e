"""What the test of a law may ask for, by the name of a parameter: `run`, `measure` and `cell`."""

from typing import Protocol

from conformance.plan.cells import Cell
from conformance.run.experiment import Experiment, Result
from conformance.run.record import Record


class Run(Protocol):
    """Fixture `run`: the record of a cell, run at most once per session (`repeat=1`: a second time)."""

    def __call__(self, cell: Cell, *, repeat: int = 0) -> Record: ...


class Measure(Protocol):
    """Fixture `measure`: the result of an experiment on each rank of a cell's world.

    Or on the one process that does the experiment alone: on the CPU, or with `on_device` where ranks of the cell are.
    """

    def __call__(self, experiment: Experiment[Result], cell: Cell, *, on_device: bool = False) -> list[Result]: ...
