"""Processes with the simulated device: it cannot be unloaded, and one that misuses it dies."""

import re
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from conformance.outcomes import Unsupported
from conformance.sim.building import device_library
from tests.support.forked import context

LIMIT_S = 120.0


def library() -> Path | None:
    """Return the compiled device, or None where nothing can compile it, which the message has to say."""
    try:
        return device_library()
    except Unsupported as missing:
        reason = str(missing)
    assert re.search(r"apt install|torch 2\.9 and later", reason), reason
    return None


def exit_code(check: Callable[..., None], *arguments: object) -> int:
    """Return the exit code of a process with the device that calls `check(*arguments)`; 0 without a compiler."""
    compiled = library()
    return 0 if compiled is None else _exit_codes(_call, [(check, compiled, arguments)])[0]


def exit_codes(check: Callable[..., None], *, ranks: int, directory: Path) -> list[int]:
    """Return the exit codes of processes that call `check(rank, ranks, directory)` at the same time."""
    compiled = library()
    if compiled is None:
        return [0] * ranks
    return _exit_codes(_call, [(check, compiled, (rank, ranks, directory)) for rank in range(ranks)])


def _call(check: Callable[..., None], compiled: Path, arguments: tuple[object, ...]) -> None:
    from conformance.sim import device

    device.load(compiled)
    try:
        check(*arguments)
    except BaseException:
        traceback.print_exc()
        sys.exit(1)


def enabled_exit_code(check: Callable[[], None], *, devices: int) -> int:
    """Return the exit code of a process that has made `sim` its accelerator, as any program does, and calls `check`."""
    return 0 if library() is None else _exit_codes(_call_enabled, [(check, devices)])[0]


def _exit_codes(target: Callable[..., None], calls: Sequence[tuple[object, ...]]) -> list[int]:
    """Return the exit codes of processes that run at the same time; of one that is late, that of its kill."""
    processes = [context().Process(target=target, args=arguments) for arguments in calls]
    for process in processes:
        process.start()
    for process in processes:
        process.join(LIMIT_S)
        if process.is_alive():
            process.kill()
            process.join()
    codes = [process.exitcode for process in processes]
    assert None not in codes
    return [code for code in codes if code is not None]


def _call_enabled(check: Callable[[], None], devices: int) -> None:
    from conformance.sim.enabling import enable

    enable("lazy", devices)
    try:
        check()
    except BaseException:
        traceback.print_exc()
        sys.exit(1)
