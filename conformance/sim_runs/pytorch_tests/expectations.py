"""Expected failures and skips of PyTorch's tests, by version and reason, and the comparison of a run with them."""

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from packaging.specifiers import SpecifierSet

from conformance.sim_runs.pytorch_tests.outcomes import Outcome
from conformance.sim_runs.pytorch_tests.running import CPU, FileRun
from reference_trainer.strict_yaml import convert, load

_FILE = Path(__file__).with_name("expected.yaml")
Unexpected = Literal["", "unexpected failure", "unexpected pass", "unexpected skip"]
UNEXPECTED_FAILURE: Unexpected = "unexpected failure"
UNEXPECTED_PASS: Unexpected = "unexpected pass"
UNEXPECTED_SKIP: Unexpected = "unexpected skip"
_DEVICES = re.compile(r"Need at least (\d+) (?:CUDA|accelerator) device")


class Reason(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Class of reasons for which a test does not pass on the simulated device."""

    why: str
    counts: bool = True
    """False for tests that need a kernel of CUDA or a feature of NCCL: no other device can pass them."""


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tests that are expected to fail."""

    tests: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    """Patterns of `FILE::CLASS::NAME`, as of `fnmatch`."""
    reason: str
    why: str
    torch: str = ""
    """Versions of the installed torch, as `packaging` specifies them; empty for all."""
    checkout: str = ""
    """Versions of torch that the tests are of."""
    worlds: tuple[int, ...] = ()
    """Numbers of ranks; empty for all."""
    schedules: tuple[str, ...] = ()
    sometimes: bool = False
    """True for tests that also pass, such as those that measure time."""


class Skip(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Skips that are expected."""

    message: str
    """Regular expression of the message that pytest reports."""
    reason: str


class Expectations(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content of expected.yaml."""

    reasons: dict[str, Reason]
    failures: tuple[Row, ...]
    skips: tuple[Skip, ...]


class Verdict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Comparison of an outcome with the expected ones."""

    outcome: Outcome
    reason: str = ""
    """Reason of an expected failure or skip."""
    why: str = ""
    """Cause of an expected failure, as its row tells it."""
    unexpected: Unexpected = ""


@cache
def read_expectations(file: Path = _FILE) -> Expectations:
    """Return the expected outcomes. Raises ConfigError for a mistake, such as a reason that is not listed."""
    document = load(file)
    expectations = convert(document, Expectations)
    reasons = {
        "failures": [row.reason for row in expectations.failures],
        "skips": [row.reason for row in expectations.skips],
    }
    for where, given in reasons.items():
        for number, reason in enumerate(given):
            if reason not in expectations.reasons:
                raise document.error(f"$.{where}[{number}].reason", f"no reason is called {reason!r}")
    return expectations


def judge(run: FileRun, *, torch: str, checkout: str, expectations: Expectations) -> list[Verdict]:
    """Return the verdicts on a run of a file; on the CPU, for comparison, nothing is unexpected."""
    if run.device == CPU:
        return [Verdict(outcome) for outcome in run.outcomes]
    rows = [row for row in expectations.failures if _concerns(row, run, torch, checkout)]
    return [_verdict(outcome, run.world, rows, expectations.skips) for outcome in run.outcomes]


def _concerns(row: Row, run: FileRun, torch: str, checkout: str) -> bool:
    return (
        SpecifierSet(row.torch).contains(torch, prereleases=True)
        and SpecifierSet(row.checkout).contains(checkout)
        and (not row.worlds or run.world in row.worlds)
        and (not row.schedules or run.schedule in row.schedules)
    )


def _verdict(outcome: Outcome, world: int, rows: Sequence[Row], skips: Sequence[Skip]) -> Verdict:
    if outcome.outcome == "skipped":
        reason = _skip_reason(outcome.cause, world, skips)
        return Verdict(outcome, reason, unexpected="" if reason else UNEXPECTED_SKIP)
    row = next((row for row in rows if any(fnmatchcase(outcome.test, pattern) for pattern in row.tests)), None)
    if outcome.outcome == "passed":
        return Verdict(outcome, unexpected=UNEXPECTED_PASS if row and not row.sometimes else "")
    return Verdict(outcome, row.reason, row.why) if row else Verdict(outcome, unexpected=UNEXPECTED_FAILURE)


def _skip_reason(message: str, world: int, skips: Sequence[Skip]) -> str:
    """Return the reason of a skip, or nothing: a skip for want of a device that is there is none."""
    if (devices := _DEVICES.search(message)) and int(devices[1]) <= world:
        return ""
    return next((skip.reason for skip in skips if re.search(skip.message, message)), "")
