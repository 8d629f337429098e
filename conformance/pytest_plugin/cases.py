"""Cases of a session: shards, cells named by id, the order in which cases run, and commands that repeat them."""

import re
import shlex
import shutil
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance.plan.cells import Cell, cell_from_id
from conformance.plan.matrix import TRAINER_CELLS, Case, Matrix, is_trainer_cell
from conformance.plan.mesh import AxisError
from conformance.project import LAWS_DIRECTORY, module_of
from conformance.report.causes import causal_position
from reference_trainer.checks import UsageError

FIRST_LAWS = ("ENV-1", "ENV-2", "ENV-3", "ENV-4")
"""Preconditions, judged first, on few cells."""
_TRAINER_IDS = f": {', '.join(cell.id for cell in TRAINER_CELLS)}"
_REPORT_DIRECTORY = "conformance-report-repro"  # repeating a case must not overwrite the report that it is in


@dataclass(frozen=True)
class Shard:
    """Shard number `index`, counted from 1, of the `count` shards of a profile: `--shard I/N`."""

    index: int
    count: int

    def of(self, cases: Sequence[Case]) -> tuple[Case, ...]:
        """Return the cases of each `count`-th cell.

        All cases of a cell stay together, since they share its run; similar cells, which are neighbours in the matrix,
        are spread over the shards. Raises UsageError if there are fewer cells than shards.
        """
        cells = dict.fromkeys(case.cell.id for case in cases)
        if cells and self.count > len(cells):
            selected = "1 cell is" if len(cells) == 1 else f"{len(cells)} cells are"
            raise UsageError(f"--shard {self.index}/{self.count}: {selected} selected; ask for fewer shards")
        chosen = {cell for position, cell in enumerate(cells) if position % self.count == self.index - 1}
        return tuple(case for case in cases if case.cell.id in chosen)


def parse_shard(text: str) -> Shard:
    """Return the second of five shards for `2/5`. Raises UsageError for any other form."""
    match = re.fullmatch(r"([1-9][0-9]{0,5})/([1-9][0-9]{0,5})", text)
    if match is None or int(match[1]) > int(match[2]):
        raise UsageError(f"--shard {text}: write I/N with 1 <= I <= N, such as 2/5")
    return Shard(int(match[1]), int(match[2]))


def cases_of(cell_id: str, matrix: Matrix, *, seed: int = 0, trainer: str | None = None) -> tuple[Case, ...]:
    """Return the cases of all laws on the cell with this id, in the matrix or not; none for no id.

    The seed of the cell is increased by `seed`. `--cells` takes such an id, which may be a result of shrinking. Raises
    UsageError for a cell that a rule of the matrix excludes, or that another trainer cannot be asked for.
    """
    try:
        cell = cell_from_id(cell_id.strip())
    except AxisError:
        return ()
    rule = matrix.content.exclusion_of(cell)
    if rule is not None:
        raise UsageError(f"--cells {cell_id}: cells with {rule.when} cannot be: {rule.reason}")
    if trainer is not None and not is_trainer_cell(cell):
        raise UsageError(f"--cells {cell_id}: other trainers have the options of these cells alone{_TRAINER_IDS}")
    return tuple(case.on(cell.but(seed=cell.seed + seed)) for case in matrix.cases_on(cell, trainer=trainer))


def dealt_position(cell: int, case: int, *, workers: int) -> tuple[int, int, int]:
    """Return the sort key of a case by its number in its cell, and by the number of the cell among all cells.

    Cases of as many cells alternate as there are workers. If cases of one cell followed each other, workers would wait
    for the one that runs the cell.
    """
    return cell // workers, case, cell % workers


class RunOrder:
    """Order of cases: preconditions first, then cells by their seconds in the lock file of the matrix, longest first.

    One worker, and workers that share devices, keep cells of a world together, the widest first: ranks are started
    anew less often. `kind` groups cells whose ranks can be the same processes. Several workers on processors alternate
    between as many cells, of any world, so that they wait for each other less, and end together: see
    `benchmarks.schedule`. Laws of any trainer come in the order of causes.
    """

    def __init__(
        self,
        cases: Iterable[Case],
        seconds: Mapping[str, float],
        *,
        kind: Callable[[Cell], str] | None = None,
        workers: int = 1,
    ) -> None:
        self._kind, self._workers = kind, workers
        laws = defaultdict[str, list[str]](list)
        for case in cases:
            laws[case.cell.id].append(case.law)
        longest_first = sorted(laws, key=lambda cell: -seconds.get(cell, 0.0))
        self._rank = {cell: rank for rank, cell in enumerate(longest_first)}
        self._number = {
            (cell, law): number
            for cell, judging in laws.items()
            for number, law in enumerate(sorted(judging, key=_law_position))
        }

    def key(self, case: Case | None) -> tuple[Any, ...]:
        """Return the sort key of a case; None, an item that is no case, comes last."""
        if case is None:
            return (2,)
        return int(case.law not in FIRST_LAWS), *self._place(case)

    def _place(self, case: Case) -> tuple[Any, ...]:
        cell = case.cell
        rank, number = self._rank[cell.id], self._number[cell.id, case.law]
        if self._workers > 1 and self._kind is None:
            return dealt_position(rank, number, workers=self._workers)
        return -cell.world_size, cell.mesh, self._kind(cell) if self._kind else "", rank, number


def _law_position(law: str) -> tuple[int, str]:
    return causal_position(law), law


def repeat_command(path: Path, name: str, options: Sequence[str], *, directory: Path) -> str:
    """Return the command that repeats a case in a shell, given the path of its file and its name there.

    `directory` is that in which the session was started. The node id would not do: outside of pytest's rootdir, as in
    a wheel, it does not lead to the file.
    """
    test = _test_argument(path.resolve(), name, directory=directory)
    return shlex.join([*_pytest(directory), "-n0", *options, f"--report-dir={_REPORT_DIRECTORY}", *test])


def _pytest(directory: Path) -> list[str]:
    """Return `pytest`, or the interpreter with `-m pytest` where the shell would find none or that of another one."""
    interpreter = Path(sys.executable)
    found = shutil.which("pytest")
    if found and Path(found).parent == interpreter.parent:
        return ["pytest"]
    below = interpreter.is_relative_to(directory)
    return [str(interpreter.relative_to(directory) if below else interpreter), "-m", "pytest"]


def _test_argument(path: Path, name: str, *, directory: Path) -> list[str]:
    if path.is_relative_to(directory):
        return [f"{path.relative_to(directory)}::{name}"]
    if path.is_relative_to(LAWS_DIRECTORY):
        return ["--pyargs", f"{module_of(path)}::{name}"]
    return [f"{path}::{name}"]
