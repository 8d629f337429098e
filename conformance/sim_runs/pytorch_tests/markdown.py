"""Generated page docs/sim/pytorch_tests.md: outcomes by file, ranks, schedule and version, causes and reasons."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import PurePath

from tabulate import tabulate

from conformance.sim_runs.pytorch_tests.expectations import Expectations
from conformance.sim_runs.pytorch_tests.outcomes import FAILED, PASSED, SKIPPED
from conformance.sim_runs.pytorch_tests.record import Record
from conformance.sim_runs.pytorch_tests.running import SIM
from conformance.sim_runs.pytorch_tests.summary import (
    Judged,
    eager_differences,
    judged,
    races_table,
    setting_text,
    share,
    unordered_pairs,
)

_BEGIN = """# PyTorch's own tests on `sim`

Generated from [pytorch_tests.json](pytorch_tests.json) by

    python -m conformance sim pytorch-tests CHECKOUT --world 2 --world 4 --schedule eager --schedule lazy --write
    python -m conformance sim pytorch-tests CHECKOUT --world 2 --world 4 --device cpu --write
    python -m conformance sim pytorch-tests CHECKOUT --world 2 --schedules 2 --write

Nothing of PyTorch's tests is in this project. `cpu` is the same command without the device: what a machine without
accelerator runs. A cell has the numbers of tests that passed / failed / were skipped."""

_RACES = """Each file as one program with all its ranks, under the first of these schedules: eager, lazy, each stream
starved, random ones. *Unordered pairs* access the same bytes, and no event orders them; the trace of the eager run
shows them under whatever schedule. Pairs that are *held by waits* are ordered by a wait of the host alone. Bits are
those that the host reads, and those in memory at the end; where two eager runs differ, those of other schedules prove
nothing. So that they agree, ranks that are threads of one process take turns, and temporary files, `uuid` and sets of
strings have the same names and order in each run."""


def as_markdown(records: Sequence[Record], expectations: Expectations) -> str:
    """Return the page for all records."""
    sections = [_BEGIN]
    for record in records:
        sections += _sections(record, expectations)
    return "\n\n".join(sections) + "\n"


def _sections(record: Record, expectations: Expectations) -> Iterator[str]:
    runs = judged(record, expectations)
    settings = sorted({setting_text(one.run) for one in runs}, key=lambda text: (text[-7:], text))
    yield f"## torch {record.torch}, tests of torch {record.checkout}"
    yield _outcomes(runs, settings)
    for setting in settings:
        if setting.startswith(SIM):
            yield f"- {setting}: {share([one for one in runs if setting_text(one.run) == setting], expectations)}."
    yield "### Tests that fail on `sim`"
    yield _failures(runs, expectations)
    yield "### Tests that are skipped on `sim`"
    yield _skips(runs)
    if record.races:
        yield "### Races"
        yield _RACES
        yield races_table(record.races, "github")
        yield "\n".join(f"- {line}" for line in unordered_pairs(record.races)) or "No accesses are unordered."
        if differing := eager_differences(record.races):
            yield "Where two eager runs differ, each process first in:"
            yield "\n".join(f"- {line}" for line in differing)


def _outcomes(runs: Sequence[Judged], settings: Sequence[str]) -> str:
    cells = {(one.run.area, one.run.file, setting_text(one.run)): one for one in runs}
    files = list(dict.fromkeys((one.run.area, one.run.file) for one in runs))
    rows = [
        [
            area,
            PurePath(file).name,
            *(_cell([cells[key]]) if (key := (area, file, s)) in cells else "" for s in settings),
        ]
        for area, file in sorted(files)
    ]
    totals = [_cell([one for one in runs if setting_text(one.run) == s]) for s in settings]
    return _table([*rows, ["all", "", *totals]], ["area", "file", *settings])


def _cell(runs: Sequence[Judged]) -> str:
    return " / ".join(str(sum(one.count(outcome) for one in runs)) for outcome in (PASSED, FAILED, SKIPPED))


def _failures(runs: Sequence[Judged], expectations: Expectations) -> str:
    failures: dict[tuple[str, str], set[str]] = {}
    for one in runs:
        for verdict in one.verdicts:
            if verdict.outcome.outcome == FAILED and one.run.device == SIM:
                key = (verdict.reason or "unexpected", verdict.why or verdict.outcome.cause)
                failures.setdefault(key, set()).add(verdict.outcome.test)
    rows = [[reason, why.replace("|", "\\|"), len(tests)] for (reason, why), tests in sorted(failures.items())]
    reasons = [[f"`{name}`", reason.why] for name, reason in expectations.reasons.items()]
    return f"{_table(reasons, ['reason', 'is about'])}\n\n{_table(rows, ['reason', 'cause', 'tests'])}"


def _skips(runs: Sequence[Judged]) -> str:
    counts = Counter(
        (verdict.reason or "unexpected", verdict.outcome.cause)
        for one in runs
        for verdict in one.verdicts
        if verdict.outcome.outcome == SKIPPED and one.run.device == SIM
    )
    rows = [[reason, message, count] for (reason, message), count in sorted(counts.items())]
    return _table(rows, ["reason", "message", "skips"])


def _table(rows: Sequence[Sequence[object]], headers: Sequence[str]) -> str:
    return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)
