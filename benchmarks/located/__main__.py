"""Table of the places that explanations of faults name: `python -m benchmarks.located OUT [--write] [ID ...]`.

Each fault of the catalogue, those of `ttrace_faults` and those of `reported_faults` is injected into one cell; the case
that fails is explained as a session does it, and the named place is compared with that which was written down before
(conformance/defects/places.yaml, `@at`). OUT keeps the rows, so that an interrupted run goes on. `--write` also writes
docs/located.md, which needs all rows.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import msgspec
from tabulate import tabulate

from benchmarks.located import faults, is_named, reported_faults, ttrace_faults
from benchmarks.located.why import WHY
from conformance.defects.catalogue import defects
from conformance.defects.injection import Defect
from conformance.defects.places import Place, places
from conformance.detection.case_judge import CaseJudge, judge_case
from conformance.detection.trials import cases_by_judge
from conformance.judge.judge import Judged
from conformance.judge.support import Machine
from conformance.judge.verdicts import Verdict
from conformance.localisation.localise import explained
from conformance.outcomes import CellFailed
from conformance.plan.cells import cell_from_id
from conformance.plan.matrix import Case
from conformance.project import PROJECT
from conformance.report.location import Location
from conformance.run.pool import Pools

PAGE = PROJECT / "docs" / "located.md"
_HANG_DEADLINE_S = 5.0
_TABLES = {
    "catalogue": "Defects of the catalogue that a run of a cell shows",
    "other": "Defects of the catalogue that an experiment, memory or an order shows",
    "ttrace": "Faults of the kinds of TTrace (arXiv:2506.09280), made again",
    "reported": "Reported faults that the catalogue does not have",
}


@dataclass(frozen=True)
class Fault:
    """Fault with the name by which a session takes it, and its table."""

    name: str
    defect: Defect
    table: str
    place: Place


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one fault."""

    fault: str
    table: str
    case: str
    """Id of the case that failed; empty if none did."""
    expected: str
    named: str
    """Sentence of the location, or the reason of the law where the law itself names the place."""
    is_right: bool
    judged_s: float
    """Duration of the run and of the law."""
    explained_s: float
    """Duration of the explanation, with its own run."""


def all_faults() -> Iterator[Fault]:
    """Yield the faults of all tables."""
    for each in defects():
        place = places()[each.id]
        if each.of == "reference trainer":
            yield Fault(each.id, each, "catalogue" if place.stages else "other", place)
    for table, module in (("ttrace", ttrace_faults), ("reported", reported_faults)):
        for name, fault in faults(module).items():
            yield Fault(f"{module.__file__}:{name}", fault, table, fault.place)


def row_of(fault: Fault, judge: CaseJudge) -> Row:
    """Inject a fault and explain the first case that fails."""
    deadline_s = _HANG_DEADLINE_S if fault.defect.hangs else 60.0
    judged, location, failed_s, explained_s = None, None, 0.0, 0.0
    for case_judge, case in _cases(fault, judge):
        store = case_judge.store(defect=fault.name, deadline_s=deadline_s)
        start_s = time.monotonic()
        judged = judge_case(case, store)
        failed_s = time.monotonic() - start_s
        if judged.verdict not in (Verdict.FAIL, Verdict.TIMEOUT):
            continue
        start_s = time.monotonic()
        location = _explained(case, case_judge, fault, judged, deadline_s)
        explained_s = time.monotonic() - start_s
        break
    has_failed = judged is not None and judged.verdict in (Verdict.FAIL, Verdict.TIMEOUT)
    reason = judged.reason if judged is not None and has_failed else "no case failed"
    return Row(
        fault=fault.defect.id,
        table=fault.table,
        case=judged.case.id if judged is not None and has_failed else "",
        expected=_expected(fault.place),
        named=location.sentence if location else reason,
        is_right=has_failed and is_named(fault.place, location, reason),
        judged_s=round(failed_s, 2),
        explained_s=round(explained_s, 2),
    )


def _cases(fault: Fault, judge: CaseJudge) -> Iterator[tuple[CaseJudge, Case]]:
    """Yield the cases on the cell of a fault, of the laws that must catch it in their order."""
    found = [
        (case_judge, case)
        for case_judge, cases in cases_by_judge(judge, fault.defect)
        for case in cases
        if not fault.place.cell or case.cell.id == fault.place.cell
    ]
    yield from sorted(found, key=lambda pair: fault.defect.laws.index(pair[1].law))
    if not found and fault.place.cell:
        cell = cell_from_id(fault.place.cell)
        yield from ((judge, Case(law, cell, None)) for law in fault.defect.laws)


def _explained(case: Case, judge: CaseJudge, fault: Fault, judged: Judged, deadline_s: float) -> Location | None:
    store = judge.store(defect=fault.name, deadline_s=deadline_s)
    machine = Machine(
        hardware=store.hardware, torch_version=store.torch_version, max_world_size=store.pools.max_world_size
    )
    try:
        return explained(case, store, machine=machine, measured=judged.measured, reason=judged.reason)
    except CellFailed:
        return None


def _expected(place: Place) -> str:
    if place.where:
        return f"{place.where}: {place.text}"
    clauses = [" or ".join(place.stages), place.name or "the run", place.quantity, place.collective]
    ranks = f"ranks {', '.join(map(str, place.ranks))}" if place.ranks else ""
    return ": ".join(clause for clause in (*clauses, ranks) if clause)


def as_markdown(rows: Sequence[Row]) -> str:
    """Return the page: for each table its share of right places, and each fault with the place that was named."""
    blocks = [
        "# Named places of faults",
        "Written by `python -m benchmarks.located OUT --write`. Each fault is injected into one cell, and the first "
        "case that fails is explained. Expected places are regular expressions that were written down before any "
        "result existed; a place that is only a consequence counts as wrong.",
    ]
    for table, title in _TABLES.items():
        in_table = [row for row in rows if row.table == table]
        right = sum(row.is_right for row in in_table)
        blocks.append(f"## {title}\n\n{right} of {len(in_table)} are right. {_times(in_table)}")
        cells = [
            [row.fault, row.case, "yes" if row.is_right else f"**no**: {WHY.get(row.fault, '?')}", _plain(row.named)]
            for row in in_table
        ]
        blocks.append(tabulate(cells, headers=["fault", "case", "right", "named"], tablefmt="github"))
    return "\n\n".join(blocks) + "\n"


def _times(rows: Sequence[Row]) -> str:
    """Return a sentence about the durations of judging and of explaining."""
    judged, explained = ([getattr(row, name) for row in rows] for name in ("judged_s", "explained_s"))
    return (
        f"Run and law took {median(judged):.1f} s in the median, the explanation with its run "
        f"{median(explained):.1f} s ({max(explained):.1f} s at most)."
    )


def _plain(text: str) -> str:
    """Return one line that a table of markdown may hold, without the paths of other machines."""
    return " ".join(text.split()).replace("|", r"\|").replace("<", "&lt;").replace("*", r"\*")[:600]


def kept_rows(file: Path) -> dict[str, Row]:
    """Return the rows that an earlier run has left, by fault."""
    rows = msgspec.json.decode(file.read_bytes(), type=list[Row]) if file.exists() else []
    return {row.fault: row for row in rows}


def main() -> None:
    """Explain the faults, print one line for each, and leave the rows."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.located", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("id", nargs="*", help="only these faults, again")
    parser.add_argument("--table", choices=[*_TABLES], help="only the faults of one table")
    parser.add_argument("--write", action="store_true", help="also write docs/located.md")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "located.json"
    rows = kept_rows(file)
    with tempfile.TemporaryDirectory() as records, closing(Pools()) as pools:
        judge = CaseJudge(Path(records), pools)
        for fault in all_faults():
            wanted = fault.defect.id in options.id if options.id else fault.defect.id not in rows
            if not wanted or (options.table and fault.table != options.table):
                continue
            row = row_of(fault, judge)
            rows[row.fault] = row
            file.write_bytes(msgspec.json.format(msgspec.json.encode([*rows.values()]), indent=1))
            print(f"{'right' if row.is_right else 'WRONG'} {row.fault} ({row.case}): {row.named[:300]}", flush=True)
    _print_shares(rows)
    if options.write:
        PAGE.write_text(as_markdown([rows[fault.defect.id] for fault in all_faults()]))


def _print_shares(rows: Mapping[str, Row]) -> None:
    for table, title in _TABLES.items():
        in_table = [row for row in rows.values() if row.table == table]
        print(f"{title}: {sum(row.is_right for row in in_table)} of {len(in_table)} right")


if __name__ == "__main__":
    main()
