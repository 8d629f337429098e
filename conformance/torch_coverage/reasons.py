"""Reasons for targets that the suite leaves on purpose, from left.yaml; one that matches nothing is an error."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from conformance.plan.content import Text
from reference_trainer.checks import UsageError
from reference_trainer.strict_yaml import convert, load

LEFT_FILE = Path(__file__).with_name("left.yaml")


class Target(NamedTuple):
    """Branch, function, parameter or pair of parameters of torch."""

    kind: Literal["branch", "function", "parameter", "pair"]
    area: str
    place: str
    """`FILE:FUNCTION` of code, or the public name of a callable."""
    what: str
    """Lines of a branch, first line of a function, or names of parameters."""
    is_seen: bool
    values: str = ""
    """Values of a parameter that were seen."""
    code: str = ""
    """Code of a branch: the line where it begins, and the one to which it leads, `LINE -> LINE`."""


class Reason(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Reason for which targets are left."""

    places: list[Text]
    """Patterns of places, see `Target.place`; `*` stands for any characters."""
    what: Text = "*"
    """Pattern of parameters, pairs or lines."""
    code: Text | None = None
    """Pattern of the code of branches, such as `* -> raise *`, which holds in other versions, too; no other targets."""
    reason: Text

    def matches(self, target: Target, pattern: str) -> bool:
        """Return whether a target is left by one of the patterns."""
        is_such_code = self.code is None or (target.kind == "branch" and fnmatchcase(target.code, self.code))
        return is_such_code and fnmatchcase(target.place, pattern) and fnmatchcase(target.what, self.what)


class _Left(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    left: list[Reason]


def read_reasons(file: Path = LEFT_FILE) -> list[Reason]:
    """Return the reasons in a file. Raises UsageError for a file that cannot be read."""
    return convert(load(file), _Left).left


def left_on_purpose(targets: Sequence[Target], reasons: Sequence[Reason]) -> dict[Target, Reason]:
    """Return the targets that were not seen and are left, with the first reason of each.

    Raises UsageError for a pattern that matches no target, seen or not: what it speaks of is not in this torch.
    """
    left: dict[Target, Reason] = {}
    for reason in reasons:
        for pattern in reason.places:
            matching = [target for target in targets if reason.matches(target, pattern)]
            if not matching:
                what = reason.what if reason.code is None else reason.code
                raise UsageError(f"left.yaml: nothing in this torch matches `{pattern}`, {what}: remove it")
            for target in matching:
                if not target.is_seen:
                    left.setdefault(target, reason)
    return left
