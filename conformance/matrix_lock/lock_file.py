"""Content of matrix.lock: derived cells, best first, by how much each adds per second to the cells before it."""

import heapq
import itertools
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from conformance.defects.catalogue import defects
from conformance.matrix_lock.derivation import CALIBRATION_S, derive, estimated_s
from conformance.matrix_lock.own_runs import with_own_runs
from conformance.plan.cells import Cell
from conformance.plan.content import Content, read_content
from conformance.plan.lock import PlannedCell, planned_cell
from conformance.plan.scopes import Scope, declared_scopes
from conformance.plan.selection import parse
from conformance.project import LAWS_DIRECTORY
from reference_trainer.strict_yaml import ConfigError, Document

_HEADER = """\
# Cells of {name}, best first: section, duration in seconds (~ estimated), id, laws that a profile with `own_runs: new`
# leaves out. `python -m conformance lock` writes them.
# digest {digest}
# calibration {calibration_s:.4f} s
"""
HEADER_LINES = len(_HEADER.splitlines())
_DEFECT, _OTHER_LAW, _LAW, _PAIR = 1.0, 0.05, 0.05, 0.0002
"""Weights of a defect that a cell shows, of another law to which it shows the defect, of a law that no earlier cell
has, and of a pair of values."""


Gains = Mapping[Hashable, float]
"""Weights of the properties of a cell; a property counts once, for the first cell that has it."""


def planned(
    document: Document, durations_s: Mapping[str, float], locked: Mapping[str, Sequence[Cell]]
) -> list[PlannedCell]:
    """Return the derived cells of a matrix, best first, with measured durations where they are known.

    Of `locked` cells, by section, the needed ones stay. Raises ConfigError as `derivation.derive` does.
    """
    cells = sorted(planned_cells(derive(document, locked), durations_s), key=lambda each: each.cell.id)
    gains = _gains(read_content(document), [each.cell for each in cells], declared_scopes(LAWS_DIRECTORY))
    by_id = {each.cell.id: each for each in cells}
    ordered = best_first(list(by_id), gains, {id_: each.seconds for id_, each in by_id.items()})
    return with_own_runs(document, [by_id[id_] for id_ in ordered])


def planned_cells(
    sections: Mapping[str, Sequence[Cell]], durations_s: Mapping[str, float] | None = None
) -> list[PlannedCell]:
    """Return the cells of all sections, in that order, with measured or else with estimated durations."""
    known = durations_s or {}
    return [
        PlannedCell(name, known.get(cell.id, estimated_s(cell)), cell, measured=cell.id in known)
        for name, cells in sections.items()
        for cell in cells
    ]


def lock_text(document: Document, planned: Sequence[PlannedCell]) -> str:
    """Return the content of the lock file of a matrix."""
    width = max(len(each.section) for each in planned)
    lines = [f"{each.section:<{width}} {_duration(each):>7}  {each.cell.id}{_left_out(each)}\n" for each in planned]
    digest = read_content(document).cells_digest
    return _HEADER.format(name=Path(document.path).name, digest=digest, calibration_s=CALIBRATION_S) + "".join(lines)


def _duration(planned: PlannedCell) -> str:
    return f"{'' if planned.measured else '~'}{planned.seconds:.2f}"


def _left_out(planned: PlannedCell) -> str:
    return f"  not {','.join(planned.nothing_new)}" if planned.nothing_new else ""


def read_lock(file: Path) -> list[PlannedCell]:
    """Return the cells of a lock file, also of another version of the matrix; none without a file.

    Lines whose cell no axis describes any more are left out.
    """
    cells = []
    for number, line in enumerate(file.read_text().splitlines() if file.exists() else (), 1):
        with suppress(ConfigError):
            cells.append(planned_cell(file, number, line))
    return cells


def _gains(content: Content, cells: Sequence[Cell], scopes: Mapping[str, Scope]) -> dict[str, Gains]:
    """Return the gains of each cell: laws, defects shown on the CPU, and pairs of values under a law on numbers."""
    shown = [defect for defect in defects() if "gloo" in defect.substrates]
    triggers = [(defect.id, parse(defect.cells), set(defect.laws)) for defect in shown]
    gains: dict[str, Gains] = {}
    for cell in cells:
        facts = cell.facts()
        laws = {law for law, scope in scopes.items() if scope.judges(facts)}
        gain: dict[Hashable, float] = dict.fromkeys(laws, _LAW)
        for defect, trigger, judging in triggers:
            if laws & judging and trigger.holds(facts):
                gain[defect] = _DEFECT
                gain |= dict.fromkeys(((defect, law) for law in laws & judging), _OTHER_LAW / len(judging))
        if any(scopes[law].numbers for law in laws):
            values = [(axis, facts[axis]) for axis in content.axes]
            gain |= dict.fromkeys(itertools.combinations(values, 2), _PAIR)
        gains[cell.id] = gain
    return gains


def best_first(names: Sequence[str], gains: Mapping[str, Gains], seconds: Mapping[str, float]) -> list[str]:
    """Return the names in greedy order of weight that no earlier name has, per second; ties keep their order.

    The gain of a name can only fall as others are chosen, so that a stale value is an upper bound (lazy greedy, Minoux
    1978).
    """
    seen: set[Hashable] = set()

    def rate(name: str) -> float:
        return sum(weight for property_, weight in gains[name].items() if property_ not in seen) / max(
            seconds[name], 0.01
        )

    queue = [(-rate(name), position, name) for position, name in enumerate(names)]
    heapq.heapify(queue)
    ordered = []
    while queue:
        _, position, name = heapq.heappop(queue)
        now = (-rate(name), position, name)
        if queue and now > queue[0]:
            heapq.heappush(queue, now)
            continue
        ordered.append(name)
        seen |= gains[name].keys()
    return ordered
