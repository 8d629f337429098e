"""Rank servers that are forked from a process which has their modules, whose import takes seconds of a processor.

Most files of tests that use ranks, and all sessions that tests start, have a rank server of their own. A forked one has
the program, environment, working directory and import path of one that is started; `tests/ranks/run/test_pool.py`, and
sessions in processes of their own, have servers that are started.
"""

import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import msgspec

from conformance.project import PROJECT
from conformance.run.pool import LATCHED_PREFIXES
from conformance.run.ranks import client
from conformance.run.ranks.preload import EXPERIMENTS, SUBJECTS, preload
from tests.support.forked import RANK_SERVERS_VARIABLE, freeze

_READ_AT_START = (*LATCHED_PREFIXES, "LD_", "PYTHON")
"""Variables that are read when Python starts or modules are imported; with other values a server is started."""
_ADDED = "TORCHINDUCTOR_CACHE_DIR"
"""Variable that torch adds when its compiler is imported, with the value that it would take by default."""
_REQUEST_BYTES = 1 << 18
_LIMIT_S = 60.0


class Request(msgspec.Struct, frozen=True):
    """Rank server to fork: its program, which finds the socket to its owner at a number, and its surroundings."""

    program: str
    control_fd: int
    directory: str
    environment: dict[str, str]


class ForkedServer:
    """Forked rank server, with the part of `subprocess.Popen` that `ServerProcess` uses."""

    def __init__(self, pidfd: int) -> None:
        self._pidfd = pidfd

    def wait(self, timeout: float = _LIMIT_S) -> None:
        """Wait for the server's end; raises subprocess.TimeoutExpired."""
        if not select.select([self._pidfd], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("rank server", timeout)

    def kill(self) -> None:
        """Kill the server."""
        signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def __del__(self) -> None:
        os.close(self._pidfd)


def used() -> Any:
    """Return a context, which need not end, in which pools of this process fork their rank servers."""
    return patch.object(client, "subprocess", types.SimpleNamespace(**{**vars(subprocess), "Popen": _popen}))


def _popen(
    command: list[str], *, pass_fds: list[int], env: Mapping[str, str], stdout: Any, **options: Any
) -> ForkedServer | subprocess.Popen[bytes]:
    request = Request(command[-1], pass_fds[0], directory=os.getcwd(), environment=dict(env))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(_LIMIT_S)
        connection.connect(address())
        socket.send_fds(connection, [msgspec.json.encode(request)], [pass_fds[0], stdout.fileno()])
        _, pidfds, _, _ = socket.recv_fds(connection, 1, 1)
    if pidfds:
        return ForkedServer(*pidfds)
    return subprocess.Popen(command, pass_fds=pass_fds, env=env, stdout=stdout, **options)


def address() -> str:
    """Return the address of the process that forks servers for this process, or for the one that has started it."""
    return os.environ.get(RANK_SERVERS_VARIABLE) or _started()


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
"""Process that ends with this one, whose end of a pipe it holds."""


# The process that forks


def serve(listener_fd: int, directory: str) -> None:
    """Fork rank servers until the process that has started this one ends."""
    for tasks in (EXPERIMENTS, SUBJECTS):
        preload(tasks)
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
    data, fds, _, _ = socket.recv_fds(connection, _REQUEST_BYTES, 2)
    if not data:  # who would ask has ended
        return
    request = msgspec.json.decode(data, type=Request)
    answer = []
    if _read_at_start(request.environment) == _read_at_start(os.environ):
        pid = os.fork()
        if pid == 0:
            connection.close()
            listener.close()
            _become(request, *fds)
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


def _become(request: Request, control: int, log: int) -> NoReturn:
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for fd, number in ((nothing, 0), (log, 1), (log, 2), (control, request.control_fd)):
            os.dup2(fd, number)
        for fd in {nothing, log, control} - {0, 1, 2, request.control_fd}:
            os.close(fd)
        os.chdir(request.directory)
        os.environ.clear()
        os.environ.update(request.environment)
        exec(request.program, {"__name__": "__main__"})
    finally:
        os._exit(1)
