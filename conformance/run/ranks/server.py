"""Rank server: a single-threaded process that has torch loaded and forks ranks on request.

Why not the forkserver of `multiprocessing`: that one is global to the pytest worker and ends only with it, takes its
environment from `os.environ`, makes each child import the worker's `__main__` again, and cannot end the ranks of a
worker that was killed. This server belongs to one `Pools` object. It is the parent of all ranks, so it can kill ranks
without ever hitting a re-used process id, and it adopts processes that ranks leave behind (it is a "child subreaper").
When its owner closes the control socket or dies, the kernel closes the socket, and the server ends all ranks, then
itself. It needs Linux 5.3 or newer (pidfd).
"""

import ctypes
import gc
import os
import select
import shutil
import signal
import socket
import traceback
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import msgspec
import psutil

from conformance.run.ranks.messages import MAX_WORLD_SIZE, KillRanks, StartRanks
from conformance.run.ranks.preload import preload, preload_compiler
from conformance.run.ranks.process import Rank

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
REQUEST_BYTES = 65536
DEATH_LIMIT_S = 2.0
GENERATIONS = 16


def main(control_fd: int, directory: str, tasks: str) -> NoReturn:
    """Serve the owner of the control socket until the owner closes the socket; end all ranks and remove `directory`.

    `tasks` tell which modules ranks need, see `preload`.
    """
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    preload(tasks)
    # Ranks share the pages of modules loaded so far, and their garbage collections skip it.
    gc.collect()
    gc.freeze()
    gc.enable()
    server = RankServer(socket.socket(fileno=control_fd))
    try:
        server.serve()
    except BaseException:
        traceback.print_exc()
    finally:
        server.kill_and_reap_all()
        shutil.rmtree(directory, ignore_errors=True)
        os._exit(0)  # the owner waits: taking torch down module by module would double the time that its own end takes


class RankServer:
    """Server that forks ranks, and kills and reaps them, for the owner of `control`."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._ranks: set[int] = set()

    def serve(self) -> None:
        """Answer each request with a list of process ids, or of exit codes (null for a rank that does not die)."""
        decoder = msgspec.json.Decoder(StartRanks | KillRanks)
        while True:
            data, fds, _, _ = socket.recv_fds(self._control, REQUEST_BYTES, 2 * MAX_WORLD_SIZE)
            if not data:
                return
            request = decoder.decode(data)
            answer = self._kill_and_reap(request.pids) if isinstance(request, KillRanks) else self._start(request, fds)
            self._control.send(msgspec.json.encode(answer))

    def kill_and_reap_all(self) -> None:
        """Kill all ranks with their descendants."""
        self._kill_and_reap(list(self._ranks))

    def _start(self, request: StartRanks, fds: list[int]) -> list[int]:
        """Fork ranks, which alone keep the locks open and so hold their devices until they die."""
        if request.compiles:
            preload_compiler()
            gc.freeze()
        channels = fds[: len(request.ranks)]
        pids = [self._fork(request, index, channels=channels) for index in range(len(channels))]
        self._ranks.update(pids)
        for fd in fds:
            os.close(fd)
        return pids

    def _fork(self, request: StartRanks, index: int, *, channels: list[int]) -> int:
        pid = os.fork()
        if pid == 0:
            self._become_rank(request, index, channels=channels)
        return pid

    def _become_rank(self, request: StartRanks, index: int, *, channels: list[int]) -> NoReturn:
        try:
            self._control.close()
            for fd in channels[:index] + channels[index + 1 :]:
                os.close(fd)
            process = Rank(
                rank=request.ranks[index],
                world_size=request.world_size,
                directory=Path(request.directory),
                device=request.devices[index] if request.devices else "",
            )
            process.serve(socket.socket(fileno=channels[index]))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)

    def _kill_and_reap(self, pids: list[int]) -> list[int | None]:
        if not self._ranks.issuperset(pids):
            raise ValueError("a process that is not (or no longer) our child must not be killed by its id")
        for pid in pids:
            _kill_group(pid)
        exit_codes = [_reap(pid) for pid in pids]
        self._ranks.difference_update(pid for pid, code in zip(pids, exit_codes, strict=True) if code is not None)
        self._kill_orphans()
        return exit_codes

    def _kill_orphans(self) -> None:
        """Kill descendants that left the group of an ended rank; each kill may hand over the next generation."""
        for _ in range(GENERATIONS):
            orphans = [child for child in psutil.Process().children() if child.pid not in self._ranks]
            if not orphans:
                return
            _end(orphans)


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError):  # it died before it led a group
        os.killpg(pid, signal.SIGKILL)
    os.kill(pid, signal.SIGKILL)  # harmless after its end: the id is ours until we have waited for it


def _reap(pid: int) -> int | None:
    """Return the exit code of a killed child (negative: the signal), or None if alive after `DEATH_LIMIT_S`."""
    pidfd = os.pidfd_open(pid)
    gone = select.select([pidfd], [], [], DEATH_LIMIT_S)[0]
    os.close(pidfd)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) if gone else None


def _end(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.Error):
            process.kill()
            process.wait(DEATH_LIMIT_S)
