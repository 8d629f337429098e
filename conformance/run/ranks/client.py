"""Ranks and the rank server as the pytest worker sees them: requests, messages and ends.

No call waits without a time limit.
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

from conformance.run.devices.hardware import ONE_THREAD
from conformance.run.devices.leases import Lease
from conformance.run.failures import PoolError
from conformance.run.ranks.flight_recorder import summary
from conformance.run.ranks.messages import (
    DUMP_SIGNAL,
    DUMPED,
    OUTPUT_TAIL_BYTES,
    READY,
    STACK_BYTES,
    KillRanks,
    RankFiles,
    RankReport,
    StartRanks,
    StartTemplate,
    Template,
    read_head,
    read_tail,
)
from conformance.run.ranks.preload import EXPERIMENTS

START_LIMIT_S = 120.0
DUMP_LIMIT_S = 2.5
END_LIMIT_S = 10.0
DATAGRAM_BYTES = 65536

# The frames of a rank below the task's function are the same in every stack and carry no information.
_DUMP_BYTES = 8 * STACK_BYTES
_THREAD = re.compile(r"^(?=(?:Current thread|Thread) 0x)", re.MULTILINE)
FRAMES_BELOW_TASK = re.compile(r'^  File ".*run/ranks/process\.py", line \d+ in _call\n(  File .*\n)*', re.MULTILINE)


class RankHandle:
    """One rank as its pool sees it: a channel for notifications, and a pidfd, readable once the rank has ended."""

    def __init__(self, rank: int, *, pid: int, channel: socket.socket, directory: Path) -> None:
        self.rank = rank
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self.files = RankFiles(directory, rank)
        self._channel = channel
        self._silent = False

    @property
    def watched(self) -> list[socket.socket | int]:
        """Handles that become readable when the rank sends a message or ends."""
        return [self.pidfd] if self._silent else [self._channel, self.pidfd]

    def notify(self, number: bytes) -> None:
        """Notify the rank of its assignment, task `number`."""
        with suppress(OSError):  # the pidfd shows that the rank has died
            self._channel.send(number)

    def poll(self, number: bytes) -> RankReport | None:
        """Return the rank's report on task `number` if the rank has finished the task or died, else None."""
        message = self._receive()
        if message == number:
            return self._read_report(number)
        if len(message) > 1:  # a message of one byte is the number of a signal
            return self._died("sent garbage instead of a report")
        return self._died() if self._has_ended() else None

    def request_dump(self) -> None:
        """Ask the rank for a dump of its stacks."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, DUMP_SIGNAL)

    def has_dumped(self) -> bool:
        """Return whether the dump of the stacks is complete, or impossible."""
        return self._receive() == DUMPED or self._has_ended()

    def with_diagnostics(self, report: RankReport) -> RankReport:
        """Return `report` with diagnostics attached.

        Diagnostics are the end of the rank's output, the stacks of a rank that did not end its task, and the last
        collectives of a rank whose flight recorder has dumped them.
        """
        stack = ""
        if report.state in ("hung", "died"):
            stack = task_first(read_head(self.files.stack, size_bytes=_DUMP_BYTES))[:STACK_BYTES]
        collectives = "" if report.state == "finished" else summary(self.files.flight)
        return msgspec.structs.replace(
            report, stack=FRAMES_BELOW_TASK.sub("", stack), collectives=collectives, output_tail=self.output_tail()
        )

    def output_tail(self) -> str:
        """Return the end of the rank's output."""
        return read_tail(self.files.output, size_bytes=OUTPUT_TAIL_BYTES)

    def close(self) -> None:
        """Close the channel and the pidfd; the rank itself is left alone."""
        self._channel.close()
        os.close(self.pidfd)

    def _has_ended(self) -> bool:
        return bool(wait([self.pidfd], timeout=0))

    def _receive(self) -> bytes:
        """Return the next message, or b"" if there is none."""
        try:
            message = self._channel.recv(DATAGRAM_BYTES)
        except BlockingIOError:
            return b""
        except OSError:
            message = b""
        # The end of a stream stays readable for ever; from now on only the pidfd is worth waiting for.
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
    """Rank server as its owner sees it; an interrupted or failed request ends the server with all its ranks."""

    def __init__(self, *, tasks: str = EXPERIMENTS) -> None:
        """Start the server, with the modules that a session's `tasks` need, see `preload`."""
        self.closed = False
        self.directory = Path(tempfile.mkdtemp(prefix="conformance-ranks-"))
        self._log = self.directory / "server.log"
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(START_LIMIT_S)
        with theirs, self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-c", _server_code(theirs.fileno(), self.directory, tasks)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_server_environment(),
                start_new_session=True,  # Ctrl-C reaches the owner only
            )

    def start_template(self, template: Template) -> None:
        """Start a template, which makes its call while this process does something else."""
        self._ask(StartTemplate(template))

    def start(
        self,
        ranks: range,
        *,
        world_size: int,
        directory: Path,
        lease: Lease | None,
        compiles: bool = False,
        template: Template | None = None,
    ) -> list[RankHandle]:
        """Fork these ranks of a world; each holds the lease too and has one of its devices."""
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in ranks]
        slots, locks = (lease.slots, lease.fds) if lease else ((), ())
        devices = tuple(slots[index % len(slots)] for index in range(len(ranks))) if slots else ()
        request = StartRanks(
            list(ranks),
            world_size=world_size,
            directory=str(directory),
            devices=devices,
            compiles=compiles,
            template=template,
        )
        pids = self._ask(request, fds=[*(theirs.fileno() for _, theirs in pairs), *locks])
        handles = []
        for rank, pid, (ours, theirs) in zip(ranks, pids, pairs, strict=True):
            theirs.close()
            ours.setblocking(False)
            handles.append(RankHandle(rank, pid=pid, channel=ours, directory=directory))
        return handles

    def kill_and_reap(self, pids: list[int]) -> list[int | None]:
        """Kill ranks with their descendants; returns the exit code of each rank (None: unknown)."""
        return [None] * len(pids) if self.closed else self._ask(KillRanks(pids=pids))

    def close(self) -> None:
        """End the server, which first ends all ranks and removes their files."""
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

    def _ask(self, request: StartRanks | StartTemplate | KillRanks, *, fds: Sequence[int] = ()) -> list[Any]:
        try:
            socket.send_fds(self._control, [msgspec.json.encode(request)], fds)
            answer = self._control.recv(DATAGRAM_BYTES)
            if not answer:
                raise ConnectionError("it closed the connection")
        except OSError as error:
            log = read_tail(self._log, size_bytes=OUTPUT_TAIL_BYTES)
            self.close()
            raise PoolError(f"the rank server failed: {error}\n{log}".rstrip()) from error
        except BaseException:  # Ctrl-C: the next request must not take the answer to this request for its own
            self.close()
            raise
        return msgspec.json.decode(answer, type=list[Any])


def task_first(dump: str) -> str:
    """Return a dump of all threads by `faulthandler` in which the one that performs the task comes first.

    It is the current one, or else the oldest one, which the dump tells last: a progress bar has threads, too.
    """
    before, *threads = _THREAD.split(dump)
    if len(threads) < 2:
        return dump
    ended = [thread if thread.endswith("\n\n") else f"{thread.rstrip()}\n\n" for thread in threads]
    current = next((thread for thread in ended if thread.startswith("Current")), ended[-1])
    return "".join([before, current, *(thread for thread in ended if thread is not current)])


def dump_stacks(ranks: Iterable[RankHandle]) -> None:
    """Let ranks write their stacks to their files; gives up on ranks that need longer than `DUMP_LIMIT_S` together."""
    remaining = list(ranks)
    for rank in remaining:
        rank.request_dump()
    until_s = time.monotonic() + DUMP_LIMIT_S
    while remaining:
        watched = [handle for rank in remaining for handle in rank.watched]
        if not wait(watched, timeout=max(0.0, until_s - time.monotonic())):
            return
        remaining = [rank for rank in remaining if not rank.has_dumped()]


def _server_code(control_fd: int, directory: Path, tasks: str) -> str:
    """Return the server's program, which has its owner's import path and an empty `__main__`, without pytest.

    Imported modules stay, so garbage collection, a quarter of the time of the imports, is disabled during imports.
    """
    path = [os.path.abspath(entry) for entry in sys.path]
    return (
        f"import gc, sys; gc.disable(); sys.path[:] = {path!r}; "
        f"from conformance.run.ranks.server import main; main({control_fd}, {str(directory)!r}, {tasks!r})"
    )


def _server_environment() -> dict[str, str]:
    """Return an environment with one thread per library (ranks set that of torch) and gloo on the loopback."""
    return {"GLOO_SOCKET_IFNAME": "lo", **os.environ, **ONE_THREAD}
