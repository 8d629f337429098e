"""Verdicts on a set of mistakes: `python -m benchmarks.mistakes OUT [--set FOLDER] [--write RUN] [ID ...]`.

Each mistake of the set is put into its trainer, which `conformance judge` judges as its owner would; the first cause in
report.json is compared with the one that was written down before. Afterwards the trainers are judged without mistakes.
OUT keeps reports and rows, so that an interrupted run goes on. `--write` keeps the rows of OUT in the set as those of a
run, which runs.yaml describes, and writes the set's block of docs/mistakes.md with all its runs.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
from tabulate import tabulate

from benchmarks.mistakes import FOLDER, Mistake, MistakeSet, Outcome, Subject
from conformance.cli.blocks import write_block
from conformance.judge.verdicts import Verdict
from conformance.project import PROJECT
from conformance.report.causes import Cause
from conformance.report.schema import Report
from reference_trainer.checks import UsageError
from reference_trainer.strict_yaml import convert, load

PAGE = PROJECT / "docs" / "mistakes.md"
_CONFORMANT, _NOT_CONFORMANT, _REFUSED = 0, 1, 4


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one trainer, with a mistake or without."""

    name: str
    is_caught: bool
    """True if a law fails, or the trainer is refused."""
    outcome: Outcome | None
    """How the session ended; None for a trainer that is conformant."""
    failing: list[str]
    """Laws that fail."""
    first_law: str
    text: str
    """First cause as it is told."""
    is_right: bool
    seconds: float


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


class Run(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Run of a set, of which the rows are kept: an entry of runs.yaml."""

    title: str
    about: str
    why: dict[str, str] = {}
    """Reasons of the rows that are not right, by name."""


class Rows(msgspec.Struct, frozen=True):
    """Results of a run."""

    mistakes: list[Row]
    correct: list[Row]


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


def as_markdown(run: Run, rows: Rows, known: Mapping[str, Mistake], *, size: int) -> str:
    """Return the section of a run: mistakes with the first cause that is named, and trainers without mistakes.

    `size` is the number of rows of the set, of which those that the run lacks are told.
    """
    missing = size - len(rows.mistakes) - len(rows.correct)
    caught, right = (sum(getattr(row, field) for row in rows.mistakes) for field in ("is_caught", "is_right"))
    table = [
        [
            row.name,
            known[row.name].trainer,
            _plain(known[row.name].what),
            "yes" if row.is_caught else "**no**",
            "yes" if row.is_right else f"**no**: {run.why.get(row.name, '?')}",
            _plain(row.text),
        ]
        for row in rows.mistakes
    ]
    conformant = [
        [row.name, "conformant" if row.is_right else f"**not**: {run.why.get(row.name, '?')}; told: {_plain(row.text)}"]
        for row in rows.correct
    ]
    headers = ["id", "trainer", "mistake", "caught", "right first cause", "first cause as told"]
    about_mistakes = [
        f"{caught} of {len(rows.mistakes)} mistakes are caught, {right} with the right first cause.",
        tabulate(table, headers=headers, tablefmt="github"),
    ]
    return "\n\n".join(
        [
            f"### {run.title}",
            run.about + (f" **{missing} of the {size} rows were not judged.**" if missing else ""),
            *(about_mistakes if known else ()),
            f"{sum(row.is_right for row in rows.correct)} of {len(rows.correct)} trainers without mistakes are "
            "conformant.",
            tabulate(conformant, headers=["trainer", "verdict"], tablefmt="github"),
        ]
    )


def write(name: str, rows: Rows, chosen: MistakeSet) -> None:
    """Keep the rows of a run in its set, and write the set's block of the page with all its runs.

    Raises UsageError if runs.yaml does not describe the run.
    """
    runs = convert(load(chosen.folder / "runs.yaml"), dict[str, Run])
    if name not in runs:
        raise UsageError(f"{chosen.folder / 'runs.yaml'} does not describe the run {name}")
    kept = chosen.folder / "runs"
    kept.mkdir(exist_ok=True)
    (kept / f"{name}.json").write_bytes(msgspec.json.format(msgspec.json.encode(rows)) + b"\n")
    sections = [
        as_markdown(
            run,
            msgspec.json.decode((kept / f"{known}.json").read_bytes(), type=Rows),
            chosen.mistakes,
            size=len(chosen.mistakes) + len(chosen.subjects),
        )
        for known, run in runs.items()
        if (kept / f"{known}.json").exists()
    ]
    write_block(PAGE, chosen.folder.name, "\n\n".join(sections))


def _plain(text: str) -> str:
    """Return one line that a table of markdown may hold."""
    return " ".join(text.split()).replace("|", r"\|").replace("<", "&lt;").replace("*", r"\*")[:400]


def main() -> None:
    """Judge all trainers of a set, print one line for each, and leave the rows."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mistakes", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("id", nargs="*", help="only these, again")
    parser.add_argument("--set", type=Path, default=FOLDER, help="folder of the set", metavar="FOLDER")
    parser.add_argument("--write", metavar="RUN", help="also write docs/mistakes.md")
    parser.add_argument("--no-faults", action="store_true", help="put no faults into trainers without a mistake")
    options = parser.parse_args()
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
        write(options.write, rows, chosen)


def _kept(out: Path, names: Iterable[str]) -> list[Row]:
    """Return the rows of a directory, some of which may not be judged yet."""
    files = [out / name / "row.json" for name in names]
    return [msgspec.json.decode(file.read_bytes(), type=Row) for file in files if file.exists()]


if __name__ == "__main__":
    main()
