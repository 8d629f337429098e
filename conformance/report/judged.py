"""Sessions about other trainers in separate processes, for the tests of the projects that have the trainers.

A project's tests may have changed torch, imported a module twice or left a process group: the session sees none of it.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from filelock import FileLock

from conformance.judge.verdicts import CONFORMANT
from conformance.report.explain import Explanation, explain
from conformance.report.schema import Report, read_report
from conformance.report.text import headline
from reference_trainer.checks import UsageError

_ENDED = "judgement.json"


class Judgement(msgspec.Struct, frozen=True):
    """End of a session about a trainer."""

    session: str
    """Name of the session of tests that asked for it."""
    status: int
    """Exit status of `conformance judge`."""
    output: str
    """Text that the session has printed."""
    directory: str
    """Directory of its report."""

    @property
    def report(self) -> Report | None:
        """Report of the session; None if it left none, since the trainer could not be judged."""
        try:
            return read_report(Path(self.directory))
        except UsageError:
            return None

    @property
    def reason(self) -> str:
        """Last lines of the output: one line says why a trainer cannot be judged."""
        return "\n".join(self.output.strip().splitlines()[-5:])


def judge(subject: str, *, accepted: str | Path | None = None, fast: bool = False, options: Sequence[str] = ()) -> None:
    """Judge a trainer, for use in a test; returns if it is conformant.

    `subject` is `MODULE:NAME`, `FILE.py:NAME` or a registered name, as `conformance judge` takes it; `accepted` a file
    of accepted failures, `options` further options of the command. Raises AssertionError with the causes of failures,
    or with the line that says why the trainer cannot be judged.
    """
    with tempfile.TemporaryDirectory(prefix="conformance-") as directory:
        given = [*(["--accepted", str(accepted)] if accepted else []), *(["--fast"] if fast else []), *options]
        ended = judgement(subject, given, directory=Path(directory) / "report", cwd=Path.cwd())
        if ended.status == CONFORMANT:
            return
        report = ended.report
        raise AssertionError("\n".join(failure_lines(report)) if report else ended.reason)


def judgement(subject: str, options: Sequence[str], *, directory: Path, cwd: Path, session: str = "") -> Judgement:
    """Return the end of a session about a trainer, which is run unless the test session `session` has run it already.

    Processes that ask at the same time wait for the one that runs it. The report is left in `directory`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    kept = directory / _ENDED
    with FileLock(directory / "judgement.lock"):
        if session and (ended := kept_judgement(directory, session)):
            return ended
        kept.unlink(missing_ok=True)
        (directory / "report.json").unlink(missing_ok=True)
        status, output = _run(["judge", subject, f"--report-dir={directory}", *options], cwd)
        ended = Judgement(session=session, status=status, output=output, directory=str(directory))
        kept.write_bytes(msgspec.json.encode(ended))
    return ended


def kept_judgement(directory: Path, session: str) -> Judgement | None:
    """Return the judgement that a test session has left in a directory; None if it has left none."""
    try:
        ended = msgspec.json.decode((directory / _ENDED).read_bytes(), type=Judgement)
    except (OSError, msgspec.DecodeError):
        return None
    return ended if ended.session == session else None


def failure_lines(report: Report) -> Iterator[str]:
    """Yield the outcome of a session, and for each cause of failures its lines."""
    yield headline(report).line
    for each in explain(report):
        yield f"{each.first.verdict}: {each.first.id}: {each.short_reason}"
        yield from cause_lines(each)
    if report.trainer and report.trainer.blind_to:
        yield f"no law sees {', '.join(report.trainer.blind_to)}: these verdicts do not count"


def cause_lines(cause: Explanation) -> Iterator[str]:
    """Yield the law of a cause, and details."""
    yield f"  {cause.first.must}"
    yield from (f"  {line}" for line in cause.details)


def _run(arguments: Sequence[str], cwd: Path) -> tuple[int, str]:
    """Run a command of the suite where this process finds its modules; pytest's own variables are not inherited."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    process = subprocess.Popen(
        [sys.executable, "-m", "conformance", *arguments],
        cwd=cwd,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate()
    except BaseException:
        process.terminate()
        process.wait()
        raise
    return process.returncode, output
