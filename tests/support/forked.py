"""Python programs in processes that are forked with torch loaded, whose import takes two seconds of a processor.

Plugins and laws, whose asserts pytest rewrites, are imported in the program itself.
"""

import atexit
import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NoReturn

LIMIT_S = 300.0
RANK_SERVERS_VARIABLE = "TESTS_RANK_SERVERS"
"""Path of the socket of a process that forks rank servers, see `warm_servers`; programs that have it use it."""
PRELOADED = [
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "conformance.assertions.axes.proofs",
    "conformance.judge.judge",
    "conformance.report.html",
    "tests.support.frozen",
]


def freeze() -> None:
    """Exclude loaded objects from garbage collections, which would copy their pages in each fork."""
    gc.collect()
    gc.freeze()


def context() -> ForkServerContext:
    """Return the context of this process's only fork server."""
    forkserver = multiprocessing.get_context("forkserver")
    forkserver.set_forkserver_preload(PRELOADED)
    return forkserver


def start(
    module: str, arguments: Sequence[str], *, cwd: Path, environment: Mapping[str, str], out: Path, err: Path
) -> BaseProcess:
    """Start `python -m MODULE ARGUMENTS` with its output in files, which may be the same file."""
    process: BaseProcess = context().Process(
        target=_become,
        args=(module, list(arguments), str(cwd), dict(environment), str(out), str(err)),
        name="MainProcess",  # as in a program that is started
    )
    process.start()
    return process


def started(
    module: str, arguments: Sequence[str], stem: Path, *, cwd: Path, environment: Mapping[str, str]
) -> Callable[[], subprocess.CompletedProcess[str]]:
    """Start a program with its output in files named after `stem`; returns a function that waits for its end."""
    out, err = stem.with_suffix(".out"), stem.with_suffix(".err")
    process = start(module, arguments, cwd=cwd, environment=environment, out=out, err=err)

    def wait() -> subprocess.CompletedProcess[str]:
        process.join(LIMIT_S)
        assert process.exitcode is not None, err.read_text()
        return subprocess.CompletedProcess(arguments, process.exitcode, out.read_text(), err.read_text())

    return wait


def run(module: str, *arguments: str, cwd: Path, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a program to its end."""
    with tempfile.TemporaryDirectory() as directory:
        return started(module, arguments, Path(directory, "process"), cwd=cwd, environment=environment)()


def run_text(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program, given as its text, to its end."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "program.py").write_text(program)
        return run("program", *arguments, cwd=Path(directory), environment=os.environ)


def _become(module: str, arguments: list[str], cwd: str, environment: dict[str, str], out: str, err: str) -> NoReturn:
    for number, name in ((1, out), (2, err)):
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    sys.path.insert(0, cwd)
    sys.argv = [module, *arguments]
    if RANK_SERVERS_VARIABLE in environment:
        from tests.support import warm_servers

        warm_servers.use()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os._exit(_status(module))


def _status(module: str) -> int:
    """Run a module as a program; returns its exit status after all that an interpreter does before its end."""
    status: object = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        status = end.code or 0
    except BaseException:
        traceback.print_exc()
        status = 1
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(ValueError):
            stream.flush()
    return status if isinstance(status, int) else 1
