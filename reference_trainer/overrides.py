"""Overrides: values from the command line (`--set KEY=VALUE`), laid over a configuration file."""

import copy
import dataclasses
from collections.abc import Iterable
from typing import Any

from reference_trainer.checks import UsageError
from reference_trainer.strict_yaml import ConfigError, Document, parse_scalar


@dataclasses.dataclass(frozen=True)
class _Overridden(Document):
    """Document of which some values came from the command line, and whose errors say so."""

    origins: dict[str, str]
    """Option that gave each path: `--set mesh.tp=2` that of `$.mesh.tp`."""

    def location(self, where: str) -> str:
        """Return the option that gave the value, else FILE:LINE; then the options that gave values below it."""
        own = self.origins.get(where) or super().location(where)
        below = [option for path, option in self.origins.items() if path.startswith(f"{where}.")]
        return " with ".join(dict.fromkeys([own, *below]))


def override(document: Document, assignments: Iterable[str]) -> Document:
    """Return the document with each `section.field=value` set, one after the other; missing sections are added.

    Raises ConfigError, beginning with the option, for an assignment that is not of this form.
    """
    result = _Overridden(document.path, copy.deepcopy(document.data), document.lines, origins={})
    for assignment in assignments:
        option = f"--set {assignment}"
        key, separator, text = assignment.partition("=")
        names = key.split(".")
        if not separator or not all(names):
            raise ConfigError(f"{option}: write KEY=VALUE, for example mesh.tp=2")
        try:
            value = parse_scalar(text)
        except UsageError as error:
            raise ConfigError(f"{option}: {error}") from None
        _assign(result, names, value, option)
    return result


def _assign(document: _Overridden, names: list[str], value: Any, option: str) -> None:
    section, where = document.data, "$"
    for name in names[:-1]:
        where += f".{name}"
        if name not in section:
            section[name] = {}
            document.origins[where] = option
        section = section[name]
        if not isinstance(section, dict):
            field = where.removeprefix("$.")
            raise ConfigError(f"{option}: {field} is a value, not a section: write {field}=VALUE")
    section[names[-1]] = value
    document.origins[f"{where}.{names[-1]}"] = option
