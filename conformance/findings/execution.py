"""Execution of the programs of `findings/` on the installed torch, in fresh ranks.

A program ends with status 1 if the fault is there, 0 if not, and 2 if torch refuses the program or lacks a function. It
reads its rank and rendezvous from the variables that torchrun sets, and so runs under torchrun as well.
"""

import runpy
import socket
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from conformance.run.pool import Pools, RankContext, RankReport, Task, require_runnable

Outcome = Literal["wrong", "right", "refused", "hangs", "dies", "error"]
"""`wrong`: the fault is there. `hangs`: a rank did not end; `dies`: a signal ended a rank. `error`: the program itself
failed, which says nothing about torch."""
PRESENT: tuple[Outcome, ...] = ("wrong", "hangs", "dies")
"""Outcomes that show the fault, or a worse one."""
LIMIT_S = 40.0
_UNDER_TORCHRUN = {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "conformance", "GROUP_RANK": "0"}
"""Variables by which programs meet, and trainers recognise torchrun."""
_BY_STATUS: dict[int, Outcome] = {1: "wrong", 2: "refused", 0: "right"}
"""Outcome by status; the first that any rank has counts."""


class Shown(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of a program, and its output."""

    outcome: Outcome
    output: str


def run_program(pools: Pools, file: Path, *, ranks: int, limit_s: float = LIMIT_S) -> Shown:
    """Run a program on a number of ranks, and end all its processes, also those of a program that hangs.

    `pools` must isolate tasks (`Pools(isolate=True)`), so that no program sees traces of another. Raises ValueError for
    a limit that is not positive.
    """
    env = {**_UNDER_TORCHRUN, "MASTER_PORT": str(_free_port())}
    task = Task(f"{__name__}:perform", {"file": str(file)}, kind=file.stem)
    require_runnable(task, world_size=ranks, deadline_s=limit_s)
    reports = pools.run_ranks(task, range(ranks), world_size=ranks, deadline_s=limit_s, env=env)
    outcome = _outcome(reports)
    tracebacks = [report.traceback for report in reports if outcome == "error"]
    return Shown(outcome=outcome, output="".join([*map(_printed, reports), *tracebacks]))


def perform(_context: RankContext, payload: dict[str, Any]) -> int:
    """Run a program as one rank of its world; returns its status, and passes on its exceptions."""
    warnings.simplefilter("ignore")  # programs are judged by their status, and their output is shown
    try:
        runpy.run_path(payload["file"], run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def _outcome(reports: Sequence[RankReport]) -> Outcome:
    states = {report.state for report in reports}
    statuses = {report.value for report in reports if report.state == "finished"}
    if "died" in states:
        return "dies"
    if "raised" in states or not statuses <= _BY_STATUS.keys():
        return "error"
    if "hung" in states:
        return "hangs"
    return next(outcome for status, outcome in _BY_STATUS.items() if status in statuses)


def _printed(report: RankReport) -> str:
    """Return the output of a rank without gloo's lines about its connections."""
    return "".join(line + "\n" for line in report.output_tail.splitlines() if "Gloo] Rank" not in line)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
