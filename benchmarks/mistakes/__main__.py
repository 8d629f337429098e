"""Verdicts on a set of mistakes: `python -m benchmarks.mistakes [OUT] [--set FOLDER] [--write RUN] [ID ...]`.

Each mistake of the set is put into its trainer, which `conformance judge` judges as its owner would; the first cause in
report.json is compared with the one that was written down before. Afterwards the trainers are judged without mistakes.
OUT keeps reports and rows, so that an interrupted run goes on. `--write` keeps the rows of OUT in the set as those of a
run, which runs.yaml describes. It writes the blocks of docs/mistakes.md, as the command without OUT does.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec

from benchmarks.mistakes import FOLDER, Mistake, MistakeSet, Outcome, Subject
from benchmarks.mistakes.page import PAGE, Row, Rows, keep, written
from conformance.judge.verdicts import Verdict
from conformance.project import PROJECT
from conformance.report.causes import Cause
from conformance.report.schema import Report
from reference_trainer.checks import UsageError

_CONFORMANT, _NOT_CONFORMANT, _REFUSED = 0, 1, 4


class Judged(NamedTuple):
    """Session of `conformance judge`."""

    status: int
    output: str
    report: Report | None
    seconds: float

    @property
    def cause(self) -> Cause | None:
        """First cause of most cells, if there is one."""
        return self.report.causes[0] if self.report and self.report.causes else None

    @property
    def failing(self) -> list[str]:
        """Laws that fail, each once."""
        bad = {Verdict.FAIL, Verdict.TIMEOUT, Verdict.CRASH}
        return sorted({case.law for case in self.report.cases if case.verdict in bad}) if self.report else []

    @property
    def outcome(self) -> Outcome | None:
        """How the session ended."""
        if self.status == _REFUSED:
            return "refused"
        verdicts = {case.verdict for case in self.report.cases} if self.report else set()
        if Verdict.TIMEOUT in verdicts:
            return "hang"
        if self.cause is not None and self.cause.traceback:
            return "crash"
        return "fail" if self.failing else None

    @property
    def text(self) -> str:
        """Words that the owner reads first."""
        if self.cause is not None:
            return f"{self.cause.sentence} ({self.cause.where})" if self.cause.where else self.cause.sentence
        if self.status == _REFUSED:
            return next((line for line in reversed(self.output.splitlines()) if "ERROR" in line), "")
        return ""


def judged(subject: str, directory: Path, *options: str) -> Judged:
    """Judge a subject in a new process, and leave report and output in a directory."""
    command = [
        sys.executable,
        "-m",
        "conformance",
        "judge",
        subject,
        *options,
        "--report-dir",
        str(directory / "report"),
    ]
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    start_s = time.monotonic()
    ended = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True)
    seconds = time.monotonic() - start_s
    output = ended.stdout + ended.stderr
    (directory / "output.txt").write_text(output)
    file = directory / "report" / "report.json"
    report = msgspec.json.decode(file.read_bytes(), type=Report) if file.exists() else None
    return Judged(ended.returncode, output, report, seconds)


def row_of(name: str, mistake: Mistake, trainer: Subject, directory: Path) -> Row:
    """Judge a trainer with a mistake on the cells that can show it."""
    file = directory / trainer.file.name
    file.write_text(mistake.patched(trainer.file.read_text()))
    subject = f"{file.resolve()}:{trainer.name}"
    session = judged(subject, directory, "--cells", mistake.cells, "--no-faults", f"--limit={mistake.limit_s}")
    cause, text = session.cause, session.text
    traceback = cause.traceback if cause else ""
    is_right = (
        session.outcome == mistake.outcome
        and {*mistake.laws} <= {*session.failing}
        and mistake.is_named(f"{text}\n{traceback}")
    )
    return Row(
        name=name,
        is_caught=session.status in (_NOT_CONFORMANT, _REFUSED) and session.outcome is not None,
        outcome=session.outcome,
        failing=session.failing,
        first_law=cause.law if cause else "",
        text=text,
        is_right=is_right,
        seconds=round(session.seconds, 1),
    )


def row_of_correct(name: str, trainer: Subject, directory: Path, *options: str) -> Row:
    """Judge a trainer without a mistake on all cells, faults included unless an option leaves them out."""
    session = judged(f"{trainer.file}:{trainer.name}", directory, *options)
    return Row(
        name=name,
        is_caught=session.status != _CONFORMANT,
        outcome=session.outcome,
        failing=session.failing,
        first_law=session.cause.law if session.cause else "",
        text=session.text or "" if session.status == _CONFORMANT else session.text or session.output[-300:],
        is_right=session.status == _CONFORMANT,
        seconds=round(session.seconds, 1),
    )


def main() -> None:
    """Judge all trainers of a set, print one line for each, and leave the rows."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mistakes", description=__doc__)
    parser.add_argument("out", type=Path, nargs="?", help="write docs/mistakes.md, and judge nothing, without it")
    parser.add_argument("id", nargs="*", help="only these, again")
    parser.add_argument("--set", type=Path, default=FOLDER, help="folder of the set", metavar="FOLDER")
    parser.add_argument("--write", metavar="RUN", help="also write docs/mistakes.md")
    parser.add_argument("--no-faults", action="store_true", help="put no faults into trainers without a mistake")
    options = parser.parse_args()
    if options.out is None:
        PAGE.write_text(written(PAGE.read_text()))
        return
    chosen = MistakeSet(options.set)
    known, trainers = chosen.mistakes, chosen.subjects
    if unknown := {*options.id} - known.keys() - trainers.keys():
        raise UsageError(f"unknown: {', '.join(sorted(unknown))}")
    for name in options.id or [*known, *trainers]:
        directory = options.out / name
        directory.mkdir(parents=True, exist_ok=True)
        if (directory / "row.json").exists() and not options.id:
            continue
        if name in known:
            row = row_of(name, known[name], trainers[known[name].trainer], directory)
        else:
            row = row_of_correct(name, trainers[name], directory, *(["--no-faults"] if options.no_faults else []))
        (directory / "row.json").write_bytes(msgspec.json.encode(row))
        print(
            f"{'right' if row.is_right else 'WRONG'} {name}: {row.outcome} {row.first_law}: {row.text[:300]}",
            flush=True,
        )
    if options.write:
        rows = Rows(*(_kept(options.out, names) for names in (known, trainers)))
        keep(options.write, rows, chosen)
        PAGE.write_text(written(PAGE.read_text()))


def _kept(out: Path, names: Iterable[str]) -> list[Row]:
    """Return the rows of a directory, some of which may not be judged yet."""
    files = [out / name / "row.json" for name in names]
    return [msgspec.json.decode(file.read_bytes(), type=Row) for file in files if file.exists()]


if __name__ == "__main__":
    main()
