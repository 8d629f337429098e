"""Trainers of the tests, judged without a session of pytest: each law on each cell, and the faults that laws see."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from conformance.judge.judge import Judged, judge
from conformance.judge.registry import asserted_laws
from conformance.judge.support import Machine
from conformance.judge.verdicts import Verdict
from conformance.plan.cells import Cell
from conformance.plan.matrix import FAULT_CELLS, TRAINER_CELLS, Case
from conformance.report.schema import CaseResult
from conformance.report.trainer import FaultSeen
from conformance.run.pool import Pools
from conformance.run.store import RecordStore
from conformance.subjects.session import faults_seen

BY_ID = {cell.id: cell for cell in TRAINER_CELLS}
DP2, HSDP, TP = FAULT_CELLS
LAWS = {law_id: asserted for law_id, asserted in asserted_laws().items() if asserted.law.scope.of == "any trainer"}


class JudgedTrainer(NamedTuple):
    """Verdicts on a trainer, and the store in which its records are."""

    name: str
    store: RecordStore
    judged: Sequence[Judged]

    def failing(self) -> set[str]:
        return {entry.case.law for entry in self.judged if entry.verdict == Verdict.FAIL}

    def reasons(self) -> set[str]:
        return {entry.reason for entry in self.judged if entry.verdict != Verdict.PASS}

    def verdicts(self, cell: Cell) -> set[Verdict]:
        return {entry.verdict for entry in self.judged if entry.case.cell == cell}

    def is_conformant(self) -> bool:
        return {entry.verdict for entry in self.judged} <= {Verdict.PASS, Verdict.UNSUPPORTED} and not self.failing()

    def faults(self) -> list[FaultSeen]:
        results = [result_of(entry) for entry in self.judged]
        return list(faults_seen(self.store, results, self.name, machine=machine(self.store)))


def machine(store: RecordStore) -> Machine:
    return Machine(hardware=store.hardware, torch_version=store.torch_version, max_world_size=8)


def judged_trainer(pools: Pools, directory: Path, name: str, *cells: Cell, limit_s: float = 60.0) -> JudgedTrainer:
    """Judge a subject of `tests.support` on cells, by default on two data-parallel ranks, or one of another module."""
    known = name if name.startswith("conformance.") else f"tests.support.{name}"
    subject = known if ":" in known else f"tests.support.subject_models:{name}"
    store = RecordStore(directory, "test", str(torch.__version__), None, limit_s, pools, subject=subject)
    judged = [
        judge(case, asserted.law, asserted.test, store, machine=machine(store))
        for cell in cells or (DP2,)
        for asserted in LAWS.values()
        if asserted.law.scope.holds(cell) and (case := Case(asserted.law.id, cell, name))
    ]
    return JudgedTrainer(name, store, judged)


def result_of(judged: Judged) -> CaseResult:
    return CaseResult(
        id=judged.case.id,
        law=judged.case.law,
        must="",
        cell=judged.case.cell.id,
        substrate=judged.substrate,
        verdict=judged.verdict.value,
        reason=judged.reason,
        duration_s=0.0,
        wait_s=judged.wait_s,
        run_s=judged.run_s,
        measured=judged.measured,
        repro="",
        nodeid="",
    )
