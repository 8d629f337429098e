"""Record of runs of PyTorch's tests, which the generated tables are made from."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec

from conformance.sim_runs.pytorch_tests.races import FileRaces
from conformance.sim_runs.pytorch_tests.running import FileRun


class Versions(NamedTuple):
    """Versions that a run is about."""

    torch: str
    """Version of the installed torch."""
    checkout: str
    """Release of torch that the tests are of."""


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Runs of test files, and searches for races in them, with the same versions."""

    torch: str
    checkout: str
    runs: tuple[FileRun, ...] = ()
    races: tuple[FileRaces, ...] = ()

    @property
    def versions(self) -> Versions:
        """Versions of all runs and searches."""
        return Versions(self.torch, self.checkout)


def read_records(file: Path) -> list[Record]:
    """Return the records of a file, none if there is no such file."""
    return msgspec.json.decode(file.read_bytes(), type=list[Record]) if file.exists() else []


def as_json(records: Iterable[Record]) -> bytes:
    """Return records as the text of a file."""
    return msgspec.json.format(msgspec.json.encode(list(records)), indent=1) + b"\n"


def merged(records: Iterable[Record], new: Record) -> list[Record]:
    """Return the records with the runs of a new one, which replace earlier runs of the same file and setting."""
    records = list(records)
    others = [record for record in records if record.versions != new.versions]
    same = [record for record in records if record.versions == new.versions]
    runs = {_key(run): run for record in (*same, new) for run in record.runs}
    races = {(search.file, search.world): search for record in (*same, new) for search in record.races}
    both = Record(
        *new.versions,
        runs=tuple(runs[key] for key in sorted(runs)),
        races=tuple(races[key] for key in sorted(races)),
    )
    return sorted([*others, both], key=lambda record: record.versions)


def _key(run: FileRun) -> tuple[str, int, str, str]:
    return run.file, run.world, run.device, run.schedule
