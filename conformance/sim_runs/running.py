"""Scripts of other people on the simulated device, unchanged: in this process, or in several under torchrun."""

import os
import runpy
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from conformance.sim.enabling import enable
from conformance.sim.settings import DEVICES_VARIABLE, SCHEDULE_VARIABLE, checked_count
from reference_trainer.checks import UsageError


def run_here(program: Sequence[str], *, schedule: str, devices: int | None = None, translate: bool = False) -> None:
    """Run a script, or `-m MODULE`, with its arguments as the main program of this process, on the device.

    With `translate` a script for CUDA, and the modules beside it, are translated for the device.

    Processes that the program starts have the device too, unless it was forked after its first tensor there. Raises
    UsageError for a program that is missing.
    """
    name, is_module = _program(program)
    arguments = program[2:] if is_module else program[1:]
    os.environ.update(environment(schedule, devices))
    enable()
    with _argv([name, *arguments], path=os.getcwd() if is_module else str(Path(name).resolve().parent)):
        if is_module:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        elif translate:
            _run_translated(Path(name))
        else:
            runpy.run_path(name, run_name="__main__")


def run_command(command: Sequence[str], *, schedule: str, devices: int | None) -> int:
    """Run a command whose processes have the device; returns its exit status."""
    return subprocess.run(command, env=environment(schedule, devices)).returncode


def command_of(program: Sequence[str], *, world_size: int | None, translate: bool = False) -> list[str]:
    """Return the command that starts a program, in a separate process or in the ranks of a world on this machine.

    Raises UsageError for a program that is missing, and for a module that is to be translated.
    """
    _, is_module = _program(program)
    if translate and is_module:
        raise UsageError("--translate is for a script: write its path in place of -m MODULE")
    started = ["-m", "conformance", "sim", "run", "--translate", *program] if translate else list(program)
    if world_size is None:
        return [sys.executable, *started]
    ranks = f"--nproc-per-node={checked_count(world_size)}"
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", ranks, *started]


def environment(schedule: str, devices: int | None) -> dict[str, str]:
    """Return the environment of processes that have the device."""
    variables = {SCHEDULE_VARIABLE: schedule}
    if devices is not None:
        variables[DEVICES_VARIABLE] = str(checked_count(devices))
    return os.environ | variables


def _run_translated(script: Path) -> None:
    # Not at the top: commands that run nothing do not load torch.
    from conformance.sim_runs.translation import translate_imports, translated

    translate_imports([script.resolve().parent])
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__file__ = str(script)
    exec(translated(script).code, vars(main))


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
