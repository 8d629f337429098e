"""Rank: a process that performs the tasks of its pool, one after another."""

import ctypes
import faulthandler
import gc
import importlib
import os
import random
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from conformance.numerics.knobs import pin_knobs
from conformance.run.ranks import flight_recorder
from conformance.run.ranks.messages import (
    DUMP_SIGNAL,
    RANK_IN_VALUE,
    READY,
    Assignment,
    RankContext,
    RankFiles,
    RankReport,
    require_json_like,
)
from conformance.run.ranks.process_groups import KeptStore, drop_held_groups
from reference_trainer.stopwatch import TRAINING

SEED = 0
PR_SET_PDEATHSIG = 1  # linux/prctl.h
DATAGRAM_BYTES = 64
TRACEBACK_CHARACTERS = 16384
MESSAGE_CHARACTERS = 500


class Rank:
    """One rank of a world, created in a fresh fork of the rank server."""

    def __init__(self, *, rank: int, world_size: int, directory: Path, device: str) -> None:
        self._rank = rank
        self._device = device
        self._world_size = world_size
        self._files = RankFiles(directory, rank)
        self._home = Path.cwd()

    def serve(self, channel: socket.socket) -> NoReturn:
        """Perform tasks until the pool closes `channel`. Never returns."""
        end_with_parent()
        self._redirect_output()
        require_clean_fork()
        self._dump_stacks_on_signal(channel)
        self._set_environment()
        KeptStore(directory=self._files.directory, rank=self._rank, world_size=self._world_size).register()
        channel.send(READY)
        while number := _next_message(channel):
            report = self._perform(msgspec.msgpack.decode(self._files.assignment.read_bytes(), type=Assignment))
            self._files.report.write_bytes(msgspec.msgpack.encode(report))
            channel.send(number)
            collect_garbage()  # while the pool reads the report
        os._exit(0)

    def _redirect_output(self) -> None:
        """Send fds 1 and 2 to a file, so that output of C++ and of child processes arrives there too."""
        fd = os.open(self._files.output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        os.close(fd)

    def _dump_stacks_on_signal(self, channel: socket.socket) -> None:
        """Dump the stacks of all threads on a fault and on `DUMP_SIGNAL`; after the latter, send `DUMPED`.

        C handlers do all of it, without the interpreter and its lock: the handler of `faulthandler` chains to that of
        the interpreter, which writes the signal's number to the wakeup fd. The rank must not end by itself: its peers
        would notice, and their stacks would no longer show the call in which they were waiting.
        """
        stack = self._files.stack.open("a")
        faulthandler.enable(stack)
        channel.setblocking(False)  # as a wakeup fd must be
        signal.set_wakeup_fd(channel.fileno(), warn_on_full_buffer=False)
        signal.signal(DUMP_SIGNAL, lambda _number, _frame: None)
        faulthandler.register(DUMP_SIGNAL, file=stack, all_threads=True, chain=True)

    def _set_environment(self) -> None:
        os.environ.update(
            RANK=str(self._rank),
            LOCAL_RANK=str(self._rank),
            WORLD_SIZE=str(self._world_size),
            LOCAL_WORLD_SIZE=str(self._world_size),
        )
        # The only device that CUDA, which this process has not used yet, will show; with "" it shows none.
        os.environ["CUDA_VISIBLE_DEVICES"] = self._device
        if self._device:
            os.environ.update(flight_recorder.variables(self._files))
            flight_recorder.listen(self._files)
        else:
            # Fake tensors, DeviceMesh and optimizers ask hundreds of times whether there are devices. Without this the
            # driver is loaded for the answer, with it (and none that is visible) torch answers by itself.
            # https://docs.pytorch.org/docs/stable/notes/cuda.html#environment-variables
            os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"

    def _perform(self, assignment: Assignment) -> RankReport:
        os.truncate(self._files.output, 0)
        os.truncate(self._files.stack, 0)
        self._files.flight.unlink(missing_ok=True)
        os.chdir(self._home)
        reset_process_state()
        env = {name: value.replace(RANK_IN_VALUE, str(self._rank)) for name, value in assignment.env.items()}
        with environment(env):
            return self._call(assignment)

    def _call(self, assignment: Assignment) -> RankReport:
        context = RankContext(
            rank=self._rank,
            world_size=self._world_size,
            rendezvous=assignment.rendezvous,
            timeout_s=max(0.0, assignment.deadline_s - time.monotonic()),
            device=self._device,
        )
        task = assignment.task
        trained_before_s = TRAINING.total_s
        try:
            value = find_function(task.function)(context, task.payload)
            require_json_like(value, where=f"the result of {task.function}")
        except SystemExit as request:
            _exit_early(request)
        except BaseException as error:
            return raised(error, rank=self._rank)
        return RankReport(
            rank=self._rank,
            state="finished",
            stamp_s=time.monotonic(),
            value=value,
            train_s=TRAINING.total_s - trained_before_s,
            leaks=tuple(find_leaks()),
        )


def end_with_parent() -> None:
    """Lead a process group, and let the kernel kill this process when the rank server ends.

    The kernel's signal works even in a rank that blocks with the interpreter lock held, where no thread could.
    """
    server = os.getppid()
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != server:  # the server ended before prctl took effect
        os._exit(1)


def require_clean_fork() -> None:
    """Raise RuntimeError in a process that can never use CUDA, since the rank server has called the driver.

    The check works without a device, too: if importing torch calls the driver, it does so there as well.
    """
    if torch.cuda._is_in_bad_fork():
        raise RuntimeError(
            f"the rank server of torch {torch.__version__} has asked CUDA for its devices, and no rank that it forks "
            "can use them: keep the module that asks out of conformance/run/ranks/preload.py"
        )


def collect_garbage() -> None:
    """Free garbage in cycles, and the process groups of the last task.

    Caches survive, mostly those of DTensor: later collections, also those within tasks, need not visit them.
    """
    gc.collect()
    gc.freeze()
    drop_held_groups()


def reset_process_state() -> None:
    """Reset the state of this process that an earlier task may have changed."""
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    torch.autograd.set_detect_anomaly(False)
    pin_knobs("cpu")


@contextmanager
def environment(env: Mapping[str, str]) -> Iterator[None]:
    """Add `env` to the environment; afterwards undo this and every other change of the environment."""
    before = dict(os.environ)
    os.environ.update(env)
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)


def find_leaks() -> Iterator[str]:
    """Yield the names of resources that a task left behind in this process."""
    if dist.is_available() and dist.is_initialized():
        yield "process group"
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            yield f"thread {thread.name}"
    if _has_children():
        yield "child process"


def raised(error: BaseException, *, rank: int) -> RankReport:
    """Return the report of a rank whose task ended with `error`; the lengths of all strings are limited."""
    text = "".join(traceback.format_exception(error))
    frames = traceback.extract_tb(error.__traceback__)
    return RankReport(
        rank=rank,
        state="raised",
        stamp_s=time.monotonic(),
        exception_type=type(error).__name__,
        message=_plain(_first_line(error))[:MESSAGE_CHARACTERS],
        traceback=_plain(text)[-TRACEBACK_CHARACTERS:],
        innermost_file=frames[-1].filename if frames else "",
    )


def _first_line(error: BaseException) -> str:
    try:
        lines = str(error).strip().splitlines()
    except Exception:
        return "<no message: its __str__ fails>"
    return lines[0] if lines else ""


def _plain(text: str) -> str:
    """Return `text` without lone surrogates, which no encoder accepts."""
    return text.encode("utf-8", "backslashreplace").decode()


def _next_message(channel: socket.socket) -> bytes:
    """Wait for the pool's next message; returns b"" when the pool has closed the channel."""
    select.select([channel], [], [])
    return channel.recv(DATAGRAM_BYTES)


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def find_function(name: str) -> Any:
    """Return the function with this name, `package.module:function`."""
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def _exit_early(request: SystemExit) -> NoReturn:
    """Exit with the code of the task's SystemExit; the pool reports every exit code as a crash."""
    traceback.print_exception(request)
    sys.stdout.flush()
    if request.code is None:
        os._exit(0)
    os._exit(request.code & 0xFF if isinstance(request.code, int) else 1)
