"""Recording of a process with the simulated device: from its first operator to its exit, into a directory.

The variable of the environment `settings.RECORD_VARIABLE` names the directory. Each process has a file there, `rank 1`
or the name that `multiprocessing` gave it. A process that is killed leaves only its `.started` file.
"""

import os
import sysconfig
from multiprocessing import current_process, util
from pathlib import Path

import torch

from conformance.project import PACKAGE
from conformance.sim import recorded
from conformance.sim.extension import extension
from conformance.sim.trace import Access

_PROGRAM, _TORCH, _OTHER = range(3)  # as `Owner` in csrc/sites.h


def record(directory: Path) -> None:
    """Record this process until it ends, also in an error, and its forks."""
    _begin(directory)
    util.register_after_fork(_begin, lambda _: _begin(directory))


def _begin(directory: Path) -> None:
    name = _new_name(directory)
    extension().start_sites(_owners())
    extension().start_trace()
    # Runs at the exit of the main program, and at that of a process of `multiprocessing`, which has no `atexit`.
    util.Finalize(None, _end, args=(directory / f"{name}{recorded.ENDED}",), exitpriority=100)


def _new_name(directory: Path) -> str:
    """Return the name of this process in the directory, and take it; an earlier process may have had the same."""
    rank = os.environ.get("RANK")
    name = first = f"rank {rank}" if rank else current_process().name
    count = 1
    while True:
        try:
            (directory / f"{name}{recorded.STARTED}").open("x").close()
        except FileExistsError:
            count += 1
            name = f"{first} ({count})"
        else:
            return name


def _owners() -> list[tuple[str, int]]:
    """Return whose code a Python file has by the begin of its name, the longest of which counts."""
    paths = sysconfig.get_paths()
    return [
        ("<", _OTHER),
        (f"{paths['stdlib']}{os.sep}", _OTHER),
        *((f"{paths[kind]}{os.sep}", _PROGRAM) for kind in ("purelib", "platlib")),
        (f"{Path(torch.__file__).parent}{os.sep}", _TORCH),
        (f"{PACKAGE}{os.sep}", _OTHER),
    ]


def _end(file: Path) -> None:
    device = extension()
    sites = device.stop_sites()
    try:
        blocks, failure = device.live(), ""
    except RuntimeError as error:  # a task that nothing waited for
        blocks, failure = [], str(error)
    order, reads = device.take_execution()
    recorded.write(
        file,
        recorded.Recorded(
            trace=[Access(*record) for record in device.stop_trace()],
            sites=[_site(*site) for site in sites],
            order=order,
            reads=[recorded.Read(*read) for read in reads],
            blocks=[recorded.Block(*block) for block in blocks],
            failure=failure,
        ),
    )


def _site(program: tuple[str, int, str] | None, inner: tuple[str, int, str] | None, node: str) -> recorded.Site:
    return recorded.Site(program and recorded.Place(*program), inner and recorded.Place(*inner), node)
