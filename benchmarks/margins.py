"""How far measurements are from their bounds: `python benchmarks/margins.py REPORT_DIR [REPORT_DIR ...]`.

For each report one table of measured values by law, as multiples of the bound: 0.1 is ten times below it, 100 a hundred
times above. For a correct program the largest multiple counts, for an injected defect the smallest among failing cases.
docs/tolerances.md shows the tables of the last change of a bound, with the sessions that made the reports.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
from tabulate import tabulate

from conformance.engine.report import CaseResult, Report


def multiples(case: CaseResult) -> Iterator[tuple[str, float, float]]:
    """(measure, value, value / bound) for each measurement with an interval to be in."""
    for name, measured in case.measured.items():
        if measured.upper and measured.lower != measured.upper:  # exact counts have no margin
            value = float("inf") if measured.value is None else measured.value
            yield name, value, value / measured.upper


def rows(report: Report) -> list[list[object]]:
    """One row for each law and measure: number of cases, extreme value and multiple, and the cell that has it."""
    found: dict[tuple[str, str], list[tuple[float, float, str]]] = {}
    for case in report.cases:
        if case.verdict not in ("pass", "fail") or (report.defect and case.verdict == "pass"):
            continue
        for name, value, multiple in multiples(case):
            if multiple > 1.0 or not report.defect:
                found.setdefault((case.law, name), []).append((multiple, value, case.cell))
    extreme = min if report.defect else max
    return [[*key, len(values), *_reordered(extreme(values))] for key, values in sorted(found.items())]


def _reordered(row: tuple[float, float, str]) -> list[object]:
    multiple, value, cell = row
    return [f"{value:.2g}", f"{multiple:.2g}", cell]


def main(directories: list[str]) -> int:
    if not directories:
        print(__doc__, file=sys.stderr)
        return 2
    for directory in directories:
        report = msgspec.json.decode((Path(directory) / "report.json").read_bytes(), type=Report)
        extreme = "smallest" if report.defect else "largest"
        torch = report.environment["packages"]["torch"]
        print(f"\n{report.defect or 'no defect'}, profile {report.profile}, torch {torch}")
        print(
            tabulate(
                rows(report), ["law", "measure", "cases", extreme, "multiple of bound", "cell"], disable_numparse=True
            )
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
