"""Laws under other kernels and other sums: alarms by session and law, and the defects that laws still catch.

    for seed in 1 2 3; do for sums in ring tree; do
      pytest conformance/ --profile pr --kernels other:$seed --sums $sums --report-dir runs/$seed-$sums
    done; done
    conformance defects --report-dir own
    conformance defects --kernels other:1 --sums ring --report-dir other
    python -m benchmarks.other_kernels runs/* --defects own other [--write]

An alarm is a case that fails, or passes where it is waived. A bound that were loosened for other kernels would show as
a defect that a law no longer catches. `--write` puts the table of sessions into docs/gpu.md.
"""

import argparse
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from tabulate import tabulate

from conformance.cli.blocks import write_block
from conformance.detection.kill_matrix import RESULTS_FILE, KillMatrix
from conformance.judge.verdicts import Verdict
from conformance.numerics.arithmetic import Arithmetic
from conformance.project import PROJECT
from conformance.report.schema import Report, read_report

DOCUMENT = PROJECT / "docs" / "gpu.md"
_ALARMS = (Verdict.FAIL, Verdict.ERROR, Verdict.CRASH, Verdict.TIMEOUT, Verdict.UNEXPECTED_PASS, Verdict.NOT_RUN)


def main() -> None:
    """Print the tables, and write that of sessions into the page if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", nargs="+", type=Path)
    parser.add_argument("--defects", nargs=2, type=Path, required=True, metavar=("OWN", "OTHER"))
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    reports = [read_report(directory) for directory in options.reports]
    own, other = (read_matrix(directory) for directory in options.defects)
    runs = runs_table(reports)
    print(runs, laws_table(reports, own, other), sep="\n\n")
    if options.write:
        write_block(DOCUMENT, "other-kernels", runs)


def read_matrix(directory: Path) -> KillMatrix:
    """Return the kill matrix that `conformance defects` has left."""
    return msgspec.json.decode((directory / RESULTS_FILE).read_bytes(), type=KillMatrix)


def arithmetic_of(report: Report) -> Arithmetic:
    """Return the kernels and sums of a session."""
    return msgspec.convert(report.environment["hardware"]["arithmetic"], Arithmetic)


def runs_table(reports: Sequence[Report]) -> str:
    """Return a row for each session: its arithmetic, and its cases by verdict."""
    rows = []
    for report in reports:
        arithmetic, counts = arithmetic_of(report), Counter(case.verdict for case in report.cases)
        alarms = sum(counts[verdict] for verdict in _ALARMS)
        torch = report.environment["packages"]["torch"]
        rows.append(
            [
                torch,
                report.profile,
                arithmetic.kernels,
                arithmetic.sums,
                *(counts[verdict] for verdict in (Verdict.PASS, Verdict.WAIVED, Verdict.UNSUPPORTED)),
                alarms,
            ]
        )
    headers = ["torch", "profile", "kernels", "sums", "pass", "waived", "unsupported", "alarms"]
    return tabulate(sorted(rows), headers=headers, tablefmt="github", disable_numparse=True)


def laws_table(reports: Sequence[Report], own: KillMatrix, other: KillMatrix) -> str:
    """Return a row for each law: cases that pass and alarm in all sessions, and the defects that it catches."""
    passes, alarms = Counter[str](), Counter[str]()
    for report in reports:
        passes.update(case.law for case in report.cases if case.verdict == Verdict.PASS)
        alarms.update(case.law for case in report.cases if case.verdict in _ALARMS)
    by_own, by_other = caught(own), caught(other)
    laws = dict.fromkeys(case.law for report in reports for case in report.cases)
    rows = [[law, passes[law], alarms[law], *_defects(by_own[law], by_other[law])] for law in laws]
    kernels = f"{other.arithmetic.kernels}, {other.arithmetic.sums}"
    headers = ["law", "pass", "alarms", "defects caught, torch and gloo", f"defects caught, {kernels}", "escape"]
    return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)


def caught(matrix: KillMatrix) -> defaultdict[str, set[str]]:
    """Return the defects that each law has caught."""
    defects: defaultdict[str, set[str]] = defaultdict(set)
    for trial in matrix.trials:
        for law, law_trial in trial.laws.items():
            if law_trial.kills:
                defects[law].add(trial.defect)
    return defects


def _defects(own: set[str], other: set[str]) -> Iterator[object]:
    yield len(own)
    yield len(other)
    yield ", ".join(sorted(own - other)) or "-"


if __name__ == "__main__":
    main()
