"""Controller of a session: collects results, writes the report, decides the exit status."""

import datetime
import importlib
import json
import os
import time
import traceback
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
from msgspec.structs import asdict, replace

from conformance.judge.verdicts import BAD, CONFORMANT, NOT_CONFORMANT, SUITE_FAILED, Verdict, exit_status
from conformance.pytest_plugin.causing import trainer_causes
from conformance.pytest_plugin.expected import Expectation, plan_of
from conformance.pytest_plugin.locating import has_located, locations
from conformance.pytest_plugin.report_files import PLAN, ReportFiles, name_suite
from conformance.pytest_plugin.setup import SessionSetup
from conformance.pytest_plugin.shrinking import has_combined, smallest_cells
from conformance.pytest_plugin.terminal import SummarizedFailures
from conformance.report.coverage import judges_torch, session_coverage
from conformance.report.explain import explain
from conformance.report.facts import cell_facts, environment_facts, suite_digest
from conformance.report.html import html_report
from conformance.report.schema import CaseResult, Footer, Header, Report, verdict_counts
from conformance.report.text import annotations, markdown, terminal_lines
from conformance.torch_coverage.counting import TorchCoverage, count
from conformance.torch_coverage.reasons import read_reasons
from conformance.torch_coverage.seen import REPORT_FILE, seen_in_records
from conformance.torch_release import untried
from reference_trainer.checks import UsageError


class Controller:
    """Plugin of the process that the user started: the controller of xdist's workers, or the only process."""

    def __init__(self, setup: SessionSetup, summarized_failures: SummarizedFailures, config: pytest.Config) -> None:
        self._config = config
        self._setup, self._summarized_failures = setup, summarized_failures
        self._directory, self._baseline = setup.report_directory, setup.baseline
        try:
            self._files = ReportFiles(self._directory, records=setup.store.directory)
        except UsageError as error:
            raise pytest.UsageError(str(error)) from None
        self._start_s = time.monotonic()
        self._header = _header(setup)
        self._results: dict[str, CaseResult] = {}
        self._records: dict[str, list[str]] = {}
        self._crashed: dict[str, str] = {}
        self._planned: list[str] = []
        self._collection_failed = False
        self._report: Report | None = None
        self._calibration_s: float | None = None
        self._expectation: Expectation | None = None
        self._search_failures: list[str] = []
        self._files.write_line(self._header)

    # Results.

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Raise pytest.UsageError for another trainer that cannot be judged."""
        if self._setup.trainer is not None:
            try:
                _trainer_session().require_judgeable(
                    self._setup.store, runs_cases=not getattr(self._config.option, "numprocesses", None)
                )
            except UsageError as error:
                raise pytest.UsageError(str(error)) from None

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Remember the planned cases, if this process has collected them."""
        self._planned = self._planned or [item.nodeid for item in session.items]

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: object, ids: list[str]) -> None:
        """Remember the cases that a worker has collected."""
        self._planned = list(ids)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Remember that a file could not be collected."""
        self._collection_failed |= report.failed

    @pytest.hookimpl(tryfirst=True)  # before the terminal marks the case as ended
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take the result of a case, or the message that its worker died."""
        self._calibrate(getattr(report, "calibration_s", None))
        attached = getattr(report, "conformance", None)
        if attached is not None:
            self._files.replace_earlier()
            result = msgspec.convert(attached, CaseResult)
            self._results[result.nodeid] = result
            self._records[result.nodeid] = report.judged_records
            self._tell_news(result)
            self._files.write_line({"type": "case", **msgspec.to_builtins(result)})
        elif report.when not in ("setup", "call", "teardown"):  # xdist writes "???" for an item whose worker died
            self._files.replace_earlier()
            self._crashed[report.nodeid] = str(report.longrepr).splitlines()[0]

    def _calibrate(self, calibration_s: float | None) -> None:
        """Tell how long the session is expected to take, once the first worker has calibrated the machine."""
        if self._calibration_s is not None or calibration_s is None:
            return
        self._calibration_s = calibration_s
        setup = self._setup
        plan = plan_of(self._planned, setup.cases, setup.matrix, profile=setup.profile_name, seed=setup.seed)
        if plan is not None:
            self._expectation = Expectation(
                plan,
                calibration_s=calibration_s,
                processors=len(os.sched_getaffinity(0)),
                workers=_workers(self._config),
            )
            _announce(self._config, self._expectation.first_line())

    def _tell_news(self, result: CaseResult) -> None:
        """Tell if the case that has ended changes how long the session is expected to take."""
        elapsed_s = time.monotonic() - self._start_s
        news = self._expectation.news(result, elapsed_s=elapsed_s) if self._expectation else ""
        if news:
            _announce(self._config, news)

    # End.

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> Generator[None]:
        """Give every planned case a verdict, and write the report; statuses of usage and internal errors stay."""
        with self._files.noting():  # pytest's junit.xml, for which a full disk has no space either
            yield
        self._finish(session, exitstatus)

    def _finish(self, session: pytest.Session, exitstatus: int) -> None:
        self._add_missing()
        counts = Counter(Verdict(result.verdict) for result in self._results.values())
        status = exit_status(counts, allows=self._setup.profile.allows)
        if exitstatus in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.INTERNAL_ERROR):
            status = int(exitstatus)
        elif self._collection_failed or (session.testsfailed and status == CONFORMANT):
            status = SUITE_FAILED  # an item failed that is no case
        report = Report(
            **asdict(self._header),
            planned=len(self._planned),
            executed=sum(count for verdict, count in counts.items() if verdict != Verdict.NOT_RUN),
            verdicts=verdict_counts(self._results.values()),
            exit_code=status,
            duration_s=round(time.monotonic() - self._start_s, 3),
            cells={},
            coverage=session_coverage(
                self._setup.matrix, self._setup.profile_name, self._results.values(), seed=self._setup.seed
            ),
            cases=sorted(self._results.values(), key=lambda result: result.id),
            accepted=self._setup.accepted,
            calibration_s=self._calibration_s,
            expected_s=self._expectation.session_s if self._expectation else None,
            workers=_workers(session.config),
        )
        if self._setup.store.covers_torch:
            report = replace(report, torch_coverage=self._torch_coverage())
        if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            report = self._with_smallest(self._with_trainer(report), session.config)
            report = self._with_causes(self._with_locations(report, session.config))
        cells = cell_facts(self._setup.store.directory, session=self._header.session)
        self._report = replace(report, cells=cells)
        self._leave_files(self._report, junit=Path(session.config.option.xmlpath))
        session.exitstatus = SUITE_FAILED if self._files.unwritable else self._report.exit_code

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the summary."""
        self._summarized_failures.restore(terminalreporter)
        if self._report is None:
            return
        write = terminalreporter.write_line
        terminalreporter.section("conformance")
        for warning in (self._setup.expired_waivers, self._files.unwritable, *self._search_failures):
            if warning:
                write(warning)
        place = f"report: {self._directory}"
        if self._files.has_earlier:
            place = f"no case has ended, so {self._directory} keeps the report of an earlier session"
        told = annotations(self._report, is_asked=terminalreporter.config.option.annotations)
        for line in [*told, *terminal_lines(self._report, place)]:
            write(line)
        if self._baseline:
            write(f"\n{self._baseline.difference(self._report)}")

    def _torch_coverage(self) -> TorchCoverage:
        """Return the coverage of torch by the records that laws have judged, and write all that they have seen."""
        judging = [result for result in self._results.values() if judges_torch(result)]
        records = {record for result in judging for record in self._records.get(result.nodeid, ())}
        seen = seen_in_records(self._setup.store.directory, records)
        with self._files.noting():
            (self._directory / REPORT_FILE).write_bytes(msgspec.json.encode(seen, order="sorted"))
        return count(seen, read_reasons())

    def _with_trainer(self, report: Report) -> Report:
        """Return the report with facts about another trainer; faults that no law sees make it not conformant."""
        if self._setup.trainer is None:
            return report
        setup = self._setup
        trainer = _trainer_session().trainer_facts(
            setup.store, report.cases, setup.trainer, machine=setup.machine, with_faults=setup.faults
        )
        is_blind = report.exit_code == CONFORMANT and trainer.blind_to
        return replace(report, trainer=trainer, exit_code=NOT_CONFORMANT if is_blind else report.exit_code)

    def _with_smallest(self, report: Report, config: pytest.Config) -> Report:
        """Return the report with the smallest failing cells, if something failed, or why the search had no end."""
        explanations = explain(report)
        if report.trainer is not None or self._setup.shrink_s <= 0 or not has_combined(explanations):
            return report
        _announce(config, f"searching the smallest failing cells (at most {self._setup.shrink_s:g} s, see --shrink)")
        try:
            return replace(report, smallest=smallest_cells(self._setup, report.cases, explanations))
        except (KeyboardInterrupt, Exception) as error:
            ended = f"the search ended with {type(error).__name__}: {error}"
            self._search_failures.append(f"no smallest failing cells: {ended}; report.json has the traceback")
            return replace(report, search_failure=traceback.format_exc())

    def _with_locations(self, report: Report, config: pytest.Config) -> Report:
        """Return the report with the first wrong places, if something failed, and the first error of their search."""
        explanations = explain(report)
        if self._setup.explain_s <= 0 or not has_located(self._setup, explanations):
            return report
        _announce(config, f"searching the first wrong places (at most {self._setup.explain_s:g} s, see --explain)")
        try:
            found, error = locations(self._setup, report.cases, explanations)
        except (KeyboardInterrupt, Exception) as raised:
            found, error = [], raised
        if error is None:
            return replace(report, locations=found)
        ended = traceback.format_exception_only(error)[0].splitlines()[0]
        self._search_failures.append(f"not all first wrong places: {ended}; report.json has the traceback")
        return replace(report, locations=found, location_failure="".join(traceback.format_exception(error)))

    def _with_causes(self, report: Report) -> Report:
        """Return the report with the first causes of another trainer's failures, and the first error of their search.

        They are searched for within the time for first wrong places, in which those are found before.
        """
        if report.trainer is None or not any(case.verdict in BAD for case in report.cases):
            return report
        try:
            causes, error = trainer_causes(self._setup, report)
        except (KeyboardInterrupt, Exception) as raised:
            causes, error = [], raised
        if error is None:
            return replace(report, causes=causes)
        ended = traceback.format_exception_only(error)[0].splitlines()[0]
        self._search_failures.append(f"not all first causes: {ended}; report.json has the traceback")
        failure = report.location_failure or "".join(traceback.format_exception(error))
        return replace(report, causes=causes, location_failure=failure)

    def _add_missing(self) -> None:
        missing = [nodeid for nodeid in self._planned if nodeid not in self._results]
        plan = self._read_plan().get("cases", {}) if missing else {}
        for nodeid in missing:
            known = plan.get(nodeid, {"id": nodeid, "law": "?", "must": "", "cell": "?", "repro": "?"})
            crash = self._crashed.get(nodeid)
            self._results[nodeid] = CaseResult(
                id=known["id"],
                law=known["law"],
                must=known["must"],
                cell=known["cell"],
                substrate="",
                verdict=(Verdict.ERROR if crash else Verdict.NOT_RUN).value,
                reason=crash or "the session ended before this case",
                duration_s=0.0,
                wait_s=0.0,
                run_s=0.0,
                measured={},
                repro=known["repro"],
                nodeid=nodeid,
            )

    def _read_plan(self) -> dict[str, Any]:
        """Return the plan of this session, which collecting processes write: `cases` by node id."""
        file = self._directory / PLAN
        if not file.exists():
            return {}
        plan: dict[str, Any] = json.loads(file.read_text())
        return plan if plan["session"] == self._header.session else {}

    def _leave_files(self, report: Report, *, junit: Path) -> None:
        """Write the report, unless no case has ended and an earlier report is there; that stays."""
        footer = Footer(
            planned=report.planned,
            executed=report.executed,
            verdicts=report.verdicts,
            exit_code=report.exit_code,
            duration_s=report.duration_s,
        )
        if self._files.has_earlier:
            self._files.keep_earlier()
        else:
            if not self._files.unwritable:
                with self._files.noting():
                    name_suite(junit, report)
            self._files.write_line(footer)
            baseline = self._baseline.report if self._baseline else None
            self._files.publish(
                {
                    "report.json": msgspec.json.format(msgspec.json.encode(report), indent=1),
                    "report.html": html_report(report, baseline=baseline).encode(),
                    "summary.md": markdown(report).encode(),
                }
            )
        self._files.close()


def _announce(config: pytest.Config, text: str) -> None:
    reporter: pytest.TerminalReporter | None = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:
        reporter.write_line(f"\n{text}")


def _workers(config: pytest.Config) -> int:
    """Return the number of processes that run cases."""
    return getattr(config.option, "numprocesses", None) or 1


def _trainer_session() -> ModuleType:
    """Return the module about other trainers in sessions, which takes torch: other controllers do without it."""
    return importlib.import_module("conformance.subjects.session")


def _header(setup: SessionSetup) -> Header:
    machine = setup.machine
    warning = untried(machine.torch_version) if setup.trainer is not None else ""
    return Header(
        session=setup.name,
        profile=setup.profile_name,
        seed=setup.seed,
        started=datetime.datetime.now().isoformat(timespec="seconds"),
        suite_digest=suite_digest(),
        matrix_digest=setup.matrix.digest,
        defect=setup.defect,
        selection=setup.selection,
        environment={
            **environment_facts(machine.hardware),
            "max_world_size": machine.max_world_size,
            **({"untried_torch": warning} if warning else {}),
        },
    )
