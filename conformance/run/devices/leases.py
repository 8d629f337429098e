"""Leases of devices and processors, coordinated among all sessions of a user on a machine.

A slot (a device, or a processor) is a file with a lock (flock). A lease covers all slots that a world needs, or none: a
process never waits while holding slots, so no two processes can wait for each other. A process that asks takes a
ticket, and older tickets for the same slots are served first, so that narrow worlds do not starve a wide one. Slots and
tickets of a process that died are free at once: the kernel drops their locks.

Locks belong to open files, which children inherit: ranks that outlive their pytest worker keep their devices.
"""

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

DIRECTORY_VARIABLE = "CONFORMANCE_LEASE_DIR"
LIMIT_S = 3600.0
_POLL_S = 0.01
_TICKET = "ticket-"


class LeaseError(RuntimeError):
    """No lease within the limit, or no directory for the locks."""


@dataclass(frozen=True)
class Lease:
    """Exclusively held slots, until `release` or the death of the last process that has the locks open."""

    slots: tuple[str, ...]
    fds: tuple[int, ...]
    """Open files with the locks; a child that inherits these files holds the lease too."""
    waited_s: float

    def release(self) -> None:
        """Free the slots, even if children still have the locks open; to be called once."""
        for fd in self.fds:
            fcntl.flock(fd, fcntl.LOCK_UN)
        self.detach()

    def detach(self) -> None:
        """Leave the lease to the children that inherited the locks: it ends with the last of them.

        To be called instead of `release`.
        """
        for fd in self.fds:
            os.close(fd)


class Leases:
    """Source of leases on `slots`: names that are the same in every session, such as `GPU-<uuid>` or `cpu0`.

    Raises ValueError for slots that are no file names or are given twice, LeaseError for a directory that cannot be
    used, or that belongs to another user.
    """

    def __init__(self, slots: Sequence[str], *, directory: Path | None = None) -> None:
        if len(set(slots)) < len(slots) or any(not slot or "/" in slot or slot.startswith(".") for slot in slots):
            raise ValueError(f"slots are {list(slots)}: give each device one name, usable as the name of a file")
        self.slots = tuple(slots)
        self._directory = directory or default_directory()
        _make_private(self._directory)

    def take(self, count: int, *, limit_s: float = LIMIT_S) -> Lease:
        """Wait for any `count` of the slots, first come, first served.

        Raises ValueError if there are fewer slots, LeaseError after `limit_s`.
        """
        if not 1 <= count <= len(self.slots):
            raise ValueError(f"cannot lease {count} of {len(self.slots)} slots: {', '.join(self.slots)}")
        start_s = time.monotonic()
        with self._ticket() as ticket:
            while True:
                with self._mutex():
                    fds = {} if self._is_behind(ticket) else self._lock(count)
                waited_s = time.monotonic() - start_s
                if fds:
                    return Lease(tuple(fds), tuple(fds.values()), waited_s)
                if waited_s > limit_s:
                    raise LeaseError(
                        f"no {count} of {', '.join(self.slots)} within {limit_s:g} s; held by: {self._holders()}"
                    )
                time.sleep(_POLL_S)

    def is_contended(self) -> bool:
        """Return whether a process waits for any of the slots."""
        with self._mutex():
            return self._is_behind(None)

    @contextmanager
    def _mutex(self) -> Iterator[None]:
        """Hold the mutex, for a few file operations and never while waiting for anything else."""
        fd = os.open(self._directory / "mutex", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    @contextmanager
    def _ticket(self) -> Iterator[Path]:
        with self._mutex():
            last = max((_number(path) for path in self._tickets()), default=0)
            path = self._directory / f"{_TICKET}{last + 1:016d}"
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            fcntl.flock(fd, fcntl.LOCK_EX)
            os.write(fd, msgspec.json.encode(self.slots))
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)
            os.close(fd)

    def _is_behind(self, mine: Path | None) -> bool:
        """Return whether an older ticket (None: any ticket) is for any of the slots; removes tickets of the dead."""
        for path in self._tickets():
            if mine is not None and _number(path) >= _number(mine):
                continue
            with suppress(FileNotFoundError):
                if _is_locked(path):
                    if set(msgspec.json.decode(path.read_bytes(), type=list[str])) & set(self.slots):
                        return True
                else:
                    path.unlink()
        return False

    def _tickets(self) -> list[Path]:
        return sorted(self._directory.glob(f"{_TICKET}*"))

    def _lock(self, count: int) -> dict[str, int]:
        """Return the open locks of `count` slots by name, or an empty dict if fewer are free."""
        fds: dict[str, int] = {}
        for slot in self.slots:
            fd = os.open(self._directory / f"slot-{slot}", os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                continue
            os.truncate(fd, 0)
            os.write(fd, f"process {os.getpid()}".encode())
            fds[slot] = fd
            if len(fds) == count:
                return fds
        for fd in fds.values():
            os.close(fd)
        return {}

    def _holders(self) -> str:
        files = {slot: self._directory / f"slot-{slot}" for slot in self.slots}
        holders = [f"{slot}: {file.read_text()}" for slot, file in files.items() if file.exists() and _is_locked(file)]
        return ", ".join(holders) or "nobody, but others wait longer"


def default_directory() -> Path:
    """Return the directory that all sessions of a user share for locks.

    It is `$CONFORMANCE_LEASE_DIR`, or else a directory in `$XDG_RUNTIME_DIR` or /tmp. `su` and containers may pass on
    the name of a runtime directory that does not exist or belongs to another user.
    """
    chosen = os.environ.get(DIRECTORY_VARIABLE)
    if chosen:
        return Path(chosen)
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK):
        return Path(runtime, "fsdp2-tp-conformance")
    return Path(tempfile.gettempdir(), f"fsdp2-tp-conformance-{os.getuid()}")


def waiting() -> int:
    """Return the number of worlds of all sessions that wait for slots now."""
    return len(list(default_directory().glob(f"{_TICKET}*")))


def processor_slots() -> tuple[str, ...]:
    """Return a slot for each processor on which this process may run."""
    return tuple(f"cpu{number}" for number in sorted(os.sched_getaffinity(0)))


def _make_private(directory: Path) -> None:
    """Make sure that the directory exists and belongs to this user, so that other users cannot hold the locks."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = directory.stat().st_uid
    except OSError as error:
        raise LeaseError(f"no directory for locks: {error}; set {DIRECTORY_VARIABLE} to a writable one") from error
    if owner != os.getuid():
        raise LeaseError(f"{directory} belongs to user {owner}: set {DIRECTORY_VARIABLE} to a directory of your own")


def _number(ticket: Path) -> int:
    return int(ticket.name.rpartition("-")[2])


def _is_locked(path: Path) -> bool:
    """Return whether a process holds the file's lock."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
