"""Breakdown of a session's time: `python -m benchmarks.breakdown REPORT_DIR [--write]`.

Reads report.json and the records of a session of one worker. Training is the time that the slowest rank of each task
spent in trainers, from construction to the end of the last step: in runs that leave a record, and in other experiments,
most of which train under a memory ledger or with a fault. The rest of running is the start of ranks and of process
groups, reading of ledgers, writing of tensors to disk, and clean-up of ranks after a task. Judging is the time of laws
and oracles.
"""

import argparse
from pathlib import Path

import msgspec
from tabulate import tabulate

from benchmarks.documents import PROJECT, write_block
from conformance.report.schema import Report
from conformance.run.experiment import TRAINING
from conformance.run.record import RecordFile

DOCUMENT = PROJECT / "docs" / "performance.md"
_RECORDED, _MEASURED = "training, recorded", "training, measured"


def breakdown(directory: Path) -> dict[str, float]:
    """Return the seconds of a session by activity; together they are its duration."""
    report = msgspec.json.decode((directory / "report.json").read_bytes(), type=Report)
    records = [
        msgspec.json.decode(file.read_bytes(), type=RecordFile) for file in directory.glob("records/*/record.json")
    ]
    trained = sum(record.train_s for record in records if record.header.experiment == TRAINING)
    measured = sum(record.train_s for record in records if record.header.experiment != TRAINING)
    running = sum(case.run_s for case in report.cases)
    waiting = sum(case.wait_s for case in report.cases)
    cases = sum(case.duration_s for case in report.cases)
    return {
        _RECORDED: trained,
        _MEASURED: measured,
        "rest of running": running - trained - measured,
        "waiting": waiting,
        "judging": cases - running - waiting,
        "outside of cases": report.duration_s - cases,
    }


def main() -> None:
    """Print the breakdown, and write it into the document if asked to."""
    parser = argparse.ArgumentParser(description="Breakdown of a session's time.")
    parser.add_argument("report_dir", type=Path)
    parser.add_argument("--write", action="store_true", help=f"put the table into {DOCUMENT.relative_to(PROJECT)}")
    arguments = parser.parse_args()
    report = msgspec.json.decode((arguments.report_dir / "report.json").read_bytes(), type=Report)
    seconds_by_activity = breakdown(arguments.report_dir)
    total_s = sum(seconds_by_activity.values())
    training_s = seconds_by_activity[_RECORDED] + seconds_by_activity[_MEASURED]
    rows = [[name, f"{seconds:.1f}", f"{seconds / total_s:.0%}"] for name, seconds in seconds_by_activity.items()]
    table = tabulate(rows, headers=["activity", "seconds", "share"], tablefmt="github")
    text = (
        f"Profile `{report.profile}`, {report.executed} cases, torch {report.environment['packages']['torch']}: "
        f"{report.duration_s:.0f} s, of which {1 - training_s / total_s:.0%} are not training.\n\n{table}"
    )
    print(text)
    if arguments.write:
        write_block(DOCUMENT, "breakdown", text)


if __name__ == "__main__":
    main()
