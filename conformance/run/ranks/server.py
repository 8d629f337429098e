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
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import psutil

from conformance.run.ranks.inductor_cache import remove_unfinished_libraries
from conformance.run.ranks.messages import MAX_WORLD_SIZE, KillRanks, StartRanks, StartTemplate, Template
from conformance.run.ranks.preload import preload, preload_compiler
from conformance.run.ranks.process import Rank, end_with_parent, find_function

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
REQUEST_BYTES = 65536
DEATH_LIMIT_S = 2.0
GENERATIONS = 16
TEMPLATE_LIMIT_S = 90.0
"""Time for the call of a template, less than the owner of the server waits for its ranks."""


def main(control_fd: int, directory: str, tasks: str) -> NoReturn:
    """Serve the owner of the control socket until the owner closes the socket; end all ranks and remove `directory`.

    `tasks` tell which modules ranks need, see `preload`.
    """
    _adopt_orphans()
    remove_unfinished_libraries()
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
        self._templates: dict[bytes, TemplateProcess] = {}

    def serve(self) -> None:
        """Answer each request with a list of process ids, or of exit codes (null for a rank that does not die)."""
        decoder = msgspec.json.Decoder(StartRanks | StartTemplate | KillRanks)
        while True:
            data, fds, _, _ = socket.recv_fds(self._control, REQUEST_BYTES, 2 * MAX_WORLD_SIZE)
            if not data:
                return
            self._control.send(msgspec.json.encode(self._answer(decoder.decode(data), fds)))

    def kill_and_reap_all(self) -> None:
        """Kill all ranks with their descendants, and all templates."""
        self._kill_and_reap(list(self._ranks))
        for template in self._templates.values():
            template.end()

    def _answer(self, request: StartRanks | StartTemplate | KillRanks, fds: list[int]) -> list[int] | list[int | None]:
        if isinstance(request, KillRanks):
            return self._kill_and_reap(request.pids)
        if isinstance(request, StartTemplate):
            self._template(request.template)
            return []
        try:
            return self._start(request, fds)
        finally:
            for fd in fds:
                os.close(fd)

    def _start(self, request: StartRanks, fds: list[int]) -> list[int]:
        """Fork ranks, which alone keep the locks open and so hold their devices until they die."""
        pids = self._template(request.template).start(request, fds) if request.template else None
        if pids is not None:
            return pids
        if request.compiles:
            preload_compiler()
            gc.freeze()
        channels = fds[: len(request.ranks)]
        pids = [self._fork(request, index, channels=channels) for index in range(len(channels))]
        self._ranks.update(pids)
        return pids

    def _template(self, wanted: Template) -> "TemplateProcess":
        key = msgspec.json.encode(wanted)
        if key not in self._templates:
            inherited = [self._control, *(template.control for template in self._templates.values())]
            self._templates[key] = TemplateProcess(wanted, inherited)
        return self._templates[key]

    def _fork(self, request: StartRanks, index: int, *, channels: list[int]) -> int:
        pid = os.fork()
        if pid == 0:
            self._become_rank(request, index, channels=channels)
        return pid

    def _become_rank(self, request: StartRanks, index: int, *, channels: list[int]) -> NoReturn:
        try:
            for each in (self._control, *(template.control for template in self._templates.values())):
                each.close()
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
        owner = next((each for each in self._templates.values() if each.ranks.intersection(pids)), None)
        if owner is not None:
            return owner.kill_and_reap(pids)
        if not self._ranks.issuperset(pids):
            raise ValueError("a process that is not (or no longer) our child must not be killed by its id")
        for pid in pids:
            _kill_group(pid)
        exit_codes = [_reap(pid) for pid in pids]
        self._ranks.difference_update(pid for pid, code in zip(pids, exit_codes, strict=True) if code is not None)
        self._kill_orphans()
        remove_unfinished_libraries()
        return exit_codes

    def _kill_orphans(self) -> None:
        """Kill descendants that left the group of an ended rank; each kill may hand over the next generation."""
        ours = self._ranks.union(template.pid for template in self._templates.values())
        for _ in range(GENERATIONS):
            orphans = [child for child in psutil.Process().children() if child.pid not in ours]
            if not orphans:
                return
            _end(orphans)


class TemplateProcess:
    """Fork of the rank server, as the server sees it, that makes the call of a template and then forks ranks itself.

    It is a rank server whose owner is this one, and ends with it. A template that fails serves nothing more.
    """

    def __init__(self, template: Template, inherited: Iterable[socket.socket]) -> None:
        """Fork it; `inherited` are sockets of this process that it must not keep open."""
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control.settimeout(TEMPLATE_LIMIT_S)
        self.ranks: set[int] = set()
        self._failed = False
        self.pid = os.fork()
        if self.pid == 0:
            _become_template(template, theirs, [self.control, *inherited])
        theirs.close()

    def start(self, request: StartRanks, fds: Sequence[int]) -> list[int] | None:
        """Return the process ids of the ranks that the template has forked; None if it has failed."""
        pids: list[int] | None = self._ask(msgspec.structs.replace(request, template=None), fds)
        self.ranks.update(pids or ())
        return pids

    def kill_and_reap(self, pids: list[int]) -> list[int | None]:
        """Kill ranks of the template; returns the exit code of each rank (None: unknown)."""
        exit_codes: list[int | None] | None = self._ask(KillRanks(pids=pids), ())
        self.ranks.difference_update(pids)
        return [None] * len(pids) if exit_codes is None else exit_codes

    def end(self) -> None:
        """End the template, which first ends its ranks."""
        self.control.close()
        with suppress(ChildProcessError):
            if not _is_gone(self.pid, limit_s=DEATH_LIMIT_S):
                os.kill(self.pid, signal.SIGKILL)  # and the kernel its ranks
            os.waitpid(self.pid, 0)

    def _ask(self, request: StartRanks | KillRanks, fds: Sequence[int]) -> Any:
        if self._failed:
            return None
        try:
            socket.send_fds(self.control, [msgspec.json.encode(request)], fds)
            answer = self.control.recv(REQUEST_BYTES)
        except OSError:
            answer = b""
        if not answer:
            self._failed = True
            os.kill(self.pid, signal.SIGKILL)  # ours until we have waited for it, in `end`
            return None
        return msgspec.json.decode(answer)


def _become_template(template: Template, control: socket.socket, inherited: Iterable[socket.socket]) -> NoReturn:
    try:
        for each in inherited:
            each.close()
        end_with_parent()
        _adopt_orphans()
        home = Path.cwd()
        os.environ.update(template.env)
        find_function(template.function)(template.argument)
        os.chdir(home)
        gc.collect()
        gc.freeze()
        server = RankServer(control)
        try:
            server.serve()
        finally:
            server.kill_and_reap_all()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent ends (a "child subreaper")."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError):  # it died before it led a group
        os.killpg(pid, signal.SIGKILL)
    os.kill(pid, signal.SIGKILL)  # harmless after its end: the id is ours until we have waited for it


def _reap(pid: int) -> int | None:
    """Return the exit code of a killed child (negative: the signal), or None if alive after `DEATH_LIMIT_S`."""
    gone = _is_gone(pid, limit_s=DEATH_LIMIT_S)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) if gone else None


def _is_gone(pid: int, *, limit_s: float) -> bool:
    """Return whether a child has ended, after this time at most."""
    pidfd = os.pidfd_open(pid)
    gone = select.select([pidfd], [], [], limit_s)[0]
    os.close(pidfd)
    return bool(gone)


def _end(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.Error):
            process.kill()
            process.wait(DEATH_LIMIT_S)
