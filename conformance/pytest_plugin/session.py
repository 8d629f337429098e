"""One process's part of a conformance session: which cases there are, and the verdict on each.

Runs in the xdist workers, or in the only process there is. What is known about the whole session, and the report, is
the business of `controller`.
"""

import gc
import os
import shlex
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
from conformance.plan.matrix import Case
from conformance.pytest_plugin.controller import Controller
from conformance.pytest_plugin.interruption import BriefInterrupt, EndsWorkers, take_sigterm_like_ctrl_c
from conformance.pytest_plugin.order import RunOrder, remembered_durations_s
from conformance.pytest_plugin.setup import SessionSetup, read_options
from conformance.report.schema import CaseResult
from conformance.run.devices.hardware import DETERMINISM
from conformance.run.devices.leases import LeaseError
from conformance.run.devices.nvml import SESSION_VARIABLE

_REPRO_DIRECTORY = "conformance-report-repro"  # repeating a case must not overwrite the report that it is in


@dataclass
class _Item:
    """Case of a pytest item, and what is known of it so far."""

    law: Law
    case: Case
    duration_s: float = 0.0
    judged: Judged | None = None


_ITEM = pytest.StashKey[_Item]()


def start_session(config: pytest.Config) -> None:
    """Read the options and register the plugins of a session. Raises pytest.UsageError for what cannot be used."""
    if getattr(config.option, "dist", "no") == "loadgroup":
        # xdist 3.8.0 with pytest 9.2: grouping is silently lost, and a crashed worker hangs the session
        # (pytest-xdist #1386, #1323). Records are shared through the store, so nothing needs grouping.
        raise pytest.UsageError("--dist loadgroup is broken with this pytest (pytest-xdist #1386): use --dist load")
    take_sigterm_like_ctrl_c()
    gc.disable()  # until all is imported, see `Session.pytest_collection_finish`
    try:
        setup = read_options(config)
    except LeaseError as error:
        raise pytest.UsageError(str(error)) from None
    if setup.is_controller:
        os.environ[SESSION_VARIABLE] = str(os.getpid())
    if setup.machine.hardware.devices:
        os.environ.update(DETERMINISM)  # oracles compute on a device too, and CUDA reads this once
    config.pluginmanager.register(Session(setup), "conformance-session")
    config.pluginmanager.register(BriefInterrupt(full=config.option.fulltrace), "conformance-brief-interrupt")
    if setup.is_controller and getattr(config.option, "numprocesses", None):
        config.pluginmanager.register(EndsWorkers(), "conformance-ends-workers")
    if setup.is_controller and not config.option.collectonly:
        config.pluginmanager.register(Controller(setup), "conformance-controller")
        config.option.xmlpath = config.option.xmlpath or str(setup.report_directory / "junit.xml")
        if getattr(config.option, "maxschedchunk", None) is None:
            # A worker that holds many items would keep the others from helping with them (xdist docs, how-it-works).
            config.option.maxschedchunk = 1


class Session:
    """Plugin with a session's hooks and fixtures."""

    def __init__(self, setup: SessionSetup) -> None:
        self._setup = setup
        self._durations_s = setup.durations_s
        self._cases: dict[str, list[Case]] = {}
        for case in setup.cases:
            self._cases.setdefault(case.law, []).append(case)
        self._asserted: dict[str, str] = {}

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Let the rank server of a process that will run cases import torch while this process does the same."""
        option = session.config.option
        if self._setup.is_controller:
            self._durations_s = remembered_durations_s(session.config)
        runs_cases = not self._setup.is_controller or not getattr(option, "numprocesses", None)
        if runs_cases and not option.collectonly and self._setup.cases:
            self._setup.store.pools.prepare()

    # Collection: law x cell.

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Tell a worker, from the controller, what it has to know."""
        node.workerinput["conformance"] = {
            "session": self._setup.name,
            "report_directory": str(self._setup.report_directory),
            "durations_s": self._durations_s,
        }

    @pytest.hookimpl(tryfirst=True)
    def pytest_pycollect_makeitem(self, name: str, obj: Any) -> list[pytest.Item] | None:
        """Yield no case for a law without a cell in this selection."""
        law = law_of(obj)
        if law is None:
            return None
        test = f"{obj.__module__}.{name}"
        first = self._asserted.setdefault(law.id, test)
        if first != test:
            raise pytest.UsageError(f"law {law.id} is asserted by {first} and by {test}: one law, one test")
        return None if law.id in self._cases else []

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Make a case of each cell of a law."""
        law = law_of(metafunc.function)
        if law is not None:
            cells = [case.cell for case in self._cases[law.id]]
            metafunc.parametrize("cell", cells, ids=[cell.id for cell in cells])

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Bring the cases into the order of `RunOrder`."""
        for item in items:
            law = law_of(getattr(item, "function", None))
            if law is not None:
                cell = item.callspec.params["cell"]  # type: ignore[attr-defined]
                item.stash[_ITEM] = _Item(law, Case(law.id, cell))
        order = RunOrder(self._setup.cases, self._durations_s)
        items.sort(key=lambda item: order.key(item.stash[_ITEM].case if _ITEM in item.stash else None))

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Leave the plan for the report; if the whole suite was collected, no law of the matrix may lack a test."""
        # All that was imported stays. Without this every search for garbage goes through torch: while it is imported
        # (see `start_session`), while laws judge, and several times at the end, which takes longest of all.
        gc.freeze()
        gc.enable()
        items = {item.nodeid: item.stash[_ITEM] for item in session.items if _ITEM in item.stash}
        whole_suite = all("::" not in argument and Path(argument).suffix != ".py" for argument in session.config.args)
        unasserted = self._cases.keys() - self._asserted.keys()
        problem = None
        if whole_suite and unasserted and not session.testsfailed:
            problem = f"matrix.yaml names laws that no test asserts: {', '.join(sorted(unasserted))}"
        if problem and self._setup.is_controller:
            raise pytest.UsageError(problem)  # in a worker this would be its end, without a word: see the controller
        if not session.config.option.collectonly:
            self._write_plan(items, problem)

    def _write_plan(self, items: dict[str, _Item], problem: str | None) -> None:
        """For cases that no worker will report; whoever writes it writes the same."""
        directory = self._setup.report_directory
        directory.mkdir(parents=True, exist_ok=True)
        plan = {
            nodeid: {
                "law": item.law.id,
                "must": item.law.must,
                "cell": item.case.cell.id,
                "repro": self._repro(nodeid),
            }
            for nodeid, item in items.items()
        }
        partial = directory / f"plan.{uuid.uuid4().hex}.part"
        partial.write_bytes(msgspec.json.encode({"session": self._setup.name, "cases": plan, "problem": problem}))
        partial.rename(directory / "plan.json")

    # Running: verdicts.

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool | None:
        """Judge a case instead of calling its test, and tell pytest the outcome in pytest's words."""
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
            waivers=setup.waivers,
            drift=setup.baseline.judge if setup.baseline else None,
        )
        _tell_pytest(item.judged)
        return True

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Attach the result of a case to the report of its tear-down, the last of its three."""
        report = yield
        mine = item.stash.get(_ITEM, None)
        if mine is None:
            return report
        mine.duration_s += call.duration
        if report.skipped and isinstance(report.longrepr, tuple):  # pytest would name the place in this plugin
            path, line, _ = item.reportinfo()
            report.longrepr = (str(path), (line or 0) + 1, report.longrepr[2])
        if call.excinfo is not None and (mine.judged is None or call.when == "teardown"):
            verdict, reason = classify(call.excinfo.value)
            substrate = judging_substrate(mine.law, mine.case.cell, self._setup.machine.hardware)
            mine.judged = Judged(mine.case, substrate, verdict, reason)
        if call.when == "teardown" and mine.judged is not None:
            # Builtin types only: anything else kills an xdist session (execnet DumpError).
            report.conformance = msgspec.to_builtins(self._result(item.nodeid, mine, mine.judged))  # type: ignore[attr-defined]
        return report

    def pytest_unconfigure(self) -> None:
        """End all ranks."""
        self._setup.store.close()
        gc.freeze()  # see `pytest_collection_finish`; of a session that ends before it
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
            repro=self._repro(nodeid),
            nodeid=nodeid,
        )

    def _repro(self, nodeid: str) -> str:
        return shlex.join(["pytest", "-n0", *self._setup.repro_options, f"--report-dir={_REPRO_DIRECTORY}", nodeid])

    # Fixtures of the laws: pytest must know the names; `judge` passes the real ones.

    @pytest.fixture
    def run(self) -> Callable[..., Any] | None:
        """See `conformance.laws.fixtures.Run`."""
        return None

    @pytest.fixture
    def measure(self) -> Callable[..., Any] | None:
        """See `conformance.laws.fixtures.Measure`."""
        return None


def _tell_pytest(judged: Judged) -> None:
    """Raise what makes pytest count the case as its verdict says."""
    __tracebackhide__ = True
    match judged.verdict:
        case Verdict.PASS | Verdict.QUALITY_WARNING:
            return
        case Verdict.UNSUPPORTED:
            pytest.skip(judged.reason)
        case Verdict.WAIVED:
            pytest.xfail(judged.reason)
        case Verdict.UNEXPECTED_PASS:
            pytest.fail(judged.reason, pytrace=False)
        case _:
            assert judged.error is not None, f"{judged.verdict} without an exception"
            raise judged.error
