"""Table of the kinds of faults that no law once saw: the laws that judge each now, their cells, cost and defects.

Cells and their durations are those of the lock file, defects those of the catalogue.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tabulate import tabulate

from conformance.defects.catalogue import Signature, signatures
from conformance.findings.symptoms import Chapter, read_symptoms
from conformance.plan.content import compiled
from conformance.plan.matrix import Case, Matrix
from conformance.plan.selection import parse_laws


class Kind(NamedTuple):
    """Kind of faults, with the laws that are about it, or the cells that are."""

    name: str
    laws: str = ""
    """Ids or patterns, as `--laws` takes them."""
    cells: str = ""
    """Cells as `--cells` takes them, on which all laws count."""


KINDS = (
    Kind(
        "options of interfaces, alone and together",
        laws="API-2, API-3, TP-3, DT-4, OPT-4, OPT-5, AMP-4, CLIP-8, CKPT-8, CKPT-10",
    ),
    Kind("life cycle of a module", laws="LIFE-1"),
    Kind("time: later steps, calls and checkpoints", laws="MEM-6, PP-6, CKPT-7", cells="steps >= 12"),
    Kind("several meshes", laws="MESH-*"),
    Kind("context parallelism", laws="CP-*"),
    Kind("size", cells="model = large"),
    Kind("loud faults", laws="LOUD-1, CKPT-9"),
    Kind("operators of DTensor", laws="DT-2, DT-3"),
)
_PROFILES = ("smoke", "pr", "nightly")
_HEADERS = ("kind", "laws", "cells", "planned seconds", "defects")
_INTRODUCTION = f"""## Kinds of blind spots

Faults that were once seen by no law, by kind, with what judges them. Cells, and the seconds that matrix.lock plans for
them with all laws that they have, are those of the profiles {" / ".join(_PROFILES)}. Each defect has a benign twin;
those of cells are defects that show on such cells alone."""


def section(matrix: Matrix) -> str:
    """Return the section of docs/torch_coverage.md: a row for each kind, and one for symptoms."""
    rows = [*(_row(matrix, kind) for kind in KINDS), _symptoms_row(matrix, read_symptoms())]
    return f"{_INTRODUCTION}\n\n{tabulate(rows, headers=_HEADERS, tablefmt='github', disable_numparse=True)}\n"


def _row(matrix: Matrix, kind: Kind) -> list[str]:
    laws = parse_laws(kind.laws, matrix.laws()) if kind.laws else ()
    selected = compiled(kind.cells) if kind.cells else None

    def is_about(case: Case) -> bool:
        return case.law in laws or (selected is not None and selected(case.cell))

    def has(defect: Signature) -> bool:
        if {*laws} & {*defect.laws}:
            return True
        if selected is None or not defect.cells:
            return False
        shows = compiled(defect.cells)
        cells = [cell for cell in matrix.cells.values() if shows(cell)]
        return bool(cells) and all(map(selected, cells))

    told = [kind.laws] * bool(laws) + [f"all on `{kind.cells}`"] * bool(kind.cells)
    cases = [[case for case in matrix.cases(profile) if is_about(case)] for profile in _PROFILES]
    return [kind.name, "; ".join(told), *_cost(matrix, cases), str(sum(map(has, signatures())))]


def _symptoms_row(matrix: Matrix, chapters: Sequence[Chapter]) -> list[str]:
    """Return the row of public reports: each leads to a law, on the smallest cells that show its defect."""
    entries = [entry for chapter in chapters for entry in chapter.entries]
    by_law = [(entry.law, compiled(entry.cells)) for entry in entries]

    def commands(cases: Sequence[Case]) -> Iterator[Case]:
        return (case for case in cases if any(case.law == law and cells(case.cell) for law, cells in by_law))

    cases = [list(commands(matrix.cases(profile))) for profile in _PROFILES]
    laws = f"those of the {len(entries)} entries of [symptoms](symptoms.md)"
    return ["symptoms", laws, *_cost(matrix, cases), str(len({entry.defect for entry in entries}))]


def _cost(matrix: Matrix, cases: Sequence[Sequence[Case]]) -> list[str]:
    """Return the number of cells of each profile's cases, and their planned seconds."""
    cells = [{case.cell.id for case in each} for each in cases]
    seconds = [sum(matrix.seconds[cell] for cell in each) for each in cells]
    return [" / ".join(str(len(each)) for each in cells), " / ".join(f"{each_s:.0f}" for each_s in seconds)]
