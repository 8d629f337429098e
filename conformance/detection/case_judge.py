"""Cases of the matrix judged in this process, without pytest, with a defect or without."""

import itertools
from collections.abc import Container, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec
import torch

from conformance.defects.catalogue import is_known
from conformance.judge.judge import Judged, judge
from conformance.judge.registry import asserted_laws
from conformance.judge.support import Machine
from conformance.judge.waivers import Waiver, load_waivers
from conformance.numerics.arithmetic import OWN, Arithmetic
from conformance.plan.content import compiled
from conformance.plan.matrix import Case, Matrix, load_matrix
from conformance.project import data_file
from conformance.run.devices.hardware import NO_DEVICES, Hardware, find_hardware
from conformance.run.devices.nvml import machine_devices
from conformance.run.pool import Pools
from conformance.run.store import RecordStore

DEADLINE_S = 60.0
TRAINER = "reference"
"""Name of the trainer before which laws of any trainer prove that they can fail."""
TRAINER_OF_TURNS = "conformance.detection.adversaries:adversaries"
"""Trainer for faults that only one whose optimizers take turns can have."""


@cache
def the_matrix() -> Matrix:
    """Return the matrix of the project."""
    return load_matrix(data_file("matrix.yaml"))


@cache
def simulated_device(arithmetic: Arithmetic = OWN) -> Hardware | None:
    """Return the simulated device as hardware, compiled if this machine has not done so yet; None if it cannot be.

    It has the kernels of an arithmetic, and reductions of its own.
    """
    kernels = msgspec.structs.replace(arithmetic, sums=OWN.sums)
    hardware = find_hardware(machine_devices(), accelerator="sim", share_gpu="auto", arithmetic=kernels)
    assert hardware.simulated is not None
    return None if hardware.simulated.lacks else hardware


@cache
def _known_faults() -> list[Waiver]:
    """Return waivers that name a finding; they excuse only the listed metrics, so the law can still catch a defect.

    A fault that is all of its law's case, such as INIT-8's, must count: a twin fixes it.
    """
    waivers = load_waivers(data_file("waivers.yaml"), the_matrix())
    return [waiver for waiver in waivers if any(symptom.finding for symptom in waiver.shows or ())]


@dataclass
class CaseJudge:
    """Judge of the cases of a profile, with one pool of ranks for all of them."""

    directory: Path
    """Directory for records."""
    pools: Pools
    profile: str = "pr"
    hardware: Hardware = NO_DEVICES
    trainer: str = TRAINER
    """Trainer that laws of any trainer judge."""

    def store(self, *, defect: str | None = None, deadline_s: float = DEADLINE_S) -> RecordStore:
        """Return a record store; ranks are shared between known defects, see `trials.try_defect`.

        Other defects may leave anything behind.
        """
        return RecordStore(
            directory=self.directory,
            session="detection",
            torch_version=str(torch.__version__),
            defect=defect,
            deadline_s=deadline_s,
            pools=self.pools,
            shares_ranks=defect is None or is_known(defect),
            hardware=self.hardware,
            subject=self.trainer,
        )

    def cases(self, selection: str, *, only: Container[str] | None = None) -> list[Case]:
        """Return the cases of the profile on the selected cells, of all laws of the matrix, or `only` of some laws.

        A law of any trainer judges `trainer`, on the cells of the profile `trainers`.
        """
        selected = compiled(selection)
        cases = the_matrix().cases(self.profile, only=selected)
        if only is None:
            return list(cases)
        trainer_cases = the_matrix().trainer_cases(self.trainer, only=selected)
        return [case for case in (*cases, *trainer_cases) if case.law in only]

    def cases_of(self, selection: str, laws: Sequence[str]) -> list[Case]:
        """Return the cases of the profile on the selected cells, and for a law without one its first of the matrix."""
        cases = self.cases(selection, only=laws)
        in_profile = {case.law for case in cases}
        elsewhere = [law for law in laws if law not in in_profile]
        return [*cases, *(case for law in elsewhere for case in self._first_case(law, selection))]

    def _first_case(self, law: str, selection: str) -> list[Case]:
        """Return the first case of the law on the selected cells of any profile, as a list, which is empty if none."""
        holds, matrix = compiled(selection), the_matrix()
        cells = (each.cell for each in matrix.planned if holds(each.cell) and law in matrix.laws_on(each.cell))
        return [Case(law, cell) for cell in itertools.islice(cells, 1)]

    def judge(self, cases: Sequence[Case], *, defect: str | None, deadline_s: float = DEADLINE_S) -> list[Judged]:
        """Judge each case with a separate deadline, in seconds; records are shared between them."""
        store = self.store(defect=defect, deadline_s=deadline_s)
        return [judge_case(case, store) for case in cases]


def judge_case(case: Case, store: RecordStore) -> Judged:
    """Judge one case, from the records of the store; known faults of torch are waived.

    So a law that torch breaks must show more than that to have caught a defect.
    """
    law = asserted_laws()[case.law]
    machine = Machine(
        hardware=store.hardware, torch_version=store.torch_version, max_world_size=store.pools.max_world_size
    )
    return judge(case, law.law, law.test, store, machine=machine, waivers=_known_faults())
