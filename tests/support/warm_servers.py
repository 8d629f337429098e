"""Rank servers, and xdist's workers, forked from a process with their modules, whose import takes seconds.

Most files of tests that use ranks, and all sessions that tests start, have a rank server of their own. A forked process
has the program, environment, working directory and import path of one that is started, and a worker the variables of a
rank server; `tests/ranks/run/test_pool.py`, and sessions in processes of their own, have processes that are started.
"""

import atexit
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import msgspec
from execnet import gateway_io

from conformance.defects.catalogue import defects
from conformance.project import PROJECT
from conformance.run.pool import LATCHED_PREFIXES
from conformance.run.ranks import client
from conformance.run.ranks.preload import EXPERIMENTS, SUBJECTS, preload
from tests.support import read_once
from tests.support.forked import RANK_SERVERS_VARIABLE, freeze

_READ_AT_START = (*LATCHED_PREFIXES, "LD_", "PYTHON")
"""Variables that are read when Python starts or modules are imported; with other values a server is started."""
_ADDED = "TORCHINDUCTOR_CACHE_DIR"
"""Variable that torch adds when its compiler is imported, with the value that it would take by default."""
_SHARED_VARIABLE = "TESTS_WARM_SERVER"
_REQUEST_BYTES, _MAX_FILES = 1 << 18, 4
_LIMIT_S = 60.0


class Request(msgspec.Struct, frozen=True):
    """Process to fork: its program, the numbers at which it has the files that are sent along, and its surroundings."""

    program: str
    numbers: list[int]
    directory: str
    environment: dict[str, str]


class ForkedProcess:
    """Forked process, with the part of `subprocess.Popen` that its owners use."""

    def __init__(self, pidfd: int) -> None:
        self._pidfd = pidfd

    def wait(self, timeout: float = _LIMIT_S) -> None:
        """Wait for the end of the process; raises subprocess.TimeoutExpired."""
        if not select.select([self._pidfd], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("forked process", timeout)

    def kill(self) -> None:
        """Kill the process."""
        signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def __del__(self) -> None:
        os.close(self._pidfd)


@contextmanager
def used() -> Iterator[None]:
    """Open a context in which pools of this process fork their rank servers, and xdist its workers."""
    with ExitStack() as stack:
        for change in _changes():
            stack.enter_context(change)
        yield


def use() -> None:
    """Have pools fork their rank servers, and xdist its workers, until this process ends."""
    for change in _changes():
        change.start()


def _changes() -> list[Any]:
    forking = types.SimpleNamespace(**{**vars(subprocess), "Popen": _server})
    return [patch.object(client, "subprocess", forking), patch.object(gateway_io.Popen2IOMaster, "__init__", _worker)]


def _server(
    command: list[str], *, pass_fds: list[int], env: Mapping[str, str], stdout: Any, **options: Any
) -> ForkedProcess | subprocess.Popen[bytes]:
    with open(os.devnull) as nothing:
        log, control = stdout.fileno(), pass_fds[0]
        process = _forked(command[-1], env, [(nothing.fileno(), 0), (log, 1), (log, 2), (control, control)])
    return process or subprocess.Popen(command, pass_fds=pass_fds, env=env, stdout=stdout, **options)


_start_worker = gateway_io.Popen2IOMaster.__init__


def _worker(self: Any, command: list[str], execmodel: Any) -> None:
    """Give xdist a worker that is forked, in place of `Popen2IOMaster.__init__` of execnet."""
    its_input, tasks = os.pipe()
    results, its_output = os.pipe()
    self.popen = _forked(command[-1], client._server_environment(), [(its_input, 0), (its_output, 1), (2, 2)])
    os.close(its_input)
    os.close(its_output)
    files = os.fdopen(tasks, "wb"), os.fdopen(results, "rb")
    if self.popen is not None:
        super(gateway_io.Popen2IOMaster, self).__init__(*files, execmodel=execmodel)
        return
    for file in files:
        file.close()
    _start_worker(self, command, execmodel)


def _forked(program: str, environment: Mapping[str, str], files: list[tuple[int, int]]) -> ForkedProcess | None:
    """Fork a process that has files of this process at other numbers; None if it has to be started."""
    own, numbers = zip(*files, strict=True)
    request = Request(program, list(numbers), directory=os.getcwd(), environment=dict(environment))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(_LIMIT_S)
        connection.connect(address())
        socket.send_fds(connection, [msgspec.json.encode(request)], own)
        _, pidfds, _, _ = socket.recv_fds(connection, 1, 1)
    return ForkedProcess(*pidfds) if pidfds else None


def address() -> str:
    """Return the address of the process that forks for this process, or for the one that has started it."""
    return os.environ.get(RANK_SERVERS_VARIABLE) or os.environ.get(_SHARED_VARIABLE) or _started()


def share() -> None:
    """Start a process that forks for this process and for all that this one starts."""
    os.environ[_SHARED_VARIABLE] = address()


@cache
def _started() -> str:
    directory = tempfile.mkdtemp(prefix="conformance-servers-")
    path = str(Path(directory, "socket"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()
        program = f"from tests.support.warm_servers import serve; serve({listener.fileno()}, {directory!r})"
        _owned.append(
            subprocess.Popen(
                [sys.executable, "-u", "-c", program],
                cwd=PROJECT,
                env=client._server_environment(),
                pass_fds=[listener.fileno()],
                stdin=subprocess.PIPE,
                start_new_session=True,
            )
        )
    return path


_owned: list[subprocess.Popen[bytes]] = []
"""Process that forks, and ends with this one, whose end of a pipe it holds."""


# The process that forks


def serve(listener_fd: int, directory: str) -> None:
    """Fork processes until the process that has started this one ends."""
    for tasks in (EXPERIMENTS, SUBJECTS):
        preload(tasks)
    defects()
    read_once.read()
    freeze()
    signal.signal(signal.SIGCHLD, _reap)
    with socket.socket(fileno=listener_fd) as listener:
        while sys.stdin not in (ready := select.select([listener, sys.stdin], [], [])[0]):
            for _ in ready:
                connection, _ = listener.accept()
                with connection:
                    _answer(connection, listener)
    shutil.rmtree(directory, ignore_errors=True)


def _answer(connection: socket.socket, listener: socket.socket) -> None:
    data, fds, _, _ = socket.recv_fds(connection, _REQUEST_BYTES, _MAX_FILES)
    if not data:  # who would ask has ended
        return
    request = msgspec.json.decode(data, type=Request)
    answer = []
    if _read_at_start(request.environment) == _read_at_start(os.environ):
        pid = os.fork()
        if pid == 0:
            connection.close()
            listener.close()
            _become(request, fds)
        answer = [os.pidfd_open(pid)]
    with suppress(OSError):  # who asked is gone, and the server will notice
        socket.send_fds(connection, [b"."], answer)
    for fd in (*fds, *answer):
        os.close(fd)


def _reap(*_: object) -> None:
    """Reap servers that have ended, whose processor time then counts as that of the tests."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    names = {name for name in environment if name.startswith(_READ_AT_START)} - {_ADDED}
    return {name: environment[name] for name in names}


def _become(request: Request, fds: list[int]) -> NoReturn:
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for fd, number in zip(fds, request.numbers, strict=True):
            os.dup2(fd, number)
        for fd in {*fds} - {*request.numbers}:
            os.close(fd)
        os.chdir(request.directory)
        os.environ.clear()
        os.environ.update(request.environment)
        exec(request.program, {"__name__": "__main__"})
        atexit._run_exitfuncs()
    finally:
        os._exit(1)
