"""Record store: an unwritable record is reported as such, and no other error of a run is."""

import errno
from pathlib import Path

import msgspec
import pytest

from conformance.plan.cells import Cell
from conformance.run.record import Header, RecordFile
from conformance.run.store import Clock, RecordStore, Unwritable

HEADER = Header(cell=Cell(mesh="dp2"), session="s", torch="2.13.0", substrate="gloo", defect=None)


def store(directory: Path) -> RecordStore:
    return RecordStore(directory=directory, session="s", torch_version="2.13.0", defect=None, deadline_s=60)


@pytest.mark.parametrize("error", [OSError(errno.EMFILE, "Too many open files"), TimeoutError("no lease")])
def test_an_error_of_a_run_is_not_one_of_the_records(error: OSError, tmp_path: Path) -> None:
    def execute(_directory: Path) -> RecordFile:
        raise error

    with pytest.raises(type(error)) as raised:
        store(tmp_path).record(HEADER, execute, Clock())
    assert raised.value is error


def test_a_record_that_cannot_be_written_is_told_with_its_directory(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(Unwritable, match=rf"no record can be written to {file}: Not a directory"):
        store(file).record(HEADER, lambda _: RecordFile(header=HEADER), Clock())

    def remove(directory: Path) -> RecordFile:
        for each in directory.iterdir():
            each.unlink()
        directory.rmdir()
        return RecordFile(header=HEADER)

    with pytest.raises(Unwritable, match="No such file or directory"):
        store(tmp_path / "records").record(HEADER, remove, Clock())


def test_a_store_with_less_time_shares_what_was_read(tmp_path: Path) -> None:
    session_store = store(tmp_path)
    record = session_store.record(HEADER, lambda _: RecordFile(header=HEADER, ranks=msgspec.Raw(b"[]")), Clock())

    def execute(_directory: Path) -> RecordFile:
        raise AssertionError("recorded already")

    for limit_s in (3.0, 600.0):
        shorter = session_store.within(limit_s)
        assert shorter.record(HEADER, execute, Clock()) is record
        assert (shorter.deadline_s, session_store.deadline_s) == (min(limit_s, 60), 60)
