"""Scripts of other people on the simulated device, unchanged: in this process, or in several under torchrun."""

import os
import runpy
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from conformance.sim.enabling import enable
from conformance.sim.settings import DEVICES_VARIABLE, SCHEDULE_VARIABLE, checked_count
from reference_trainer.checks import UsageError


def run_here(program: Sequence[str], *, schedule: str, devices: int | None = None) -> None:
    """Run a script, or `-m MODULE`, with its arguments as the main program of this process, on the device.

    Processes that the program starts have the device too, unless it was forked after its first tensor there. Raises
    UsageError for a program that is missing.
    """
    name, is_module = _program(program)
    arguments = program[2:] if is_module else program[1:]
    os.environ[SCHEDULE_VARIABLE] = schedule
    if devices is not None:
        os.environ[DEVICES_VARIABLE] = str(checked_count(devices))
    enable()
    with _argv([name, *arguments], path=os.getcwd() if is_module else str(Path(name).resolve().parent)):
        if is_module:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(name, run_name="__main__")


def run_ranks(program: Sequence[str], *, schedule: str, world_size: int) -> int:
    """Run a program in the ranks of a world on this machine, with a device for each; returns torchrun's exit status."""
    _program(program)
    environment = os.environ | {SCHEDULE_VARIABLE: schedule, DEVICES_VARIABLE: str(checked_count(world_size))}
    return subprocess.run(rank_command(program, world_size), env=environment).returncode


def rank_command(program: Sequence[str], world_size: int) -> list[str]:
    """Return the command that starts a program in the ranks of a world on this machine."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}", *program]


def _program(program: Sequence[str]) -> tuple[str, bool]:
    """Return the script or module of a program, and whether it is a module."""
    if program[:1] == ["-m"] and len(program) > 1:
        return program[1], True
    if not program:
        raise UsageError("no program: write SCRIPT.py, or -m MODULE, and its arguments")
    if not Path(program[0]).is_file():
        raise UsageError(f"{program[0]} is no file: write SCRIPT.py, or -m MODULE, and its arguments")
    return program[0], False


@contextmanager
def _argv(arguments: list[str], *, path: str) -> Iterator[None]:
    """Give the process the arguments, and the first place of imports, of a program."""
    before, sys.argv = sys.argv, arguments
    sys.path.insert(0, path)
    try:
        yield
    finally:
        sys.argv = before
        sys.path.remove(path)
