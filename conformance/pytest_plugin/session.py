"""One process's part of a conformance session: which cases there are, and the verdict on each.

Runs in the xdist workers, or in the only process there is. What is known about the whole session, and the report, is
the business of `reporter`.
"""

import datetime
import gc
import importlib.metadata
import os
import shlex
import uuid
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from conformance.judge.law import Law, law_of
from conformance.judge.measurements import Measurement, collecting
from conformance.judge.skips import Unsupported
from conformance.judge.support import release, unsupported
from conformance.judge.verdicts import Verdict, classify
from conformance.judge.waivers import profile_waivers, the_waiver
from conformance.plan.cells import Cell
from conformance.plan.matrix import Matrix, load_matrix
from conformance.plan.selection import parse
from conformance.plan.substrates import Substrate
from conformance.project import PROJECT
from conformance.pytest_plugin.controller import Reporter
from conformance.pytest_plugin.durations import remembered_durations_s
from conformance.pytest_plugin.interruption import BriefInterrupt, EndsWorkers, take_sigterm_like_ctrl_c
from conformance.pytest_plugin.progress_line import ProgressLine
from conformance.pytest_plugin.shards import parse_shard
from conformance.report.baseline import Baseline
from conformance.report.schema import CaseResult
from conformance.run.devices.hardware import DETERMINISM, Hardware, device_type, find_hardware
from conformance.run.devices.leases import LeaseError, Leases
from conformance.run.devices.nvml import SESSION_VARIABLE, machine_devices
from conformance.run.pool import Pools, RunsTasks
from conformance.run.record import Record
from conformance.run.store import Clock, RecordStore

_REPRO_DIRECTORY = "conformance-report-repro"  # repeating a case must not overwrite the report that it is in


@dataclass
class CaseState:
    """What is known so far of the case that is running."""

    law: Law
    cell: Cell
    verdict: Verdict = Verdict.PASS
    reason: str = ""
    duration_s: float = 0.0
    measured: dict[str, Measurement] = field(default_factory=dict)


_CASE = pytest.StashKey[CaseState]()
POOLS = pytest.StashKey[RunsTasks]()
"""Of a session's configuration: what runs its tasks, if not processes of this host."""
HARDWARE = pytest.StashKey[Hardware]()
"""With it: what it runs them on."""


def start_session(config: pytest.Config) -> None:
    """Read the options and register the plugins of a session. Raises pytest.UsageError for what cannot be used."""
    if getattr(config.option, "dist", "no") == "loadgroup":
        # xdist 3.8.0 with pytest 9.2: grouping is silently lost, and a crashed worker hangs the session
        # (pytest-xdist #1386, #1323). Records are shared through the store, so nothing needs grouping.
        raise pytest.UsageError("--dist loadgroup is broken with this pytest (pytest-xdist #1386): use --dist load")
    take_sigterm_like_ctrl_c()
    gc.disable()  # until all is imported, see `Session.pytest_collection_finish`
    try:
        session = Session(config)
    except LeaseError as error:
        raise pytest.UsageError(str(error)) from None
    if session.is_controller:
        os.environ[SESSION_VARIABLE] = str(os.getpid())
    if session.hardware.devices:
        os.environ.update(DETERMINISM)  # oracles compute on a device too, and CUDA reads this once
    config.pluginmanager.register(session, "conformance-session")
    config.pluginmanager.register(BriefInterrupt(full=config.option.fulltrace), "conformance-brief-interrupt")
    if session.is_controller and getattr(config.option, "numprocesses", None):
        config.pluginmanager.register(EndsWorkers(), "conformance-ends-workers")
    if session.is_controller and not config.option.collectonly:
        reporter = Reporter(
            directory=session.report_directory,
            session=session.name,
            matrix_digest=session.matrix.digest,
            profile=session.profile,
            seed=config.option.seed,
            defect=session.defect,
            max_world_size=session.store.pools.max_world_size,
            hardware=session.hardware,
            allows=session.rules.allows,
            records=session.store.directory,
            baseline=session.baseline,
        )
        config.pluginmanager.register(reporter, "conformance-reporter")
        config.pluginmanager.register(ProgressLine(), "conformance-progress")
        config.option.xmlpath = config.option.xmlpath or str(session.report_directory / "junit.xml")
        if getattr(config.option, "maxschedchunk", None) is None:
            # A worker that holds many items would keep the others from helping with them (xdist docs, how-it-works).
            config.option.maxschedchunk = 1


class Session:
    """The plugin with a session's hooks and fixtures."""

    def __init__(self, config: pytest.Config) -> None:
        option = config.option
        inherited: dict[str, Any] = getattr(config, "workerinput", {}).get("conformance", {})
        self.is_controller = not hasattr(config, "workerinput")
        self.name: str = inherited.get("session", uuid.uuid4().hex[:12])
        self.profile: str = option.profile
        self.defect: str | None
        self.report_directory = Path(inherited.get("report_directory", Path(option.report_dir).resolve()))
        try:
            file = Path(option.matrix) if option.matrix else PROJECT / "matrix.yaml"
            self.matrix: Matrix = load_matrix(file)
            self.rules = self.matrix.profile(self.profile)
            self.waivers = profile_waivers(file, self.matrix, self.rules, today=datetime.date.today())
            selection = parse(option.cells) if option.cells else None
            cases = self.matrix.cases(self.profile, only=selection, seed=option.seed)
            self.cases = parse_shard(option.shard).of(cases) if option.shard else cases
            self.defect = _known_defect(option.defect)
            self.hardware = _hardware(config)
            self.baseline = Baseline(Path(option.baseline)) if option.baseline else None
        except ValueError as error:
            raise pytest.UsageError(str(error)) from None
        self._durations_s: dict[str, float] = inherited.get("durations_s", {})
        self._cells: dict[str, list[Cell]] = {}
        for case in self.cases:
            self._cells.setdefault(case.law, []).append(case.cell)
        self._asserted: dict[str, str] = {}
        self._options = [f"--profile={self.profile}"]
        self._options += [f"--matrix={option.matrix}"] if option.matrix else []
        self._options += [f"--seed={option.seed}"] if option.seed else []
        self._options += [f"--defect={self.defect}"] if self.defect else []
        self._options += [f"--accelerator={option.accelerator}"] if option.accelerator != "auto" else []
        self._options += [f"--share-gpu={option.share_gpu}"] if option.share_gpu != "auto" else []
        self.store = RecordStore(
            directory=Path(option.record_dir).resolve() if option.record_dir else self.report_directory / "records",
            session=self.name,
            torch_version=importlib.metadata.version("torch"),
            defect=self.defect,
            deadline_s=self.rules.deadline_s,
            pools=config.stash.get(POOLS, None) or _pools(self.hardware, isolate=option.isolate),
            hardware=self.hardware,
        )

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """The process that will run cases, which imports torch too, lets its rank server do the same meanwhile."""
        option = session.config.option
        if self.is_controller:
            self._durations_s = remembered_durations_s(session.config)
        runs_cases = not self.is_controller or not getattr(option, "numprocesses", None)
        if runs_cases and not option.collectonly and self.cases:
            self.store.pools.prepare()

    # Collection: law x cell.

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """On the controller: what each worker has to know."""
        node.workerinput["conformance"] = {
            "session": self.name,
            "report_directory": str(self.report_directory),
            "durations_s": self._durations_s,
        }

    @pytest.hookimpl(tryfirst=True)
    def pytest_pycollect_makeitem(self, name: str, obj: Any) -> list[pytest.Item] | None:
        """A law without a cell in this selection yields no case."""
        found = law_of(obj)
        if found is None:
            return None
        test = f"{obj.__module__}.{name}"
        first = self._asserted.setdefault(found.id, test)
        if first != test:
            raise pytest.UsageError(f"law {found.id} is asserted by {first} and by {test}: one law, one test")
        return None if found.id in self._cells else []

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        found = law_of(metafunc.function)
        if found is not None:
            cells = self._cells[found.id]
            metafunc.parametrize("cell", cells, ids=[cell.id for cell in cells])

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Preconditions first, then the widest worlds; the cases of one mesh, and of one cell, stay together.

        Within a mesh the cells that took longest in the last session come first, so that workers end together.
        """
        for item in items:
            found = law_of(getattr(item, "function", None))
            if found is not None:
                item.stash[_CASE] = CaseState(found, item.callspec.params["cell"])  # type: ignore[attr-defined]
        cells = dict.fromkeys(case.cell.id for case in self.cases)
        longest_first = sorted(cells, key=lambda cell: -self._durations_s.get(cell, 0.0))
        order = {cell: place for place, cell in enumerate(longest_first)}
        items.sort(key=lambda item: _position(item.stash.get(_CASE, None), order))

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """The whole suite was collected: no law of the matrix may be without a test. Leave the plan for the report."""
        # All that was imported stays. Without this every search for garbage goes through torch: while it is imported
        # (see `start_session`), while laws judge, and several times at the end, which takes longest of all.
        gc.freeze()
        gc.enable()
        cases = {item.nodeid: item.stash[_CASE] for item in session.items if _CASE in item.stash}
        whole_suite = all("::" not in argument and Path(argument).suffix != ".py" for argument in session.config.args)
        unasserted = self._cells.keys() - self._asserted.keys()
        problem = None
        if whole_suite and unasserted and not session.testsfailed:
            problem = f"matrix.yaml names laws that no test asserts: {', '.join(sorted(unasserted))}"
        if problem and self.is_controller:
            raise pytest.UsageError(problem)  # in a worker this would be its end, without a word: see the reporter
        if session.config.option.collectonly:
            return
        self.report_directory.mkdir(parents=True, exist_ok=True)
        plan = {
            nodeid: {"law": case.law.id, "must": case.law.must, "cell": case.cell.id, "repro": self._repro(nodeid)}
            for nodeid, case in cases.items()
        }
        part = self.report_directory / f"plan.{uuid.uuid4().hex}.part"
        part.write_bytes(msgspec.json.encode({"session": self.name, "cases": plan, "problem": problem}))
        part.rename(self.report_directory / "plan.json")

    # Running: verdicts.

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        case = item.stash.get(_CASE, None)
        if case is None:
            return (yield)
        self.store.clock, self.store.accepts = Clock(), case.law.substrates
        with collecting() as case.measured:
            return (yield)

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        case = item.stash.get(_CASE, None)
        if case is not None:
            missing = unsupported(
                case.law,
                case.cell,
                torch_version=self.store.torch_version,
                max_world_size=self.store.pools.max_world_size,
                hardware=self.hardware,
                profile=self.rules,
            )
            if missing:
                raise Unsupported(missing)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        case = item.stash.get(_CASE, None)
        if case is None:
            return report
        case.duration_s += call.duration
        if call.excinfo is not None:
            case.verdict, case.reason = classify(call.excinfo.value)
        if call.when == "call":
            self._waive(case, report)
            if self.baseline and case.verdict == Verdict.PASS:
                case.verdict, case.reason = self.baseline.judge(f"{case.law.id}/{case.cell.id}", case.measured)
        if call.when == "teardown":
            # Builtin types only: anything else kills an xdist session (execnet DumpError).
            report.conformance = msgspec.to_builtins(self._result(item, case))  # type: ignore[attr-defined]
        return report

    def _waive(self, case: CaseState, report: pytest.TestReport) -> None:
        """Make of a known failure what pytest calls xfailed, and of a waived case that passes a failure."""
        torch = release(self.store.torch_version)
        device = device_type(self._substrate(case))
        waiver = the_waiver(self.waivers, case.law.id, case.cell, device=device, torch=torch)
        if waiver is None:
            return
        case.verdict, case.reason = waiver.judge(case.verdict, case.reason)
        if case.verdict == Verdict.WAIVED:
            report.outcome, report.wasxfail = "skipped", case.reason
        elif case.verdict == Verdict.UNEXPECTED_PASS:
            report.outcome, report.longrepr = "failed", case.reason

    def pytest_unconfigure(self) -> None:
        self.store.close()
        gc.freeze()  # see `pytest_collection_finish`; of a session that ends before it
        gc.enable()

    def _result(self, item: pytest.Item, case: CaseState) -> CaseResult:
        return CaseResult(
            id=f"{case.law.id}/{case.cell.id}",
            law=case.law.id,
            must=case.law.must,
            cell=case.cell.id,
            substrate=self._substrate(case),
            verdict=case.verdict.value,
            reason=case.reason,
            duration_s=round(case.duration_s, 4),
            wait_s=round(self.store.clock.wait_s, 4),
            run_s=round(self.store.clock.run_s, 4),
            measured=case.measured,
            repro=self._repro(item.nodeid),
            nodeid=item.nodeid,
        )

    def _substrate(self, case: CaseState) -> Substrate:
        """On which a case runs, or would if it were supported."""
        return self.hardware.substrate(case.cell.world_size, case.law.substrates) or case.law.substrates[-1]

    def _repro(self, nodeid: str) -> str:
        return shlex.join(["pytest", "-n0", *self._options, f"--report-dir={_REPRO_DIRECTORY}", nodeid])

    # Fixtures of the laws.

    @pytest.fixture
    def run(self) -> Callable[..., Record]:
        """`run(cell)`: the record of a cell, run at most once per session."""
        return self.store.run

    @pytest.fixture
    def probe(self) -> Callable[[int], list[dict[str, Any]]]:
        """`probe(world_size)`: what each rank of a world finds in its surroundings."""
        return self.store.probe

    @pytest.fixture
    def measure(self) -> Callable[..., list[Any]]:
        """`measure(task, cell)`: what a task measures on each rank of a cell's world."""
        return self.store.measure


def _position(case: CaseState | None, order: dict[str, int]) -> tuple[bool, int, str, int, str]:
    if case is None:
        return True, 0, "", 0, ""
    cell = case.cell
    return not case.law.id.startswith("ENV-"), -cell.world_size, cell.mesh, order[cell.id], case.law.id


def _hardware(config: pytest.Config) -> Hardware:
    """What the options leave of the machine. Raises ValueError for options that cannot be."""
    option, given = config.option, config.stash.get(HARDWARE, None)
    if given is not None and option.accelerator != "cpu":
        return given
    return find_hardware(machine_devices(), accelerator=option.accelerator, share_gpu=option.share_gpu)


def _pools(hardware: Hardware, *, isolate: bool) -> Pools:
    slots = [device.uuid for device in hardware.devices]
    return Pools(devices=Leases(slots) if slots else None, isolate=isolate)


def _known_defect(defect: str | None) -> str | None:
    from conformance.defects.catalogue import require_known

    return None if defect is None else require_known(defect)
