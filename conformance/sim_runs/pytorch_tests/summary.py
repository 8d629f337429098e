"""Summary of runs of PyTorch's tests: counts by file, causes of failures and skips, and the share that passes."""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import PurePath
from typing import NamedTuple

from tabulate import tabulate

from conformance.sim_runs.pytorch_tests.expectations import Expectations, Verdict, judge
from conformance.sim_runs.pytorch_tests.outcomes import FAILED, PASSED, SKIPPED
from conformance.sim_runs.pytorch_tests.races import EAGER, FileRaces
from conformance.sim_runs.pytorch_tests.record import Record
from conformance.sim_runs.pytorch_tests.running import SIM, FileRun


class Judged(NamedTuple):
    """Run of a file with the verdicts on its tests."""

    run: FileRun
    verdicts: list[Verdict]

    def count(self, outcome: str) -> int:
        """Return the number of tests with an outcome."""
        return sum(verdict.outcome.outcome == outcome for verdict in self.verdicts)

    @property
    def unexpected(self) -> list[Verdict]:
        """Verdicts that differ from the expected outcomes."""
        return [verdict for verdict in self.verdicts if verdict.unexpected]


class Share(NamedTuple):
    """Share of tests that pass among those that ran on the device and need no kernel of CUDA or feature of NCCL."""

    passed: int
    tests: int
    other_version: int
    """Number of tests that fail since they are of another version of torch, which `tests` includes."""

    def __str__(self) -> str:
        share = self.passed / self.tests if self.tests else 0.0
        same = self.tests - self.other_version
        share_of_version = self.passed / same if same else 0.0
        return (
            f"{self.passed} of {self.tests} tests pass ({share:.0%}) that ran and need no kernel of CUDA or feature of "
            f"NCCL; {share_of_version:.0%} without the {self.other_version} that need another version of torch"
        )


OTHER_VERSION = "other version"
"""Reason of tests that were written for another version of torch than the installed one."""


def judged(record: Record, expectations: Expectations) -> list[Judged]:
    """Return the runs of a record with their verdicts."""
    return [
        Judged(run, judge(run, torch=record.torch, checkout=record.checkout, expectations=expectations))
        for run in record.runs
    ]


def share(runs: Iterable[Judged], expectations: Expectations) -> Share:
    """Return the share of the tests that pass."""
    verdicts = [verdict for one in runs for verdict in one.verdicts if verdict.outcome.outcome != SKIPPED]
    counted = [v for v in verdicts if not v.reason or expectations.reasons[v.reason].counts]
    passed = sum(verdict.outcome.outcome == PASSED for verdict in counted)
    return Share(passed, len(counted), sum(verdict.reason == OTHER_VERSION for verdict in counted))


def setting_text(run: FileRun) -> str:
    """Return the device and the number of ranks of a run, such as `sim:lazy, 4 ranks`."""
    device = f"{run.device}:{run.schedule}" if run.schedule else run.device
    return f"{device}, {run.world} ranks"


def as_text(record: Record, expectations: Expectations) -> str:
    """Return the summary of a record as text."""
    runs = judged(record, expectations)
    rows = [
        [one.run.file, setting_text(one.run), *map(one.count, (PASSED, FAILED, SKIPPED)), len(one.unexpected) or ""]
        for one in runs
    ]
    sections = [
        f"torch {record.torch}, tests of torch {record.checkout}",
        tabulate(rows, headers=["file", "on", PASSED, FAILED, SKIPPED, "unexpected"]) if rows else "",
        *(_causes(title, runs, outcome) for title, outcome in (("failures", FAILED), ("skips", SKIPPED))),
        _unexpected(runs),
        *_shares(runs, expectations),
        races_table(record.races, "simple"),
        "\n".join(unordered_pairs(record.races)),
    ]
    return "\n\n".join(filter(None, sections))


def races_table(races: Sequence[FileRaces], style: str) -> str:
    """Return a row for each file that was searched for races, or nothing."""
    rows = [
        [
            PurePath(search.file).name,
            search.world,
            search.operators,
            len(search.schedules),
            search.orders,
            len(search.unordered),
            search.held_by_waits,
            search.bits,
        ]
        for search in races
    ]
    headers = ["file", "ranks", "operators", "schedules", "orders", "unordered pairs", "held by waits", "bits"]
    return tabulate(rows, headers=headers, tablefmt=style) if rows else ""


def unordered_pairs(races: Iterable[FileRaces]) -> list[str]:
    """Return a line for each kind of pair that no event orders."""
    return [f"{PurePath(search.file).name}: {pair}" for search in races for pair in search.unordered]


def eager_differences(races: Iterable[FileRaces]) -> list[str]:
    """Return a line for each file of which two eager runs differ, with the first difference of each process."""
    return [
        f"{PurePath(search.file).name}, {search.world} ranks: {'; '.join(search.eager_differences)}"
        for search in races
        if search.eager_differences
    ]


def is_open(search: FileRaces, record: Record, expectations: Expectations) -> bool:
    """Return whether a search found a race, or is not finished for a reason that no expected failure tells."""
    if not search.not_run:
        return bool(search.has_race or search.unfinished)
    run = FileRun(search.area, search.file, search.world, SIM, EAGER, (search.not_run,))
    return bool(
        Judged(run, judge(run, torch=record.torch, checkout=record.checkout, expectations=expectations)).unexpected
    )


def _shares(runs: Sequence[Judged], expectations: Expectations) -> list[str]:
    settings = list(dict.fromkeys(setting_text(one.run) for one in runs))
    return [f"{s}: {share([o for o in runs if setting_text(o.run) == s], expectations)}" for s in settings]


def _causes(title: str, runs: Sequence[Judged], outcome: str) -> str:
    counts = Counter(
        (verdict.reason or "unexpected", verdict.outcome.cause)
        for one in runs
        for verdict in one.verdicts
        if verdict.outcome.outcome == outcome
    )
    rows = [[count, reason, cause] for (reason, cause), count in counts.most_common()]
    return tabulate(rows, headers=[title, "reason", "cause"], maxcolwidths=[None, None, 100]) if rows else ""


def _unexpected(runs: Sequence[Judged]) -> str:
    lines = [
        f"{verdict.unexpected}: {verdict.outcome.test} ({setting_text(one.run)})"
        for one in runs
        for verdict in one.unexpected
    ]
    return "\n".join(lines)
