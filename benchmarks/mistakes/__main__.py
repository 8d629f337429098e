"""Table of classic mistakes and their named causes: `python -m benchmarks.mistakes OUT [--write] [ID ...]`.

Each mistake of mistakes.yaml is put into its trainer, which `conformance judge` judges as its owner would; the first
cause in report.json is compared with the one that was written down before. Afterwards trainers without mistakes are
judged, those of `trainers` and of `correct`. OUT keeps reports and rows, so that an interrupted run goes on. `--write`
also writes docs/mistakes.md, which needs all rows.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from tabulate import tabulate

from benchmarks.mistakes import FOLDER, SUBJECTS, TRAINERS, Mistake, Outcome, mistakes
from benchmarks.mistakes.why import WHY
from conformance.judge.verdicts import Verdict
from conformance.project import PROJECT
from conformance.report.causes import Cause
from conformance.report.schema import Report
from reference_trainer.checks import UsageError

PAGE = PROJECT / "docs" / "mistakes.md"
CORRECT = {
    **{file.stem: "parallelize" for file in (FOLDER / "correct").glob("[a-z]*.py")},
    "encoder_decoder": "Translation",
    "ssm_scan": "StateSpace",
    "multitask": "train",
    "diffusion_ema": "train",
}
"""Subject in each file of `correct`."""
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


def row_of(name: str, mistake: Mistake, directory: Path) -> Row:
    """Judge a trainer with a mistake on the cells that can show it."""
    file = directory / f"{mistake.trainer}.py"
    file.write_text(mistake.source())
    subject = f"{file.resolve()}:{SUBJECTS[mistake.trainer]}"
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


def row_of_correct(name: str, subject: str, directory: Path) -> Row:
    """Judge a trainer without a mistake on all cells, faults included."""
    session = judged(subject, directory)
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


def as_markdown(rows: Sequence[Row], correct: Sequence[Row]) -> str:
    """Return the page: mistakes with the first cause that is named, and trainers without mistakes."""
    known = mistakes()
    caught, right = (sum(getattr(row, field) for row in rows) for field in ("is_caught", "is_right"))
    table = [
        [
            row.name,
            known[row.name].trainer,
            _plain(known[row.name].what),
            "yes" if row.is_caught else "**no**",
            "yes" if row.is_right else f"**no**: {WHY.get(row.name, '?')}",
            _plain(row.text),
        ]
        for row in rows
    ]
    conformant = [
        [row.name, "conformant" if row.is_right else f"**not**: {WHY.get(row.name, '?')} {_plain(row.text)}"]
        for row in correct
    ]
    headers = ["id", "trainer", "mistake", "caught", "right first cause", "first cause as told"]
    return (
        "\n\n".join(
            [
                "# Classic mistakes, and trainers without any",
                "Written by `python -m benchmarks.mistakes OUT --write`. Each mistake is an edit of one of six small "
                "trainers (`benchmarks/mistakes/trainers`), which `conformance judge` judges on one cell. The first "
                "cause was written down before any result existed: laws that fail, and words that its text must have. "
                "A row that was changed later has its reason; the suite was mended with the rows known. A text that "
                "tells a consequence first counts as wrong.",
                f"{caught} of {len(rows)} mistakes are caught, {right} with the right first cause.",
                tabulate(table, headers=headers, tablefmt="github"),
                "## Trainers without mistakes",
                f"{sum(row.is_right for row in correct)} of {len(correct)} are conformant: the six, and those of "
                "`benchmarks/mistakes/correct`, which no test uses.",
                tabulate(conformant, headers=["trainer", "verdict"], tablefmt="github"),
            ]
        )
        + "\n"
    )


def _plain(text: str) -> str:
    """Return one line that a table of markdown may hold."""
    return " ".join(text.split()).replace("|", r"\|").replace("<", "&lt;").replace("*", r"\*")[:400]


def subjects_without_mistakes() -> dict[str, str]:
    """Return subjects by the names of their files."""
    own = {name: f"{TRAINERS / name}.py:{subject}" for name, subject in SUBJECTS.items()}
    return own | {name: f"{FOLDER / 'correct' / name}.py:{subject}" for name, subject in CORRECT.items()}


def main() -> None:
    """Judge all trainers, print one line for each, and leave the rows."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mistakes", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("id", nargs="*", help="only these, again")
    parser.add_argument("--write", action="store_true", help="also write docs/mistakes.md")
    options = parser.parse_args()
    known, correct = mistakes(), subjects_without_mistakes()
    if unknown := {*options.id} - known.keys() - correct.keys():
        raise UsageError(f"unknown: {', '.join(sorted(unknown))}")
    for name in options.id or [*known, *correct]:
        directory = options.out / name
        directory.mkdir(parents=True, exist_ok=True)
        if (directory / "row.json").exists() and not options.id:
            continue
        row = row_of(name, known[name], directory) if name in known else row_of_correct(name, correct[name], directory)
        (directory / "row.json").write_bytes(msgspec.json.encode(row))
        print(
            f"{'right' if row.is_right else 'WRONG'} {name}: {row.outcome} {row.first_law}: {row.text[:300]}",
            flush=True,
        )
    if options.write:
        rows = [_kept(options.out, name) for name in known]
        PAGE.write_text(as_markdown(rows, [_kept(options.out, name) for name in correct]))


def _kept(out: Path, name: str) -> Row:
    return msgspec.json.decode((out / name / "row.json").read_bytes(), type=Row)


if __name__ == "__main__":
    main()
