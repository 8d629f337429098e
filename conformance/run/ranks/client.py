"""The pytest worker's side of a rank and of the rank server: requests, messages and ends.

Nothing here imports torch, and nothing waits without a limit.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import msgspec

from conformance.run.devices.leases import Lease
from conformance.run.failures import PoolError
from conformance.run.ranks.flight_recorder import summary
from conformance.run.ranks.messages import (
    DUMP_SIGNAL,
    DUMPED,
    OUTPUT_TAIL_BYTES,
    READY,
    STACK_BYTES,
    BuryRanks,
    RankFiles,
    RankReport,
    StartRanks,
    read_head,
    read_tail,
)

START_LIMIT_S = 120.0
DUMP_LIMIT_S = 2.5
END_LIMIT_S = 10.0
DATAGRAM_BYTES = 65536

# The frames of a rank below the task's function are the same in every stack and tell nothing.
ENGINE_FRAMES = re.compile(r'^  File ".*run/ranks/process\.py", line \d+ in _call\n(  File .*\n)*', re.MULTILINE)


class RankHandle:
    """One rank as its pool sees it: a socket that tells of messages, and a pidfd that tells of its end."""

    def __init__(self, rank: int, *, pid: int, bell: socket.socket, directory: Path) -> None:
        self.rank = rank
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self.files = RankFiles(directory, rank)
        self._bell = bell
        self._silent = False

    @property
    def watched(self) -> list[socket.socket | int]:
        return [self.pidfd] if self._silent else [self._bell, self.pidfd]

    def ring(self, number: bytes) -> None:
        with suppress(OSError):  # a rank that has died since is found by its pidfd
            self._bell.send(number)

    def poll(self, number: bytes) -> RankReport | None:
        """The rank's report on message `number` if it has one or has died, else None."""
        message = self._receive()
        if message == number:
            return self._read_report(number)
        if len(message) > 1:  # one byte only tells of a signal
            return self._died("sent garbage instead of a report")
        return self._died() if self._has_ended() else None

    def request_dump(self) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, DUMP_SIGNAL)

    def has_dumped(self) -> bool:
        """Whether the stacks are complete, or never will be."""
        return self._receive() == DUMPED or self._has_ended()

    def illustrate(self, report: RankReport) -> RankReport:
        """`report` with the end of the rank's output, with the stacks of a rank that did not end its task, and with
        the last collectives of one that has dumped them."""
        stack = read_head(self.files.stack, size_bytes=STACK_BYTES) if report.state in ("hung", "died") else ""
        collectives = "" if report.state == "finished" else summary(self.files.flight)
        return msgspec.structs.replace(
            report, stack=ENGINE_FRAMES.sub("", stack), collectives=collectives, output_tail=self.output_tail()
        )

    def output_tail(self) -> str:
        return read_tail(self.files.output, size_bytes=OUTPUT_TAIL_BYTES)

    def close(self) -> None:
        self._bell.close()
        os.close(self.pidfd)

    def _has_ended(self) -> bool:
        return bool(wait([self.pidfd], timeout=0))

    def _receive(self) -> bytes:
        """The next message, or b"" if there is none."""
        try:
            message = self._bell.recv(DATAGRAM_BYTES)
        except BlockingIOError:
            return b""
        except OSError:
            message = b""
        # The end of the stream stays readable for ever; from now on only the pidfd is worth waiting for.
        self._silent = not message
        return message

    def _read_report(self, number: bytes) -> RankReport:
        if number == READY:
            return RankReport(rank=self.rank, state="finished")
        try:
            return msgspec.msgpack.decode(self.files.report.read_bytes(), type=RankReport)
        except (OSError, msgspec.DecodeError) as error:
            return self._died(f"left an unreadable report: {error}")

    def _died(self, message: str = "") -> RankReport:
        return RankReport(rank=self.rank, state="died", stamp_s=time.monotonic(), message=message)


class ServerProcess:
    """The rank server as its owner sees it. Any interrupted or failed request ends it with all its ranks."""

    def __init__(self) -> None:
        self.closed = False
        self.directory = Path(tempfile.mkdtemp(prefix="conformance-ranks-"))
        self._log = self.directory / "server.log"
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(START_LIMIT_S)
        with theirs, self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-c", _server_code(theirs.fileno(), self.directory)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_server_environment(),
                start_new_session=True,  # Ctrl-C reaches the owner only
            )

    def start(self, ranks: range, *, world_size: int, directory: Path, lease: Lease | None) -> list[RankHandle]:
        """Fork these ranks of a world; they hold the lease too, each has one of its devices."""
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in ranks]
        slots, locks = (lease.slots, lease.fds) if lease else ((), ())
        devices = tuple(slots[place % len(slots)] for place in range(len(ranks))) if slots else ()
        request = StartRanks(list(ranks), world_size=world_size, directory=str(directory), devices=devices)
        pids = self._ask(request, fds=[*(theirs.fileno() for _, theirs in pairs), *locks])
        handles = []
        for rank, pid, (ours, theirs) in zip(ranks, pids, pairs, strict=True):
            theirs.close()
            ours.setblocking(False)
            handles.append(RankHandle(rank, pid=pid, bell=ours, directory=directory))
        return handles

    def bury(self, pids: list[int]) -> list[int | None]:
        """Kill ranks with their descendants; return their exit codes (None: unknown)."""
        return [None] * len(pids) if self.closed else self._ask(BuryRanks(pids=pids))

    def close(self) -> None:
        """End the server; it ends all ranks and removes their files before."""
        if self.closed:
            return
        self.closed = True
        self._control.close()
        try:
            self._process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _ask(self, request: StartRanks | BuryRanks, *, fds: Sequence[int] = ()) -> list[Any]:
        try:
            socket.send_fds(self._control, [msgspec.json.encode(request)], fds)
            answer = self._control.recv(DATAGRAM_BYTES)
            if not answer:
                raise ConnectionError("it closed the connection")
        except OSError as error:
            log = read_tail(self._log, size_bytes=OUTPUT_TAIL_BYTES)
            self.close()
            raise PoolError(f"the rank server failed: {error}\n{log}".rstrip()) from error
        except BaseException:  # Ctrl-C: the answer to this request must not be taken for that to the next one
            self.close()
            raise
        return msgspec.json.decode(answer, type=list[Any])


def dump_stacks(ranks: Iterable[RankHandle]) -> None:
    """Let ranks write their stacks to their files; give up on those that cannot within `DUMP_LIMIT_S` together."""
    remaining = list(ranks)
    for rank in remaining:
        rank.request_dump()
    until_s = time.monotonic() + DUMP_LIMIT_S
    while remaining:
        watched = [handle for rank in remaining for handle in rank.watched]
        if not wait(watched, timeout=max(0.0, until_s - time.monotonic())):
            return
        remaining = [rank for rank in remaining if not rank.has_dumped()]


def _server_code(control_fd: int, directory: Path) -> str:
    """The server's program. It imports like its owner, and its `__main__` is empty: nothing of pytest comes along.

    What it imports stays, so looking for garbage among it, a quarter of the time that it takes, is put off.
    """
    path = [os.path.abspath(entry) for entry in sys.path]
    return (
        f"import gc, sys; gc.disable(); sys.path[:] = {path!r}; "
        f"from conformance.run.ranks.server import main; main({control_fd}, {str(directory)!r})"
    )


def _server_environment() -> dict[str, str]:
    """One thread per library (ranks set the number of torch's threads themselves), and gloo on the loopback."""
    single = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    return {"GLOO_SOCKET_IFNAME": "lo", **os.environ, **single}
