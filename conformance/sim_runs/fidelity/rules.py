"""Table of the rules of the simulated device's model: the rows of rules.yaml."""

from functools import cache
from pathlib import Path

import msgspec

from conformance.project import PACKAGE
from reference_trainer.strict_yaml import convert, load

FILE = Path(__file__).with_name("rules.yaml")
SOURCES = PACKAGE / "sim" / "csrc"
Fact = bool | int | str
"""Measured value: a number of bytes or streams, a truth, or a name."""


class Rule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rule of the behaviour of a device, which the simulated one follows unless it has a `deviation`."""

    rule: str
    """One sentence."""
    files: tuple[str, ...] = ()
    """Files of `conformance/sim/csrc` that follow the rule, or deviate from it."""
    sources: tuple[str, ...] = ()
    """Addresses of documentation or source code that says so; empty for an unverified rule."""
    deviation: str = ""
    """Behaviour of the simulated device instead; empty if it follows the rule."""
    unmeasured: str = ""
    """Reason why no probe measures the rule; empty if one does."""
    since: str = ""
    """First release of torch in which the simulated device follows the rule; empty for all."""
    expected: dict[str, Fact] = {}
    """Facts that the probe with the rule's id must find on a device.

    Facts without an expected value are shown and not judged."""

    def __post_init__(self) -> None:
        """Raise ValueError for a rule with facts that nothing measures."""
        if self.unmeasured and self.expected:
            raise ValueError("a rule without a probe has no expected facts")


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content of rules.yaml."""

    areas: dict[str, dict[str, Rule]]
    """Rules by id, by area of the model."""
    without_rules: dict[str, str]
    """Files of `conformance/sim/csrc` that follow no rule of a device, with the reason."""


@cache
def table() -> Table:
    """Return the table. Raises ConfigError for a wrong row."""
    return convert(load(FILE), Table)


def areas() -> dict[str, dict[str, Rule]]:
    """Return the rules by id, by area of the model, in the order of the table."""
    return table().areas


def rules() -> dict[str, Rule]:
    """Return all rules by id, in the order of the table."""
    return {name: rule for area in areas().values() for name, rule in area.items()}
