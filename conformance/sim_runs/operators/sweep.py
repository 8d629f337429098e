"""Sweep through all cases by processes that may die; outcomes are kept in a file as soon as they are known."""

import multiprocessing
import signal
import threading
from collections.abc import Callable, Sequence
from itertools import groupby
from multiprocessing.context import ForkServerContext
from operator import attrgetter
from pathlib import Path

import msgspec

from conformance.sim.building import device_library
from conformance.sim_runs.operators.cases import Case, Judged, Outcome
from conformance.sim_runs.operators.database import DATABASE
from conformance.sim_runs.operators.worker import serve

PROCESSES = 2
_LIMIT_S = 300.0
"""Time after which a case that has not been judged counts as dead."""


class Entry(msgspec.Struct, frozen=True):
    """Line of the file of outcomes."""

    device: str
    """Name of the compiled device, which depends on its sources, torch and the compiler."""
    schedule: str
    case: Case
    judged: Judged


class Outcomes:
    """Outcomes of one device and schedule, read from a file and appended to it."""

    def __init__(self, file: Path, schedule: str) -> None:
        self._file, self.schedule, self._device = file, schedule, device_library().parent.name
        self._lock = threading.Lock()
        lines = file.read_bytes().splitlines() if file.exists() else []
        entries = [msgspec.json.decode(line, type=Entry) for line in lines]
        own = [entry for entry in entries if (entry.device, entry.schedule) == (self._device, schedule)]
        self.known = {entry.case: entry.judged for entry in own}

    def add(self, case: Case, judged: Judged) -> None:
        """Keep an outcome."""
        with self._lock, self._file.open("ab") as file:
            self.known[case] = judged
            file.write(msgspec.json.encode(Entry(self._device, self.schedule, case, judged)) + b"\n")


class _Worker:
    """Process with the device, and the connection to it."""

    def __init__(self, schedule: str) -> None:
        context = _context()
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, schedule), daemon=True)
        self.process.start()
        theirs.close()

    def survives(self, case: Case, *, on_cpu: bool) -> bool:
        """Let the process judge a case, or call it on the CPU alone; returns whether it answers."""
        try:
            self.connection.send((tuple(case), on_cpu))
            if self.connection.poll(_LIMIT_S):
                self.answer: Judged | None = self.connection.recv()
                return True
        except (EOFError, OSError):
            self.process.join()
        return False

    def end(self) -> str:
        """End the process; returns how it ended."""
        self.connection.close()
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
            return f"no answer in {_LIMIT_S:g} s"
        code = self.process.exitcode
        return signal.Signals(-code).name if code < 0 else f"exit status {code}"


def _judged(case: Case, schedule: str, worker: _Worker) -> tuple[Judged, _Worker]:
    """Return the outcome of a case, and the worker, or another one in place of a dead one.

    A case that ends the process counts as dead if it does so in a fresh process as well: an earlier one may have
    written out of bounds.
    """
    if not worker.survives(case, on_cpu=False):
        worker.end()
        worker = _Worker(schedule)
        if not worker.survives(case, on_cpu=False):
            return _dead(case, schedule, worker.end())
    assert worker.answer is not None
    return worker.answer, worker


def _dead(case: Case, schedule: str, how: str) -> tuple[Judged, _Worker]:
    """Return the outcome of a case that ends its process, on the CPU alone as well or not, and a new worker."""
    if (another := _Worker(schedule)).survives(case, on_cpu=True):
        return Judged(Outcome.DIED, how), another
    return Judged(Outcome.DIED, f"{another.end()} of the CPU's own kernel, without the device"), _Worker(schedule)


def sweep(cases: Sequence[Case], outcomes: Outcomes, progress: Callable[[int, int], None]) -> dict[Case, Judged]:
    """Judge the cases whose outcomes are not known; returns all outcomes, in the order of the cases."""
    todo = iter([list(group) for _, group in groupby(_unknown(cases, outcomes), attrgetter("operator", "dtype"))])
    turn = threading.Lock()

    def work() -> None:
        worker = _Worker(outcomes.schedule)
        while True:
            with turn:
                group = next(todo, [])
            if not group:
                break
            for case in group:
                found, worker = _judged(case, outcomes.schedule, worker)
                outcomes.add(case, found)
                progress(len(outcomes.known), len(cases))
        worker.end()

    threads = [threading.Thread(target=work) for _ in range(PROCESSES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {case: outcomes.known[case] for case in cases}


def _unknown(cases: Sequence[Case], outcomes: Outcomes) -> list[Case]:
    return [case for case in cases if case not in outcomes.known]


def _context() -> ForkServerContext:
    """Return a context whose processes are forked with torch and its database loaded, which takes seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([DATABASE])
    return context
