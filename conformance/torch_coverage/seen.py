"""Branches and values of parameters that runs have seen, as files of records and reports hold them."""

from collections.abc import Iterable
from pathlib import Path

import msgspec

from reference_trainer.checks import UsageError

Jump = tuple[int, int]
"""Line before and line after; a negative number is the first line of a function that is entered or left."""
VARIABLE = "CONFORMANCE_TORCH_COVERAGE"
"""Environment variable of ranks that measure coverage."""
SEEN_FILES = "torch-coverage-*.msgpack"
"""Pattern of the files that ranks leave in the directory of a record."""
REPORT_FILE = "torch_coverage.json"
"""File of a report directory with all that the session's judged runs have seen."""


class Seen(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Jumps between lines of torch's files, and uses of its interfaces."""

    torch: str = ""
    """Version of torch."""
    jumps: dict[str, set[Jump]] = {}
    """By file, below torch's directory."""
    values: dict[str, dict[str, set[str]]] = {}
    """Values other than the default, in short, by callable and parameter; a callable without any was called, too."""
    pairs: dict[str, set[tuple[str, str]]] = {}
    """Parameters that one call gave values other than their defaults, in order of the alphabet, by callable."""

    def add(self, other: "Seen") -> None:
        """Add the coverage by other runs of the same torch. Raises UsageError for another version."""
        self.torch = self.torch or other.torch
        if self.torch != other.torch:
            raise UsageError(f"coverage of torch {self.torch} and of {other.torch} cannot be added: lines differ")
        for file, jumps in other.jumps.items():
            self.jumps.setdefault(file, set()).update(jumps)
        for name, values in other.values.items():
            mine = self.values.setdefault(name, {})
            for parameter, described in values.items():
                mine.setdefault(parameter, set()).update(described)
        for name, pairs in other.pairs.items():
            self.pairs.setdefault(name, set()).update(pairs)


def seen_in_records(directory: Path, records: Iterable[str]) -> Seen:
    """Return the coverage by the runs with these records, folders of a directory, together."""
    total = Seen()
    for record in sorted(records):
        for file in sorted((directory / record).glob(SEEN_FILES)):
            total.add(msgspec.msgpack.decode(file.read_bytes(), type=Seen))
    return total


def read_seen(report: Path) -> Seen:
    """Return the coverage by the session of a report. Raises UsageError if it has measured no coverage of torch."""
    file = report / REPORT_FILE
    try:
        return msgspec.json.decode(file.read_bytes(), type=Seen)
    except OSError:
        raise UsageError(f"{file}: there is none; run the session with --torch-coverage") from None
    except msgspec.DecodeError as error:
        raise UsageError(f"{file}: cut off, or of another version of the suite: {error}") from None
