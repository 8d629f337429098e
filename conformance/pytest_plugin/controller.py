"""Controller of a session: collects results, writes the report, decides the exit status."""

import datetime
import json
import shutil
import time
from collections import Counter
from typing import IO, Any

import msgspec
import pytest

from conformance.judge.verdicts import CONFORMANT, SUITE_FAILED, Verdict, exit_status
from conformance.pytest_plugin.order import remember_durations
from conformance.pytest_plugin.setup import SessionSetup
from conformance.report.cell_facts import cell_facts
from conformance.report.environment import environment_facts, suite_digest
from conformance.report.html import html_report
from conformance.report.schema import CaseResult, Footer, Header, Report
from conformance.report.text import markdown, terminal_lines

_OWN_FILES = ("report.json", "report.jsonl", "report.html", "summary.md", "junit.xml", "plan.json")


class Controller:
    """Plugin of the process that the user started: the controller of xdist's workers, or the only process."""

    def __init__(self, setup: SessionSetup) -> None:
        self._setup = setup
        self._directory, self._baseline = setup.report_directory, setup.baseline
        self._start_s = time.monotonic()
        self._header = _header(setup)
        self._results: dict[str, CaseResult] = {}
        self._crashed: dict[str, str] = {}
        self._planned: list[str] = []
        self._collection_failed = False
        self._report: Report | None = None
        self._unwritable = ""
        self._stream = self._open()

    # Results.

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Remember the planned cases, if this process has collected them."""
        self._planned = self._planned or [item.nodeid for item in session.items]

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: object, ids: list[str]) -> None:
        """Remember the cases that a worker has collected. Raises pytest.UsageError for a problem in the plan."""
        self._planned = list(ids)
        problem = self._read_plan().get("problem")
        if problem:
            raise pytest.UsageError(problem)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Remember that a file could not be collected."""
        self._collection_failed |= report.failed

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take the result of a case, or the message that its worker died."""
        attached = getattr(report, "conformance", None)
        if attached is not None:
            result = msgspec.convert(attached, CaseResult)
            self._results[result.nodeid] = result
            self._write_line({"type": "case", **msgspec.to_builtins(result)})
        elif report.when not in ("setup", "call", "teardown"):  # xdist writes "???" for an item whose worker died
            self._crashed[report.nodeid] = str(report.longrepr).splitlines()[0]

    # End.

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Give every planned case a verdict, and write the report; statuses of usage and internal errors stay."""
        self._add_missing()
        counts = Counter(Verdict(result.verdict) for result in self._results.values())
        status = exit_status(counts, allows=self._setup.profile.allows)
        if exitstatus in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.INTERNAL_ERROR):
            status = int(exitstatus)
        elif self._collection_failed or (session.testsfailed and status == CONFORMANT):
            status = SUITE_FAILED  # an item failed that is no case
        verdicts = {verdict.value: counts[verdict] for verdict in Verdict if counts[verdict]}
        self._report = Report(
            session=self._header.session,
            environment=self._header.environment,
            profile=self._header.profile,
            seed=self._header.seed,
            started=self._header.started,
            suite_digest=self._header.suite_digest,
            matrix_digest=self._header.matrix_digest,
            defect=self._header.defect,
            planned=len(self._planned),
            executed=sum(count for verdict, count in counts.items() if verdict != Verdict.NOT_RUN),
            verdicts=verdicts,
            exit_code=status,
            duration_s=round(time.monotonic() - self._start_s, 3),
            cells=cell_facts(self._setup.store.directory, session=self._header.session),
            cases=sorted(self._results.values(), key=lambda result: result.id),
        )
        self._publish(self._report)
        remember_durations(session.config, self._results.values())
        session.exitstatus = SUITE_FAILED if self._unwritable else status

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the summary."""
        if self._report is None:
            return
        write = terminalreporter.write_line
        terminalreporter.section("conformance")
        for line in terminal_lines(self._report, self._directory):
            write(line)
        if self._baseline:
            write(f"\n{self._baseline.difference(self._report)}")
        if self._unwritable:
            write(f"{self._unwritable}: exit status {SUITE_FAILED}")

    def _add_missing(self) -> None:
        missing = [nodeid for nodeid in self._planned if nodeid not in self._results]
        plan = self._read_plan().get("cases", {}) if missing else {}
        for nodeid in missing:
            known = plan.get(nodeid, {"law": "?", "must": "", "cell": "?", "repro": "?"})
            law, cell = known["law"], known["cell"]
            crash = self._crashed.get(nodeid)
            self._results[nodeid] = CaseResult(
                id=f"{law}/{cell}" if law != "?" else nodeid,
                law=law,
                must=known["must"],
                cell=cell,
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
        """Return the plan of this session, which collecting processes write: `cases` by node id, and a `problem`."""
        file = self._directory / "plan.json"
        if not file.exists():
            return {}
        plan: dict[str, Any] = json.loads(file.read_text())
        return plan if plan["session"] == self._header.session else {}

    # Files.

    def _open(self) -> IO[str]:
        """Remove an older report and open the stream of lines. Raises pytest.UsageError if that is impossible."""
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            for name in _OWN_FILES:
                (self._directory / name).unlink(missing_ok=True)
            shutil.rmtree(self._directory / "records", ignore_errors=True)
            stream = (self._directory / "report.jsonl").open("w")
        except OSError as error:
            raise pytest.UsageError(f"--report-dir {self._directory} cannot be written: {error}") from None
        self._stream = stream
        self._write_line(msgspec.to_builtins(self._header))
        return stream

    def _write_line(self, row: object) -> None:
        """Write a line of the stream; a full disk must not hide the verdicts, which are printed at the end."""
        try:
            self._stream.write(msgspec.json.encode(row).decode() + "\n")
            self._stream.flush()
        except OSError as error:
            self._unwritable = f"the report cannot be written to {self._directory}: {error.strerror}"

    def _publish(self, report: Report) -> None:
        footer = Footer(
            planned=report.planned,
            executed=report.executed,
            verdicts=report.verdicts,
            exit_code=report.exit_code,
            duration_s=report.duration_s,
        )
        self._write_line(msgspec.to_builtins(footer))
        unfinished = self._directory / "report.json.part"
        try:
            self._stream.close()
            unfinished.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))
            unfinished.rename(self._directory / "report.json")
            baseline = self._baseline.report if self._baseline else None
            (self._directory / "report.html").write_text(html_report(report, baseline=baseline))
            (self._directory / "summary.md").write_text(markdown(report))
            (self._directory / "plan.json").unlink(missing_ok=True)
        except OSError as error:
            self._unwritable = f"the report cannot be written to {self._directory}: {error.strerror}"


def _header(setup: SessionSetup) -> Header:
    machine = setup.machine
    return Header(
        session=setup.name,
        profile=setup.profile_name,
        seed=setup.seed,
        started=datetime.datetime.now().isoformat(timespec="seconds"),
        suite_digest=suite_digest(),
        matrix_digest=setup.matrix.digest,
        defect=setup.defect,
        environment={**environment_facts(machine.hardware), "max_world_size": machine.max_world_size},
    )
