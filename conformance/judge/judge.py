"""Judge: the pipeline from a case to its verdict, which sessions, the kill matrix and `verify` share."""

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from conformance.judge.law import Law
from conformance.judge.measurements import Measurement, collecting
from conformance.judge.support import Machine, judging_substrate, unsupported
from conformance.judge.verdicts import Verdict, classify
from conformance.judge.waivers import KnownFailure, waiver_of
from conformance.plan.cells import Cell
from conformance.plan.content import Profile
from conformance.plan.matrix import Case
from conformance.plan.substrates import Substrate
from conformance.run.case_runs import CaseRuns
from conformance.run.devices.hardware import kernel_type
from conformance.run.store import Clock, RecordStore
from conformance.torch_release import release

Drift = Callable[[str, Mapping[str, Measurement]], tuple[Verdict, str]]
"""Function from the id and metrics of a case that passes to verdict and reason, which tell of drift from a baseline."""


class Runs(Protocol):
    """Runs for the law of one case: of the reference trainer (`CaseRuns`), or of another one (`SubjectRuns`)."""

    @property
    def clock(self) -> Clock:
        """Time that the case has spent on runs."""

    def fixtures(self, cell: Cell) -> Mapping[str, Any]:
        """Return the arguments that a law's test may have, by name, see `conformance.assertions.fixtures`."""


@dataclass(frozen=True)
class Judged:
    """Verdict on a case, with its reason, metrics and times."""

    case: Case
    substrate: Substrate
    verdict: Verdict
    reason: str = ""
    measured: dict[str, Measurement] = field(default_factory=dict)
    wait_s: float = 0.0
    """Time spent waiting for runs of other workers, devices and processors."""
    run_s: float = 0.0
    """Time spent running cells."""
    error: BaseException | None = None
    """Exception that ended the test, if any."""
    records: frozenset[str] = frozenset()
    """Names of the records of the reference trainer that the law has asked for."""


def judge(
    case: Case,
    law: Law,
    test: Callable[..., None],
    store: RecordStore,
    *,
    machine: Machine,
    profile: Profile | None = None,
    waivers: Sequence[KnownFailure] = (),
    drift: Drift | None = None,
) -> Judged:
    """Run the test of a law on a cell; returns the verdict that the outcome means.

    Nothing is run if the machine cannot judge the case. A waiver turns the failure that it describes into `waived`, and
    a pass into `unexpected-pass`, unless a sweep has tried a share of its samples; `drift` is called for a case that
    passes. Whatever the test raises becomes a verdict, but for KeyboardInterrupt.
    """
    __tracebackhide__ = True
    substrate = judging_substrate(law, case.cell, machine.hardware)
    missing = unsupported(law, case.cell, machine, profile=profile)
    if missing:
        return Judged(case, substrate, Verdict.UNSUPPORTED, missing)
    runs = _runs(case, law, store)
    verdict, reason, error = Verdict.PASS, "", None
    with collecting() as measured:
        try:
            known = runs.fixtures(case.cell)
            test(**{name: known[name] for name in inspect.signature(test).parameters})
        except KeyboardInterrupt:
            raise
        except BaseException as raised:  # pytest's outcomes do not derive from Exception
            (verdict, reason), error = classify(raised), raised
    torch = release(machine.torch_version)
    waiver = waiver_of(waivers, case, device=kernel_type(substrate), torch=torch)
    is_share = isinstance(runs, CaseRuns) and runs.is_share
    if waiver is not None and not (is_share and verdict == Verdict.PASS):  # of which the waived samples may be none
        verdict, reason = waiver.judge(verdict, reason, measured)
    if drift is not None and verdict == Verdict.PASS:
        verdict, reason = drift(case.id, measured)
    clock = runs.clock
    records = frozenset(runs.records) if isinstance(runs, CaseRuns) else frozenset()
    return Judged(case, substrate, verdict, reason, measured, clock.wait_s, clock.run_s, error, records)


def _runs(case: Case, law: Law, store: RecordStore) -> Runs:
    """Return the runs on which a law is judged: of the reference trainer, or of the store's, whose code takes torch."""
    if case.trainer is None:
        return CaseRuns(store, law.substrates)
    runs: Runs = importlib.import_module("conformance.subjects.running").SubjectRuns(store, law=law.id)
    return runs
