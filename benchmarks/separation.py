"""Distance of correct runs and injected defects from every tolerance: `python -m benchmarks.separation [--write]`.

Runs the laws that have tolerances on the unmodified product with several seeds, then each defect that must violate such
a law, on its triggering cells with the same seeds. Prints a row for each law and comparison: the largest multiple of
the bound in a correct run, and the smallest with a defect. Both must be at least a factor of 3 away from the bound.
`--write` puts the rows with a defect into docs/tolerances.md. Exit status 1: a comparison is not separated, or a
correct run failed.
"""

import argparse
import math
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tabulate import tabulate

from conformance.cli.blocks import write_block
from conformance.defects.catalogue import defects
from conformance.judge.measurements import Measurement
from conformance.project import PROJECT
from conformance.report.schema import CaseResult, Report, read_report

DOCUMENT = PROJECT / "docs" / "tolerances.md"
FACTOR = 3.0
"""Factor of the bound that counts as separated, on either side."""
LAWS = ("PAR-1", "PAR-2", "PAR-3", "PAR-6", "PAR-7", "MP-2", "MP-5")
"""Laws that compare with a tolerance; all other laws compare bits or counts."""


@dataclass
class Row:
    """Measurements of one comparison of one law; a multiple is a deviation divided by its bound."""

    clean: tuple[float, float, str] = (0.0, 0.0, "")
    """Largest multiple in a correct run, with its value and cell."""
    cases: int = 0
    defect: tuple[float, float, str] = (math.inf, math.inf, "none")
    """Smallest multiple in a case that fails in this comparison with a defect, with its value and the defect."""
    defect_cases: int = 0
    bound: float = 0.0

    @property
    def separated(self) -> bool:
        """True if correct runs and defects are far enough from the bound."""
        return self.clean[0] * FACTOR <= 1.0 and self.defect[0] >= FACTOR


def multiple(measured: Measurement) -> float | None:
    """Return the deviation divided by the bound; None for metrics that rounding does not change, which have no margin.

    The deviation of a ratio that may be off by a factor either way is its logarithm.
    """
    if measured.upper is None or measured.kind != "rounding":
        return None
    value = math.inf if measured.value is None else measured.value
    if measured.unit == "ratio":
        return abs(math.log(value)) / math.log(measured.upper) if value > 0 else math.inf
    if measured.upper == 0.0:
        return 0.0 if value == 0.0 else math.inf
    return value / measured.upper


def comparison(name: str, measured: Measurement) -> str:
    """Return the name of a row: all steps share a row, and so do all bitwise comparisons."""
    plain = re.sub(r" of step \d+", " of each step", name)
    return f"{plain}, no bit may differ" if measured.upper == 0.0 else plain


def multiples(case: CaseResult) -> Iterator[tuple[tuple[str, str], float, Measurement]]:
    """Yield row, multiple and measurement of each comparison of a case that has a margin."""
    for name, measured in case.measured.items():
        ratio = multiple(measured)
        if ratio is not None:
            yield (case.law, comparison(name, measured)), ratio, measured


def add_clean(rows: dict[tuple[str, str], Row], report: Report) -> None:
    """Add the cases of correct runs."""
    for case in report.cases:
        for key, ratio, measured in multiples(case):
            row = rows[key]
            row.cases += 1
            row.bound = max(row.bound, measured.upper or 0.0)
            row.clean = max(row.clean, (ratio, measured.value or 0.0, case.cell))


def add_defect(rows: dict[tuple[str, str], Row], report: Report, laws: tuple[str, ...]) -> None:
    """Add the failed cases of a defect; each counts once, for the comparison that failed and ended it."""
    for case in report.cases:
        for key, ratio, measured in multiples(case):
            if case.law in laws and ratio > 1.0:
                rows[key].defect_cases += 1
                value = math.inf if measured.value is None else measured.value
                rows[key].defect = min(rows[key].defect, (ratio, value, str(report.defect)))


def session(directory: Path, *, seed: int, cells: str, defect: str | None) -> Report:
    """Run the laws with tolerances on the selected cells of profile `pr`."""
    command = [sys.executable, "-m", "pytest", "-n", "auto", "-q", "conformance/laws/", f"--report-dir={directory}"]
    command += [f"--laws={','.join(LAWS)}", f"--seed={seed}", f"--cells={cells}"]
    command += [f"--defect={defect}"] if defect else []
    subprocess.run(command, cwd=PROJECT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    return read_report(directory)


def measured_rows(seeds: int) -> dict[tuple[str, str], Row]:
    """Run all sessions. Raises SystemExit if a correct run does not pass, since its bound separates nothing."""
    rows: dict[tuple[str, str], Row] = defaultdict(Row)
    with tempfile.TemporaryDirectory() as name:
        for seed in range(seeds):
            clean = session(Path(name, f"clean-{seed}"), seed=seed, cells="world <= 4", defect=None)
            if clean.exit_code != 0:
                wrong = [
                    f"{case.id}: {case.reason}" for case in clean.cases if case.verdict not in ("pass", "unsupported")
                ]
                raise SystemExit(f"{len(wrong)} correct runs do not pass:\n" + "\n".join(wrong))
            add_clean(rows, clean)
        for defect in defects():
            laws = tuple(law for law in defect.laws if law in LAWS)
            for seed in range(seeds if laws else 0):
                directory = Path(name, f"{defect.id}-{seed}")
                report = session(directory, seed=seed, cells=defect.cells, defect=defect.id)
                add_defect(rows, report, laws)
                print(f"{defect.id}, seed {seed}: {report.verdicts}", file=sys.stderr)
    return dict(sorted(rows.items()))


def table(rows: dict[tuple[str, str], Row]) -> str:
    """Return the table in markdown."""
    headers = ["law", "comparison", "cases", "largest correct", "of bound", "smallest defect", "of bound", "defect"]
    lines = []
    for (law, name), row in rows.items():
        multiple_of_clean, value, _ = row.clean
        defect_ratio, defect_value, defect = row.defect
        correct = [row.cases, f"{value:.2g}", "equal" if row.bound == 0.0 else f"{multiple_of_clean:.2g}"]
        if row.defect_cases:
            caught = [f"{defect_value:.2g}", "differs" if row.bound == 0.0 else f"{defect_ratio:.2g}", defect]
        else:
            caught = ["-", "-", "an earlier comparison fails first"]
        lines.append([law, name, *correct, *caught])
    return tabulate(lines, headers, tablefmt="github", disable_numparse=True)


def main() -> int:
    """Print the table, and write it into the document if asked to; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="seeds 0 to N-1 (default: 5)")
    parser.add_argument("--write", action="store_true", help="put the rows with a defect into docs/tolerances.md")
    arguments = parser.parse_args()
    rows = measured_rows(arguments.seeds)
    print(table(rows))
    if arguments.write:
        write_block(DOCUMENT, "separation", table({key: row for key, row in rows.items() if row.defect_cases}))
    close = [" ".join(key) for key, row in rows.items() if not row.separated]
    print("\n".join(["", "not separated:", *close] if close else ["", "all separated"]))
    return 1 if close else 0


if __name__ == "__main__":
    sys.exit(main())
