"""Trainers that are judged by the laws of any trainer, in ranks of a pool."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from conformance.judge.judge import Judged, judge
from conformance.judge.registry import asserted_laws
from conformance.judge.support import Machine
from conformance.judge.verdicts import Verdict
from conformance.plan.cells import Cell
from conformance.plan.matrix import FAULT_CELLS, TRAINER_CELLS, Case
from conformance.plan.substrates import SIM
from conformance.report.schema import CaseResult
from conformance.report.trainer import FaultSeen
from conformance.run.devices.hardware import NO_DEVICES, Hardware
from conformance.run.pool import Pools
from conformance.run.store import RecordStore
from conformance.subjects.session import faults_seen
from tests.support import sample_reports

BY_ID = {cell.id: cell for cell in TRAINER_CELLS}
DP2, HSDP, TP = FAULT_CELLS
ALL_LAWS = {law_id: each for law_id, each in asserted_laws().items() if each.law.scope.of == "any trainer"}
LAWS = {law_id: each for law_id, each in ALL_LAWS.items() if each.law.substrates != SIM}
"""Laws that need no device."""


def store_of(
    pools: Pools,
    directory: Path,
    subject: str,
    *,
    limit_s: float = 60.0,
    defect: str | None = None,
    hardware: Hardware = NO_DEVICES,
) -> RecordStore:
    """Return a store for records of a subject, `MODULE:NAME`."""
    version = str(torch.__version__)
    return RecordStore(directory, "test", version, defect, limit_s, pools, hardware=hardware, subject=subject)


def machine_of(store: RecordStore) -> Machine:
    return Machine(hardware=store.hardware, torch_version=store.torch_version, max_world_size=8)


class JudgedTrainer(NamedTuple):
    """Verdicts on a trainer, and the store in which its records are."""

    name: str
    store: RecordStore
    judged: Sequence[Judged]

    def by_verdict(self, verdict: Verdict) -> set[str]:
        return {entry.case.law for entry in self.judged if entry.verdict == verdict}

    def failing(self) -> set[str]:
        return self.by_verdict(Verdict.FAIL)

    def reasons(self) -> set[str]:
        return {entry.reason for entry in self.judged if entry.verdict != Verdict.PASS}

    def verdicts(self, cell: Cell) -> set[Verdict]:
        return {entry.verdict for entry in self.judged if entry.case.cell == cell}

    def is_conformant(self) -> bool:
        return {entry.verdict for entry in self.judged} <= {Verdict.PASS, Verdict.UNSUPPORTED}

    def faults(self) -> list[FaultSeen]:
        results = [result_of(entry) for entry in self.judged]
        return list(faults_seen(self.store, results, self.name, machine=machine_of(self.store)))


def judged_trainer(
    pools: Pools,
    directory: Path,
    name: str,
    *cells: Cell,
    laws: Collection[str] = LAWS,
    limit_s: float = 60.0,
    defect: str | None = None,
    hardware: Hardware = NO_DEVICES,
) -> JudgedTrainer:
    """Judge a function of `subject_models`, or another `MODULE:NAME`, on cells, by default on two ranks."""
    subject = name if ":" in name else f"tests.support.subject_models:{name}"
    store = store_of(pools, directory, subject, limit_s=limit_s, defect=defect, hardware=hardware)
    judged = [
        judge(Case(law_id, cell, name), asserted.law, asserted.test, store, machine=machine_of(store))
        for cell in cells or (DP2,)
        for law_id, asserted in ALL_LAWS.items()
        if law_id in laws and asserted.law.scope.holds(cell)
    ]
    return JudgedTrainer(name, store, judged)


def result_of(judged: Judged) -> CaseResult:
    case = sample_reports.case(f"{judged.case.law}/{judged.case.cell.id}", judged.verdict.value, **judged.measured)
    return msgspec.structs.replace(case, id=judged.case.id, reason=judged.reason, substrate=judged.substrate)
