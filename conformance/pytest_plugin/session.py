"""Conformance session in one process: collection of the cases, and the verdict on each case.

The hooks run in xdist's workers, or in the only process. `controller` collects the results of all processes and writes
the report.
"""

import gc
import os
import sys
import uuid
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from conformance.judge.judge import Judged, judge
from conformance.judge.law import Law, law_of
from conformance.judge.support import judging_substrate
from conformance.judge.verdicts import Verdict, classify
from conformance.outcomes import CellFailed, Unsupported
from conformance.plan.cells import Cell
from conformance.plan.matrix import Case
from conformance.pytest_plugin.cases import RunOrder, repeat_command
from conformance.pytest_plugin.controller import Controller
from conformance.pytest_plugin.expected import plan_of
from conformance.pytest_plugin.report_files import JUNIT, PLAN, case_properties
from conformance.pytest_plugin.setup import SessionSetup, read_options
from conformance.pytest_plugin.terminal import (
    BriefInterrupt,
    EndsWorkers,
    SummarizedFailures,
    end_cleanly_on_signals,
    is_summarized,
)
from conformance.report.schema import CaseResult
from conformance.run.case_runs import CaseRuns
from conformance.run.devices.leases import LeaseError
from conformance.run.devices.nvml import SESSION_VARIABLE
from conformance.run.failures import PoolError, RunFailed
from conformance.run.torch_support import kind_of_processes


@dataclass
class _Item:
    """Case of a pytest item, with its law, its duration so far and, once judged, its verdict."""

    law: Law
    case: Case
    path: Path
    """File of the test."""
    name: str
    """Name of the test in its file, with the cell in brackets."""
    duration_s: float = 0.0
    judged: Judged | None = None


_ITEM = pytest.StashKey[_Item]()


def leave_garbage_to_the_end() -> None:
    """Keep the interpreter from traversing all modules when it ends, as `Session.pytest_collection_finish` does.

    Not where triton is loaded: the bindings of its version 3.9, which torch 2.15 has, report what is never released as
    leaks, hundreds of functions, on every terminal.
    """
    if "triton" in sys.modules:
        gc.unfreeze()
    else:
        gc.freeze()


def start_session(config: pytest.Config) -> None:
    """Read the options and register the plugins of a session. Raises pytest.UsageError for unusable options."""
    _require_arguments(config)
    if getattr(config.option, "dist", "no") == "loadgroup":
        # xdist 3.8.0 with pytest 9.2: grouping is silently lost, and a crashed worker hangs the session
        # (pytest-xdist #1386, #1323). Records are shared through the store, so no case needs grouping.
        raise pytest.UsageError("--dist loadgroup is broken with this pytest (pytest-xdist #1386): use --dist load")
    end_cleanly_on_signals()
    gc.disable()  # until all modules are imported, see `Session.pytest_collection_finish`
    try:
        setup = read_options(config)
    except LeaseError as error:
        raise pytest.UsageError(str(error)) from None
    if setup.is_controller:
        os.environ[SESSION_VARIABLE] = str(os.getpid())
    os.environ.update(setup.machine.hardware.session_environment(worker=_number_of_worker(config)))
    config.pluginmanager.register(Session(setup), "conformance-session")
    config.pluginmanager.register(BriefInterrupt(full=config.option.fulltrace), "conformance-brief-interrupt")
    if setup.is_controller and getattr(config.option, "numprocesses", None):
        config.pluginmanager.register(EndsWorkers(), "conformance-ends-workers")
    if setup.is_controller and not config.option.collectonly:
        _start_controller(config, setup)


def _require_arguments(config: pytest.Config) -> None:
    """Raise pytest.UsageError for a file that is not there: where workers collect, pytest finds nothing to run."""
    for argument in () if config.option.pyargs else config.args:
        if not (config.invocation_params.dir / argument.partition("::")[0]).exists():
            raise pytest.UsageError(f"file or directory not found: {argument}")


def _number_of_worker(config: pytest.Config) -> int:
    """Return 3 for xdist's worker `gw3`, and 0 for a process without workers."""
    return int(str(getattr(config, "workerinput", {}).get("workerid", "gw0")).removeprefix("gw"))


def _start_controller(config: pytest.Config, setup: SessionSetup) -> None:
    option, manager = config.option, config.pluginmanager
    summarized_failures = SummarizedFailures()
    manager.register(summarized_failures, "conformance-summarized-failures")
    manager.register(Controller(setup, summarized_failures, config), "conformance-controller")
    option.xmlpath = option.xmlpath or str(setup.report_directory / JUNIT)
    if getattr(option, "maxschedchunk", None) is None:
        # Other workers could not help with the items that a worker holds in its queue (xdist docs, how-it-works).
        option.maxschedchunk = 1


class Session:
    """Plugin with the hooks and fixtures of a session."""

    def __init__(self, setup: SessionSetup) -> None:
        self._setup = setup
        self._cases: dict[str, list[Case]] = {}
        for case in setup.cases:
            self._cases.setdefault(case.law, []).append(case)
        self._asserted: dict[str, str] = {}
        self._calibration_s: float | None = None

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Start the rank server of a process that will run cases, so that both import torch at the same time."""
        if self._runs_cases(session.config) and not session.config.option.collectonly and self._setup.cases:
            self._setup.store.pools.prepare()

    def _runs_cases(self, config: pytest.Config) -> bool:
        return not self._setup.is_controller or not getattr(config.option, "numprocesses", None)

    # Collection.

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Pass the session's name and report directory from the controller to a worker."""
        node.workerinput["conformance"] = {
            "session": self._setup.name,
            "report_directory": str(self._setup.report_directory),
        }

    @pytest.hookimpl(tryfirst=True)
    def pytest_pycollect_makeitem(self, collector: pytest.Collector, name: str, obj: Any) -> list[pytest.Item] | None:
        """Collect no item for a law without a cell in this selection; raises UsageError for a second test of a law."""
        law = law_of(obj)
        if law is None:
            return None
        test = f"{obj.__module__}.{name}"
        first = self._asserted.setdefault(law.id, test)
        if first != test:
            raise pytest.UsageError(f"law {law.id} is asserted by {first} and by {test}: one law, one test")
        return None if law.id in self._cases else []

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Parametrise the test of a law with its cells."""
        law = law_of(metafunc.function)
        if law is not None:
            cells = [case.cell for case in self._cases[law.id]]
            metafunc.parametrize("cell", cells, ids=[cell.id for cell in cells])

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Sort the cases in the order of `RunOrder`."""
        for item in items:
            law = law_of(getattr(item, "function", None))
            if law is not None:
                cell = item.callspec.params["cell"]  # type: ignore[attr-defined]
                item.stash[_ITEM] = _Item(law, Case(law.id, cell, self._setup.trainer), item.path, item.name)
        has_devices = bool(self._setup.machine.hardware.devices)
        order = RunOrder(
            self._setup.cases,
            self._setup.matrix.seconds,
            kind=self._kind_of_ranks if has_devices else None,
            workers=getattr(config, "workerinput", {}).get("workercount", 1),
        )
        items.sort(key=lambda item: order.key(item.stash[_ITEM].case if _ITEM in item.stash else None))

    def _kind_of_ranks(self, cell: Cell) -> str:
        """Return the kind of a cell's ranks; a device has ranks of one kind at a time."""
        torch_version = self._setup.machine.torch_version
        return f"{kind_of_processes(cell, torch_version=torch_version)} {sorted(cell.environment.items())}"

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Write the plan."""
        # Imported modules stay. Otherwise every garbage collection would traverse torch: while torch is imported (see
        # `start_session`), while laws judge, and several times at the end, which takes longest of all.
        gc.freeze()
        gc.enable()
        items = {item.nodeid: item.stash[_ITEM] for item in session.items if _ITEM in item.stash}
        if not session.config.option.collectonly:
            self._write_plan(items)

    def _write_plan(self, items: dict[str, _Item]) -> None:
        """Write the plan, from which the controller reports cases that no worker does; all processes write the same."""
        directory = self._setup.report_directory
        directory.mkdir(parents=True, exist_ok=True)
        plan = {
            nodeid: {
                "id": item.case.id,
                "law": item.law.id,
                "must": item.law.must,
                "cell": item.case.cell.id,
                "repro": self._repro(item),
            }
            for nodeid, item in items.items()
        }
        partial = directory / f"plan.{uuid.uuid4().hex}.part"
        partial.write_bytes(msgspec.json.encode({"session": self._setup.name, "cases": plan}))
        partial.rename(directory / PLAN)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> None:
        """Calibrate the machine before the first case, while no other process of the session computes.

        The time limit of a case, unless it was given, is longer on a slower machine, whose ranks do not hang.
        """
        nodeids = [item.nodeid for item in session.items]
        setup = self._setup
        is_long = plan_of(nodeids, setup.cases, setup.matrix, profile=setup.profile_name, seed=setup.seed) is not None
        if is_long and not session.config.option.collectonly and self._runs_cases(session.config):
            self._calibration_s = _calibration_s(self._setup)
            if self._calibration_s and not session.config.option.deadline:
                self._setup.store.lengthen(self._calibration_s / self._setup.matrix.calibration_s)

    # Verdicts.

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool | None:
        """Judge a case instead of calling its test, and give pytest the corresponding outcome."""
        __tracebackhide__ = True
        item = pyfuncitem.stash.get(_ITEM, None)
        if item is None:
            return None
        setup = self._setup
        item.judged = judge(
            item.case,
            item.law,
            pyfuncitem.obj,
            setup.store,
            machine=setup.machine,
            profile=setup.profile,
            waivers=setup.known_failures,
            drift=setup.baseline.judge if setup.baseline else None,
        )
        _tell_pytest(item.judged)
        return True

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Attach the result of a case to the last of its three reports, that of the tear-down."""
        report = yield
        report.calibration_s = self._calibration_s  # type: ignore[attr-defined]
        case_item = item.stash.get(_ITEM, None)
        if case_item is None:
            return report
        if report.when == "call" and case_item.judged is not None and is_summarized(case_item.judged):
            report.longrepr = case_item.judged.reason
        case_item.duration_s += call.duration
        if report.skipped and isinstance(report.longrepr, tuple):  # pytest would name a line of this plugin
            path, line, _ = item.reportinfo()
            report.longrepr = (str(path), (line or 0) + 1, report.longrepr[2])
        if call.excinfo is not None and (case_item.judged is None or call.when == "teardown"):
            verdict, reason = classify(call.excinfo.value)
            substrate = judging_substrate(case_item.law, case_item.case.cell, self._setup.machine.hardware)
            case_item.judged = Judged(case_item.case, substrate, verdict, reason)
        if call.when == "teardown" and case_item.judged is not None:
            # Builtin types only: anything else kills an xdist session (execnet DumpError).
            result = self._result(item.nodeid, case_item, case_item.judged)
            report.user_properties += case_properties(result, torch_version=self._setup.machine.torch_version)
            report.conformance = msgspec.to_builtins(result)  # type: ignore[attr-defined]
            report.judged_records = sorted(case_item.judged.records)  # type: ignore[attr-defined]
        return report

    def pytest_unconfigure(self) -> None:
        """End all ranks."""
        self._setup.store.close()
        leave_garbage_to_the_end()
        gc.enable()

    def _result(self, nodeid: str, item: _Item, judged: Judged) -> CaseResult:
        return CaseResult(
            id=item.case.id,
            law=item.law.id,
            must=item.law.must,
            cell=item.case.cell.id,
            substrate=judged.substrate,
            verdict=judged.verdict.value,
            reason=judged.reason,
            duration_s=round(item.duration_s, 4),
            wait_s=round(judged.wait_s, 4),
            run_s=round(judged.run_s, 4),
            measured=judged.measured,
            repro=self._repro(item),
            nodeid=nodeid,
        )

    def _repro(self, item: _Item) -> str:
        setup = self._setup
        return repeat_command(item.path, item.name, setup.repro_options, directory=setup.directory)

    # Fixtures of the laws: pytest must know the names; `judge` passes the values.

    @pytest.fixture
    def run(self) -> Callable[..., Any] | None:
        """Declare the fixture `run`, see `conformance.assertions.fixtures.Run`."""
        return None

    @pytest.fixture
    def evidence(self, cell: Cell) -> object | None:
        """Declare the fixture `evidence`, see `conformance.subjects.evidence.Evidence`."""
        return None

    @pytest.fixture
    def under(self, cell: Cell) -> Callable[..., Any] | None:
        """Declare the fixture `under`, see `conformance.subjects.evidence.Under`."""
        return None

    @pytest.fixture
    def measure(self) -> Callable[..., Any] | None:
        """Declare the fixture `measure`, see `conformance.assertions.fixtures.Measure`."""
        return None


def _calibration_s(setup: SessionSetup) -> float | None:
    """Return the time of the calibration; None if the session has a fault or another trainer, or no two ranks ran."""
    if setup.defect or setup.trainer:
        return None
    try:
        return CaseRuns(setup.store).calibration_s()
    except (Unsupported, RunFailed, PoolError, LeaseError):
        return None  # cases will tell what is wrong


def _tell_pytest(judged: Judged) -> None:
    """Raise the exception by which pytest counts the case in accordance with its verdict.

    A failed comparison says all in its reason. A run that did not finish shows what its ranks left, and only an error
    of the suite has a traceback worth showing.
    """
    __tracebackhide__ = True
    match judged.verdict:
        case Verdict.PASS | Verdict.QUALITY_WARNING:
            return
        case Verdict.UNSUPPORTED:
            pytest.skip(judged.reason)
        case Verdict.WAIVED:
            pytest.xfail(judged.reason)
        case Verdict.ERROR if not isinstance(judged.error, CellFailed):
            assert judged.error is not None, "an error without an exception"
            raise judged.error
        case _:
            ended = isinstance(judged.error, CellFailed)
            pytest.fail(str(judged.error) if ended else judged.reason, pytrace=False)
