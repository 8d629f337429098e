"""Laws beside the tests of a trainer's own project: `pytest --conformance-subject my_train.py`.

Each law on each cell is an item `law[cell]` of the project's session. The first item that runs starts one session of
`conformance judge` in a process of its own; all items, in all of xdist's workers, take their verdicts from its report.
So neither conftest files, options nor earlier tests of the project have a say in a verdict.
"""

import ast
import uuid
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from conformance.judge.verdicts import CONFORMANT, Verdict
from conformance.plan.matrix import FAST_CELLS, TRAINER_CELLS, Case, Matrix, load_matrix
from conformance.project import data_file
from conformance.pytest_plugin.report_files import case_properties
from conformance.report.explain import explain
from conformance.report.judged import Judgement, cause_lines, judgement, kept_judgement
from conformance.report.schema import CaseResult, Report
from conformance.report.text import annotations, headline
from conformance.run import known_trainers
from reference_trainer.checks import UsageError

MARKER = "conformance"
"""Name of the marker of all items: `-m conformance` runs them alone, `-m "not conformance"` leaves them out."""
FAULTS = "faults"
"""Name of the item that fails if the laws do not see injected faults."""


@dataclass(frozen=True)
class Guest:
    """Trainer that a project's session judges."""

    subject: str
    """Trainer as `conformance judge` takes it."""
    nodeid: str
    """Node of its items: `my_train.py::parallelize`."""
    path: Path
    """File of the trainer, or of the project if that is not known."""
    report_directory: Path


class GuestNode(pytest.Collector):
    """Collector of the items of one trainer."""

    def __init__(self, *, guest: Guest, cases: Sequence[Case], **node: Any) -> None:
        super().__init__(path=guest.path, **node)
        self.guest, self._cases = guest, cases
        self.selected: list[GuestItem] = []
        """Items that are left after all plugins have deselected others."""

    def collect(self) -> Iterator[pytest.Item]:
        """Yield an item for each case, and one about faults where they are tried."""
        for case in self._cases:
            yield GuestItem.from_parent(self, name=f"{case.law}[{case.cell.id}]", case=case)
        if not self.config.option.conformance_fast:
            yield GuestItem.from_parent(self, name=FAULTS, case=None)

    @cached_property
    def ended(self) -> Judgement:
        """End of the session about the trainer, which is run for the first item."""
        return self.config.stash[_SESSION].judgement(self)

    @cached_property
    def report(self) -> Report | None:
        """Report of that session, if it left one."""
        return self.ended.report

    @cached_property
    def results(self) -> dict[tuple[str, str], CaseResult]:
        """Result by law and cell."""
        return {(case.law, case.cell): case for case in self.report.cases} if self.report else {}

    @cached_property
    def told(self) -> dict[str, list[str]]:
        """Lines about the cause of each failure, by the id of its case: all for the case that stands for the cause."""
        told: dict[str, list[str]] = {}
        for cause in explain(self.report) if self.report else ():
            shown = f"  told with {cause.first.law}[{cause.first.cell}]"
            told |= {case.id: [shown] for each in cause.with_related for case in each.cases}
            told[cause.first.id] = list(cause_lines(cause))
        return told


class GuestItem(pytest.Item):
    """Law on a cell, or the question whether laws see faults, for the trainer of a `GuestNode`."""

    parent: GuestNode

    def __init__(self, *, case: Case | None, **node: Any) -> None:
        super().__init__(**node)
        self.case = case
        self.add_marker(MARKER)

    @property
    def result(self) -> CaseResult | None:
        """Result of the case, once it is judged; None for the item about faults."""
        return self.parent.results.get((self.case.law, self.case.cell.id)) if self.case else None

    def runtest(self) -> None:
        """Raise the outcome that pytest has for the verdict."""
        __tracebackhide__ = True
        if self.parent.report is None:
            self._tell_unjudged()
        elif self.case is None:
            self._tell_faults(self.parent.report)
        else:
            self._tell(self.result)

    def _tell_unjudged(self) -> None:
        """Fail the first item alone: the others have nothing to add."""
        __tracebackhide__ = True
        first = self.parent.selected[0]
        if self is not first:
            pytest.skip(f"not judged, see {first.nodeid}")
        pytest.fail(f"{self.parent.guest.subject} was not judged: {self.parent.ended.reason}", pytrace=False)

    def _tell_faults(self, report: Report) -> None:
        __tracebackhide__ = True
        trainer = report.trainer
        if trainer is None or not trainer.faults:
            pytest.skip("no fault was tried: no law holds on a cell that was selected")
        if trainer.blind_to:
            pytest.fail(f"no law sees {', '.join(trainer.blind_to)}: the verdicts do not count", pytrace=False)

    def _tell(self, result: CaseResult | None) -> None:
        __tracebackhide__ = True
        if result is None:
            pytest.fail(f"the session ended before this case: {self.parent.ended.reason}", pytrace=False)
        match Verdict(result.verdict):
            case Verdict.PASS | Verdict.QUALITY_WARNING:
                return
            case Verdict.UNSUPPORTED:
                pytest.skip(result.reason)
            case Verdict.WAIVED:
                pytest.xfail(result.reason)
        reason = result.reason if result.verdict == Verdict.FAIL else f"{result.verdict}: {result.reason}"
        lines = [reason, *self.parent.told.get(result.id, []), f"report: {self.parent.guest.report_directory}"]
        pytest.fail("\n".join(lines), pytrace=False)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        """Return the trainer's file and the name of the item."""
        return self.path, None, self.name


class GuestSession:
    """Plugin that adds the items of all trainers to a project's session."""

    def __init__(self, config: pytest.Config) -> None:
        """Raises pytest.UsageError for a trainer, or a file, that cannot be found."""
        inherited: dict[str, str] = getattr(config, "workerinput", {})
        self._name = inherited.get("conformance_guests", uuid.uuid4().hex)
        self._config, self._is_fast = config, config.option.conformance_fast
        self._directory = config.invocation_params.dir
        try:
            self._guests = [guest for given in config.option.conformance_subject for guest in self._found(given)]
            self._matrix: Matrix = load_matrix(data_file("matrix.yaml"))
        except UsageError as error:
            raise pytest.UsageError(str(error)) from None
        config.addinivalue_line("markers", f"{MARKER}: laws of FSDP2 and tensor parallelism, see --conformance-subject")

    def _found(self, given: str) -> Iterator[Guest]:
        """Yield the trainers that an option names: all decorated ones of a file without a name."""
        origin, _, name = given.partition(":")
        is_file = origin.endswith(".py")
        file = self._file(origin) if is_file else _file_of_module(origin) if name else None
        for each in [name] if name or not is_file else decorated(file or Path(origin)):
            subject = ":".join(filter(None, [str(file) if is_file else origin, each]))
            known_trainers.resolve(subject)
            root = self._config.rootpath
            node = file.relative_to(root).as_posix() if file is not None and file.is_relative_to(root) else origin
            short = known_trainers.name_of(subject).replace(":", "-")
            yield Guest(
                subject=subject,
                nodeid="::".join(filter(None, [node, each])),
                path=file or self._config.rootpath,
                report_directory=Path(self._directory, self._config.option.conformance_report_dir, short).resolve(),
            )

    def _file(self, origin: str) -> Path:
        """Return a file in the directory of the session, or of the project if options are in its configuration."""
        for directory in (self._directory, self._config.rootpath):
            if (directory / origin).is_file():
                return (directory / origin).resolve()
        raise UsageError(f"--conformance-subject: no file {origin}")

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Pass the name of the session to a worker."""
        node.workerinput["conformance_guests"] = self._name

    @pytest.hookimpl(tryfirst=True)  # before `-k` and `-m` deselect items
    def pytest_collection_modifyitems(self, session: pytest.Session, items: list[pytest.Item]) -> None:
        """Add the items of all trainers behind the tests of the project, which are seconds earlier."""
        for guest in self._guests:
            cases = self._matrix.trainer_cases(known_trainers.name_of(guest.subject), is_fast=self._is_fast)
            node = GuestNode.from_parent(
                session, name=guest.nodeid.rpartition("::")[2], nodeid=guest.nodeid, guest=guest, cases=cases
            )
            report = session.ihook.pytest_make_collect_report(collector=node)
            session.ihook.pytest_collectreport(report=report)  # so that pytest counts the items
            items += report.result

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Remember the items that are left of each trainer."""
        for item in session.items:
            if isinstance(item, GuestItem):
                item.parent.selected.append(item)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Give a report the time that its case has taken, and the properties of JUnit files."""
        report = yield
        if isinstance(item, GuestItem) and report.skipped and isinstance(report.longrepr, tuple):
            report.longrepr = (str(item.path), 1, report.longrepr[2])  # pytest would name a line of its own
        if isinstance(item, GuestItem) and call.when == "call" and item.result is not None and item.parent.report:
            report.duration = item.result.duration_s
            torch = str(item.parent.report.environment["packages"]["torch"])
            report.user_properties += case_properties(item.result, torch_version=torch)
        return report

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print annotations for GitHub, and a line about each trainer that was judged."""
        for guest in self._guests:
            ended = kept_judgement(guest.report_directory, self._name)
            if ended is None:
                continue
            report = ended.report
            terminalreporter.section(f"conformance of {guest.nodeid}")
            for line in _ending_lines(report, guest) if report else [ended.reason]:
                terminalreporter.write_line(line)

    def judgement(self, node: GuestNode) -> Judgement:
        """Return the end of the session about a trainer, on the cells of its selected items."""
        cells = dict.fromkeys(item.case.cell.id for item in node.selected if item.case)
        option, flags = self._config.option, ["--fast"] * self._is_fast
        everything = FAST_CELLS if self._is_fast else TRAINER_CELLS
        if cells and len(cells) < len(everything):
            flags.append(f"--cells=id in ({', '.join(cells)})")
        if all(item.case for item in node.selected):
            flags.append("--no-faults")
        if option.conformance_accelerator:
            flags.append(f"--accelerator={option.conformance_accelerator}")
        if option.conformance_accepted:
            flags.append(f"--accepted={self._accepted(option.conformance_accepted)}")
        guest = node.guest
        return judgement(
            guest.subject, flags, directory=guest.report_directory, cwd=self._directory, session=self._name
        )

    def _accepted(self, given: str) -> Path:
        return next(
            (file for at in (self._directory, self._config.rootpath) if (file := at / given).exists()), Path(given)
        )


_SESSION = pytest.StashKey[GuestSession]()


def start_guests(config: pytest.Config) -> None:
    """Register the plugin of a project's session. Raises pytest.UsageError as `GuestSession` does."""
    config.stash[_SESSION] = GuestSession(config)
    config.pluginmanager.register(config.stash[_SESSION], "conformance-guests")


_DECORATORS = ("subject", "own_loop")
_QUALIFIED = tuple(f"subjects.{name}" for name in _DECORATORS)


def decorated(file: Path) -> list[str]:
    """Return the names in a file that a decorator of `conformance.subjects` makes trainers of.

    The file is read and not executed. Raises UsageError if there is none, or if it is no Python.
    """
    try:
        module = ast.parse(file.read_text())
    except SyntaxError as error:
        raise UsageError(f"{file}:{error.lineno}: {error.msg}") from None
    decorators = {
        alias.asname or alias.name
        for node in ast.walk(module)
        if isinstance(node, ast.ImportFrom)
        and node.module in ("conformance.subjects", "conformance.subjects.decorated", "conformance.subjects.own_loop")
        for alias in node.names
        if alias.name in _DECORATORS
    }
    known = [node.name for node in module.body if isinstance(node, ast.FunctionDef) and _is_decorated(node, decorators)]
    if not known:
        raise UsageError(f"{file}: no function is decorated with subject(...) or own_loop(...): write {file.name}:NAME")
    return known


def _is_decorated(node: ast.FunctionDef, decorators: set[str]) -> bool:
    called = [each.func for each in node.decorator_list if isinstance(each, ast.Call)]
    return any(ast.unparse(function) in decorators or ast.unparse(function).endswith(_QUALIFIED) for function in called)


def _file_of_module(name: str) -> Path | None:
    """Return the file of a module; None if it is not found here: the process that judges may find it."""
    try:
        spec = find_spec(name)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin) if spec and spec.origin and Path(spec.origin).is_file() else None


def _ending_lines(report: Report, guest: Guest) -> Iterator[str]:
    yield from annotations(report)
    head = headline(report)
    yield head.line
    if head.warning:
        yield f"warning: {head.warning}"
    if report.trainer and report.trainer.seen:
        yield report.trainer.seen
    hint = "" if report.exit_code == CONFORMANT else ", which says more"
    yield f"report: {guest.report_directory}{hint}"
