"""Verdicts on a subject as a person reads them."""

from collections.abc import Sequence

from tabulate import tabulate

from conformance.judge.margins import margin_of
from conformance.judge.verdicts import BAD, Verdict
from conformance.subjects.cells import FIRST_OF_MESHES, split_name
from conformance.subjects.schema import NOT_JUDGED, SubjectPolicy, SubjectReport, SubjectVerdict


def as_text(report: SubjectReport) -> str:
    """Return the report: a table of laws, what has failed and why, and what the laws could not see."""
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    sections = [
        f"{report.subject}: {versions}",
        *(f"shims (private names): {', '.join(report.shims)}" for _ in report.shims[:1]),
        _table(report.verdicts),
        _failures(report.verdicts),
        _not_judged(report.verdicts),
        _policies(report.policies),
        _faults(report),
        _conclusion(report),
    ]
    return "\n\n".join(section for section in sections if section)


def _table(verdicts: Sequence[SubjectVerdict]) -> str:
    """Return the laws, with the number of cells on which each was judged, and the cells that were run."""
    judged = [entry for entry in verdicts if entry.verdict not in NOT_JUDGED]
    laws: dict[tuple[str, str], list[SubjectVerdict]] = {}
    for entry in judged:
        laws.setdefault((entry.law, entry.suite_law), []).append(entry)
    rows = [[law, suite_law, _holds(entries), _margin(entries)] for (law, suite_law), entries in laws.items()]
    table = tabulate(rows, headers=["law", "like", "holds", "of its bound"], tablefmt="simple", disable_numparse=True)
    cells = ", ".join(dict.fromkeys(_id(entry.cell) for entry in judged))
    return f"{table}\n\ncells: {cells or 'none was run'}"


def _holds(entries: Sequence[SubjectVerdict]) -> str:
    """Return on how many cells a law holds, of those on which it was judged."""
    bad = sum(entry.verdict in BAD for entry in entries)
    return f"NOT on {bad} of {len(entries)}" if bad else f"on {len(entries)}"


def _id(cell: str) -> str:
    """Return the id of a cell, without the subject's name."""
    return split_name(cell)[1]


def _margin(entries: Sequence[SubjectVerdict]) -> str:
    """Return how much of a law's bound the largest rounding error takes, over all cells."""
    rounded = [m for entry in entries for m in entry.measured.values() if m.kind == "rounding"]
    return f"{max(map(margin_of, rounded)):.2g}" if rounded else ""


def _failures(verdicts: Sequence[SubjectVerdict]) -> str:
    """Return a line for each failure; cells that fail in the same way share one."""
    cells: dict[tuple[str, str, str], list[str]] = {}
    for entry in verdicts:
        if entry.verdict in BAD:
            law = "all laws" if not entry.measured and _all_alike(verdicts, entry) else entry.law
            of_failure = cells.setdefault((entry.verdict, law, entry.reason), [])
            of_failure += [entry.cell] if entry.cell not in of_failure else []
    return "\n".join(f"{verdict}: {law}, {', '.join(at)}: {why}" for (verdict, law, why), at in cells.items())


def _all_alike(verdicts: Sequence[SubjectVerdict], entry: SubjectVerdict) -> bool:
    return all(other.reason == entry.reason for other in verdicts if other.cell == entry.cell)


def _not_judged(verdicts: Sequence[SubjectVerdict]) -> str:
    """Return a line for each reason for which cells were not run, or not judged by a law."""
    cells: dict[tuple[str, str], list[str]] = {}
    for entry in verdicts:
        if entry.verdict in NOT_JUDGED:
            of_reason = cells.setdefault((entry.verdict, entry.reason), [])
            of_reason += [entry.cell] if entry.cell not in of_reason else []
    return "\n".join(f"{verdict}: {', '.join(at)}: {reason}" for (verdict, reason), at in cells.items())


def _policies(policies: Sequence[SubjectPolicy]) -> str:
    """Return what was measured of dtypes and reductions; cells that agree share a line."""
    cells: dict[str, list[str]] = {}
    for policy in policies:
        products, gradients = "/".join(policy.matmul_dtypes), "/".join(policy.gradient_dtypes)
        text = (
            f"products in {products or 'nothing'}, gradients {gradients or 'none'}, reduced by "
            f"{', '.join(policy.reductions) or 'nothing'}; compared with one process in {policy.reference_dtype}"
        )
        cells.setdefault(text, []).append(_id(policy.cell))
    return "\n".join(f"measured: {', '.join(at)}: {text}" for text, at in cells.items())


def _faults(report: SubjectReport) -> str:
    """Return a line for each fault and the laws that see it; cells on which they are the same share it."""
    if not report.faults:
        some = " or ".join(cell.id for cell in FIRST_OF_MESHES)
        return f"faults: not tried, so nothing says that laws see this subject ({some} must run, without --no-faults)"
    cells: dict[str, dict[str, list[str]]] = {}
    for seen in report.faults:
        cells.setdefault(seen.fault, {}).setdefault(", ".join(seen.laws) or "NO LAW SEES IT", []).append(seen.cell)
    return "\n".join(
        f"fault {fault}, {', '.join(at)}: {laws}" for fault, by_laws in cells.items() for laws, at in by_laws.items()
    )


def _conclusion(report: SubjectReport) -> str:
    bad = sum(entry.verdict in BAD for entry in report.verdicts)
    passed = sum(entry.verdict == Verdict.PASS for entry in report.verdicts)
    if report.blind_to:
        return f"blind to {', '.join(report.blind_to)}: these verdicts do not count"
    outcome = "conformant" if report.status == 0 else "NOT conformant"
    return (
        f"{outcome}: {passed} verdicts pass, {bad} do not; bounds on rounding are measured, not derived "
        f"({report.duration_s:g} s)"
    )
