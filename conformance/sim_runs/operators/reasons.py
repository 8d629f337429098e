"""Reasons for operators whose results on the simulated device are not the CPU's, from reasons.yaml."""

from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import msgspec

from conformance.sim_runs.operators.cases import Case, Outcome
from reference_trainer.strict_yaml import convert, load

_FILE = Path(__file__).with_name("reasons.yaml")


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Cases that have a reason."""

    operators: tuple[str, ...]
    """Patterns of names, as of `fnmatch`."""
    reason: str
    why: str
    variants: tuple[str, ...] = ()
    """Variants; empty for all."""
    outcomes: tuple[Outcome, ...] = ()
    """Outcomes; empty for all but equal ones."""


class Reasons(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content of reasons.yaml."""

    reasons: dict[str, str]
    """Subject of each class of reasons, by name."""
    rows: tuple[Row, ...]

    def row(self, case: Case, outcome: Outcome) -> Row | None:
        """Return the first row that holds for the outcome of a case, if there is one."""
        return next((row for row in self.rows if _holds(row, case, outcome)), None)


@cache
def read_reasons(file: Path = _FILE) -> Reasons:
    """Return the reasons. Raises ConfigError for a mistake, such as a reason that is not listed."""
    document = load(file)
    reasons = convert(document, Reasons)
    for number, row in enumerate(reasons.rows):
        if row.reason not in reasons.reasons:
            raise document.error(f"$.rows[{number}].reason", f"no reason is called {row.reason!r}")
    return reasons


def _holds(row: Row, case: Case, outcome: Outcome) -> bool:
    return (
        any(fnmatchcase(case.operator, pattern) for pattern in row.operators)
        and (not row.variants or case.variant in row.variants)
        and (not row.outcomes or outcome in row.outcomes)
    )
