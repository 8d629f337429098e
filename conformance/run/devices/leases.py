"""Leases: which process may use which device, or how many processors, among all sessions of a user on a machine.

A slot (a device, or a share of the processors) is a file with a lock (flock) on it. A lease is all the slots that a
world needs, or none: a process never waits with some of them in hand, so no two can wait for each other. Who asks
takes a ticket, and those with older tickets are served first if they could use the same slots, so that a wide world is
not starved by narrow ones. Slots and tickets of a process that died are free at once: the kernel drops their locks.

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
    """Slots that nobody else has until `release`, or until the last process with the locks open has died."""

    slots: tuple[str, ...]
    fds: tuple[int, ...]
    """Open files with the locks; a child that inherits them holds the lease too."""
    waited_s: float

    def release(self) -> None:
        """Free the slots, even if children still have the locks open. Once."""
        for fd in self.fds:
            fcntl.flock(fd, fcntl.LOCK_UN)
        self.leave_to_heirs()

    def leave_to_heirs(self) -> None:
        """The slots are free when the last child that has inherited the locks is gone. Instead of `release`."""
        for fd in self.fds:
            os.close(fd)


class Leases:
    """Hands out some of `slots`: names of devices, the same in every session, such as `GPU-<uuid>` or `cpu0`.

    Raises ValueError for slots that are no file names or are given twice, LeaseError for a directory that cannot be
    used, or that belongs to somebody else.
    """

    def __init__(self, slots: Sequence[str], *, directory: Path | None = None) -> None:
        if len(set(slots)) < len(slots) or any(not slot or "/" in slot or slot.startswith(".") for slot in slots):
            raise ValueError(f"slots are {list(slots)}: give each device one name, usable as the name of a file")
        self.slots = tuple(slots)
        self._directory = directory or default_directory()
        _make_private(self._directory)

    def take(self, count: int, *, limit_s: float = LIMIT_S) -> Lease:
        """Wait for any `count` of the slots, in the order of asking.

        Raises ValueError if there are not so many, LeaseError after `limit_s`.
        """
        if not 1 <= count <= len(self.slots):
            raise ValueError(f"{count} slots are asked for, there are {len(self.slots)}: {', '.join(self.slots)}")
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
        """Whether anybody waits for slots of these."""
        with self._mutex():
            return self._is_behind(None)

    @contextmanager
    def _mutex(self) -> Iterator[None]:
        """Held for some file operations, never while waiting for anything else."""
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
        """Whether an older ticket (with None: any) is for slots of these. Tickets of the dead are removed."""
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
        """Open locks of `count` slots by name, or of none."""
        found: dict[str, int] = {}
        for slot in self.slots:
            fd = os.open(self._directory / f"slot-{slot}", os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                continue
            os.truncate(fd, 0)
            os.write(fd, f"process {os.getpid()}".encode())
            found[slot] = fd
            if len(found) == count:
                return found
        for fd in found.values():
            os.close(fd)
        return {}

    def _holders(self) -> str:
        files = {slot: self._directory / f"slot-{slot}" for slot in self.slots}
        texts = [f"{slot}: {file.read_text()}" for slot, file in files.items() if file.exists() and _is_locked(file)]
        return ", ".join(texts) or "nobody, but others wait longer"


def default_directory() -> Path:
    """The same for all sessions of a user: `$CONFORMANCE_LEASE_DIR`, or in `$XDG_RUNTIME_DIR`, or in /tmp.

    `su` and containers may hand on the name of a runtime directory that is not there, or is another user's.
    """
    chosen = os.environ.get(DIRECTORY_VARIABLE)
    if chosen:
        return Path(chosen)
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK):
        return Path(runtime, "fsdp2-tp-conformance")
    return Path(tempfile.gettempdir(), f"fsdp2-tp-conformance-{os.getuid()}")


def waiting() -> int:
    """How many worlds wait for slots now, of whatever session."""
    return len(list(default_directory().glob(f"{_TICKET}*")))


def processor_slots() -> tuple[str, ...]:
    """One for each processor that this process may run on."""
    return tuple(f"cpu{number}" for number in sorted(os.sched_getaffinity(0)))


def _make_private(directory: Path) -> None:
    """The directory exists and is this user's own: else anybody could hold the locks."""
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
    """Whether some process holds the file's lock."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
