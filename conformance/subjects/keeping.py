"""Verdicts on trainers that a checkout keeps, one file for each, and the table of them in docs."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
from tabulate import tabulate

from conformance.defects.catalogue import defects
from conformance.judge.registry import asserted_laws
from conformance.judge.verdicts import BAD, Verdict
from conformance.plan.matrix import TRAINER_CELLS
from conformance.project import PROJECT
from conformance.report.schema import Report
from conformance.report.trainer import TrainerFacts

DIRECTORY = PROJECT / "docs" / "subjects"
"""Directory of the results."""
_NOT_JUDGED = (Verdict.UNSUPPORTED, Verdict.NOT_RUN)


class KeptSubject(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Verdicts on a subject, without the numbers."""

    subject: str
    """Subject as it was named to `conformance judge`."""
    versions: dict[str, str]
    shims: list[str]
    laws: dict[str, dict[str, Verdict]]
    """Verdict by law and cell."""
    reasons: dict[str, dict[str, str]]
    """Reason of each verdict that is not `pass`, by law and cell."""
    faults: dict[str, dict[str, list[str]]]
    """Laws that see a fault, by cell and fault, in the last session with these versions that tried faults."""
    duration_s: float
    """Duration of that session, or of one without faults if none has tried any."""


def keep(report: Report) -> Path:
    """Write the verdicts on the trainer of a report, and return the file; raises ValueError if it has none."""
    if report.trainer is None:
        raise ValueError("the report is about the reference trainer")
    laws: dict[str, dict[str, Verdict]] = {}
    reasons: dict[str, dict[str, str]] = {}
    law_order, cell_order = list(asserted_laws()), [cell.id for cell in TRAINER_CELLS]
    in_profile = [case for case in report.cases if case.cell in cell_order]
    for case in sorted(in_profile, key=lambda case: (law_order.index(case.law), cell_order.index(case.cell))):
        laws.setdefault(case.law, {})[case.cell] = Verdict(case.verdict)
        if case.verdict != Verdict.PASS:
            reasons.setdefault(case.law, {})[case.cell] = case.reason
    DIRECTORY.mkdir(exist_ok=True)
    file = DIRECTORY / f"{report.trainer.name.rpartition(':')[2]}.json"
    faults, duration_s = _faults(report, report.trainer, file)
    kept = KeptSubject(
        subject=report.trainer.given,
        versions=report.trainer.versions,
        shims=report.trainer.shims,
        laws=laws,
        reasons=reasons,
        faults=faults,
        duration_s=duration_s,
    )
    file.write_bytes(msgspec.json.format(msgspec.json.encode(kept), indent=1) + b"\n")
    return file


def _faults(report: Report, trainer: TrainerFacts, file: Path) -> tuple[dict[str, dict[str, list[str]]], float]:
    """Return the laws that see each fault, and the duration of the session that has tried them.

    Of a session without faults those that a file has kept for the same versions, by present ids.
    """
    faults: dict[str, dict[str, list[str]]] = {}
    for seen in trainer.faults:
        faults.setdefault(seen.cell, {})[seen.fault] = seen.laws
    if faults or not file.exists() or (former := _read(file)).versions != trainer.versions:
        return faults, report.duration_s
    ids = {defect.id for defect in defects()}
    faults = {
        cell: {fault: laws for fault, laws in told.items() if fault in ids} for cell, told in former.faults.items()
    }
    return faults, former.duration_s


def _read(file: Path) -> KeptSubject:
    return msgspec.json.decode(file.read_bytes(), type=KeptSubject)


def read_kept() -> dict[str, KeptSubject]:
    """Return the kept verdicts by the short names of subjects."""
    files = sorted(DIRECTORY.glob("*.json"), key=lambda file: file.stem)
    return {file.stem: _read(file) for file in files}


def table(kept: Mapping[str, KeptSubject]) -> str:
    """Return a Markdown table of the laws of any trainer by subjects, then one line about each subject."""
    laws = [law for law, asserted in asserted_laws().items() if asserted.law.scope.of == "any trainer"]
    rows = [[f"`{law}`", *(_summary(subject.laws.get(law, {})) for subject in kept.values())] for law in laws]
    verdicts = tabulate(rows, headers=["law", *kept], tablefmt="github", disable_numparse=True)
    about = [
        f"- {name}: {', '.join(f'{package} {version}' for package, version in subject.versions.items())}; "
        f"private names: {', '.join(f'`{shim}`' for shim in subject.shims) or 'none'}; "
        f"faults seen: {_faults_seen(subject)}"
        for name, subject in kept.items()
    ]
    failures = [f"- {name} fails {failure}" for name, subject in kept.items() for failure in _failures(subject)]
    return f"{verdicts}\n\n" + "\n".join([*about, *failures]) + "\n"


def failing_laws(subject: KeptSubject) -> list[str]:
    """Return the laws that a subject fails on any cell, those that did not run on account of a crash included."""
    return [law for law, verdicts in subject.laws.items() if any(verdict in BAD for verdict in verdicts.values())]


def _failures(subject: KeptSubject) -> Iterator[str]:
    """Yield the laws that fail first on a cell for the same reason, with cell and reason."""
    laws: dict[tuple[str, str], list[str]] = {}
    for law, verdicts in subject.laws.items():
        cell = next((cell for cell, verdict in verdicts.items() if verdict in BAD), None)
        if cell is not None:
            laws.setdefault((cell, subject.reasons[law][cell]), []).append(law)
    for (cell, reason), failing in laws.items():
        yield f"{', '.join(failing)} on {cell}: {reason}"[:300]


def _summary(verdicts: Mapping[str, Verdict]) -> str:
    judged = [verdict for verdict in verdicts.values() if verdict not in _NOT_JUDGED]
    bad = sum(verdict in BAD for verdict in judged)
    return f"**fail** on {bad} of {len(judged)}" if bad else "pass" if judged else "-"


def _faults_seen(subject: KeptSubject) -> str:
    tried = [laws for faults in subject.faults.values() for laws in faults.values()]
    return f"{sum(map(bool, tried))} of {len(tried)}" if tried else "not tried"
