"""Subjects by laws, from what a checkout keeps: a Markdown table, and HTML in which each verdict opens to its cells."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from tabulate import tabulate

from conformance.judge.verdicts import BAD, Verdict
from conformance.report.html import render
from conformance.subjects.catalogue import LAWS
from conformance.subjects.keeping import KeptSubject
from conformance.subjects.schema import NOT_JUDGED


class OnCell(NamedTuple):
    """Verdict of a law on one cell."""

    cell: str
    verdict: Verdict
    reason: str


class LawOnSubject(NamedTuple):
    """Verdicts of a law on the cells of a subject."""

    cells: Sequence[OnCell]

    @property
    def judged(self) -> int:
        """Number of cells on which the law was judged."""
        return sum(entry.verdict not in NOT_JUDGED for entry in self.cells)

    @property
    def bad(self) -> int:
        """Number of cells on which it does not hold."""
        return sum(entry.verdict in BAD for entry in self.cells)

    @property
    def verdict(self) -> str:
        """Verdict on all cells: `fail` if it does not hold on one, for whatever reason; empty if none was judged."""
        return "" if not self.judged else "fail" if self.bad else "pass"


def as_markdown(kept: Mapping[str, KeptSubject]) -> str:
    """Return laws by subjects, about each subject, and what does not hold."""
    rows = [[f"`{law.id}`", *(_summary(of_law(subject, law.id)) for subject in kept.values())] for law in LAWS]
    table = tabulate(rows, headers=["law", *kept], tablefmt="github", disable_numparse=True)
    about = tabulate(
        [_about(name, subject) for name, subject in kept.items()],
        headers=["subject", "command", "versions", "cells", "faults seen", "shims", "takes"],
        tablefmt="github",
        disable_numparse=True,
    )
    failures = "\n\n".join(_failures(name, subject) for name, subject in kept.items() if any(_reasons(subject)))
    return f"{table}\n\n{about}\n\n## What does not hold\n\n{failures}"


def as_html(kept: Mapping[str, KeptSubject]) -> str:
    """Return the table as one HTML file that needs nothing else."""
    return render(
        "subjects.html.j2",
        subjects=[
            {
                "name": name,
                "command": _command(subject),
                "versions": _versions(subject),
                "shims": subject.shims,
                "cells": _cells(subject),
                "faults": subject.faults,
                "faults_seen": _faults_seen(subject),
                "is_blind": not _sees_all(subject),
                "failing": [law.id for law in LAWS if of_law(subject, law.id).bad],
            }
            for name, subject in kept.items()
        ],
        laws=[(law, [of_law(subject, law.id) for subject in kept.values()]) for law in LAWS],
    )


def of_law(subject: KeptSubject, law: str) -> LawOnSubject:
    """Return the verdicts of a law on a subject."""
    reasons = subject.reasons.get(law, {})
    verdicts = subject.laws.get(law, {})
    return LawOnSubject([OnCell(cell, verdict, reasons.get(cell, "")) for cell, verdict in verdicts.items()])


def _summary(law: LawOnSubject) -> str:
    return f"**fail** on {law.bad} of {law.judged}" if law.bad else law.verdict or "-"


def _about(name: str, subject: KeptSubject) -> Sequence[str]:
    return [
        name,
        f"`{_command(subject)}`",
        _versions(subject),
        ", ".join(_cells(subject)),
        _faults_seen(subject),
        ", ".join(f"`{shim}`" for shim in subject.shims) or "none",
        f"{subject.duration_s:.0f} s",
    ]


def _command(subject: KeptSubject) -> str:
    return f"conformance judge {subject.subject}"


def _versions(subject: KeptSubject) -> str:
    return ", ".join(f"{package} {version}" for package, version in subject.versions.items())


def _cells(subject: KeptSubject) -> list[str]:
    """Return the cells that were run."""
    verdicts = [entry for by_cell in subject.laws.values() for entry in by_cell.items()]
    return list(dict.fromkeys(cell for cell, verdict in verdicts if verdict not in NOT_JUDGED))


def _faults_seen(subject: KeptSubject) -> str:
    """Return on which cells all faults are seen, and where not."""
    entries = [
        f"{sum(map(bool, faults.values()))} of {len(faults)} on {cell}"
        + "".join(f", not {fault}" for fault, laws in faults.items() if not laws)
        for cell, faults in subject.faults.items()
    ]
    return "; ".join(entries) or "not tried"


def _sees_all(subject: KeptSubject) -> bool:
    return bool(subject.faults) and all(laws for faults in subject.faults.values() for laws in faults.values())


def _reasons(subject: KeptSubject) -> Iterator[tuple[str, str, str]]:
    """Yield law, cell and reason of the first cell on which each law does not hold."""
    for law in subject.laws:
        first = next((entry for entry in of_law(subject, law).cells if entry.verdict in BAD), None)
        if first is not None:
            yield law, first.cell, first.reason


def _failures(name: str, subject: KeptSubject) -> str:
    """Return a line for each reason, with the cell, and the laws that it ends."""
    laws: dict[tuple[str, str], list[str]] = {}
    for law, cell, reason in _reasons(subject):
        laws.setdefault((cell, reason), []).append(law)
    lines = [f"{', '.join(of_reason)} on {cell}: {reason}"[:300] for (cell, reason), of_reason in laws.items()]
    return "\n".join([f"{name}:\n", *(f"    {line}" for line in lines)])
