"""Checkout of PyTorch that the user has: its version and its test files, by area."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import msgspec
from packaging.version import InvalidVersion

from conformance.torch_release import release
from reference_trainer.checks import UsageError
from reference_trainer.strict_yaml import convert, load

_AREAS_FILE = Path(__file__).with_name("areas.yaml")


class Areas(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content of areas.yaml."""

    areas: dict[str, tuple[str, ...]]
    """Folders and files below `test/`, by the name of the area."""
    left_out: dict[str, str]
    """Reasons, by pattern of files."""


@dataclass(frozen=True)
class File:
    """Test file of a checkout."""

    area: str
    name: str
    """Path below `test/`."""


@dataclass(frozen=True)
class Checkout:
    """Folder `test` of a checkout of PyTorch."""

    tests: Path
    version: str
    """Release of torch that the tests are of, such as 2.6."""

    @classmethod
    def at(cls, directory: Path) -> "Checkout":
        """Return the checkout at a path, or around it if the path is its folder `test`.

        Raises UsageError unless the checkout has a version and distributed tests.
        """
        root = directory.resolve()
        root = root.parent if root.name == "test" else root
        version = root / "version.txt"
        if not version.is_file() or not (root / "test" / "distributed").is_dir():
            raise UsageError(f"{directory} is no checkout of PyTorch: it needs version.txt and test/distributed")
        text = version.read_text().strip()
        try:
            return cls(root / "test", ".".join(map(str, release(text))))
        except InvalidVersion:
            raise UsageError(f"{version} has no version of torch: {text}") from None

    def files(self, patterns: Sequence[str] = ()) -> list[File]:
        """Return the files of all areas whose path below `test/` or name matches one of the patterns, in order.

        Raises UsageError if there is none.
        """
        content = _read_areas()
        files = [
            File(area, name)
            for area, places in content.areas.items()
            for place in places
            for name in self._files_of(place)
            if not _is_any(name, content.left_out) and (not patterns or _is_any(name, [f"*{p}*" for p in patterns]))
        ]
        if not files:
            raise UsageError(f"no test file of {self.tests} matches {', '.join(patterns) or 'any area'}")
        return files

    def _files_of(self, place: str) -> Iterator[str]:
        path = self.tests / place
        found = sorted(path.glob("test_*.py")) if path.is_dir() else [path] if path.is_file() else []
        yield from (str(file.relative_to(self.tests)) for file in found)


def _is_any(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


@cache
def _read_areas() -> Areas:
    return convert(load(_AREAS_FILE), Areas)
