"""Where the time of a session went: `python -m benchmarks.breakdown REPORT_DIR [--write]`.

Reads report.json and the records of a session of one worker. Training is what the slowest rank of each task spent in
trainers, from making one to the end of its last step: for runs that are recorded, and in tasks that leave figures, of
which most train under a ledger or with a fault. The rest of running is the start of ranks and of process groups,
ledgers that are read, tensors on their way to disk, and what ranks do after a task. Judging is what laws and oracles
take.
"""

import argparse
from pathlib import Path

import msgspec
from tabulate import tabulate

from benchmarks.pages import PROJECT, write_block
from conformance.report.schema import Report
from conformance.run.record import TRAINING, RecordFile

PAGE = PROJECT / "docs" / "performance.md"
_RECORDED, _MEASURED = "training, recorded", "training, measured"


def breakdown(directory: Path) -> dict[str, float]:
    """Seconds by what they were spent on; they add up to the session's."""
    report = msgspec.json.decode((directory / "report.json").read_bytes(), type=Report)
    records = [
        msgspec.json.decode(file.read_bytes(), type=RecordFile) for file in directory.glob("records/*/record.json")
    ]
    trained = sum(record.train_s for record in records if record.header.task == TRAINING)
    measured = sum(record.train_s for record in records if record.header.task != TRAINING)
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
    parser = argparse.ArgumentParser(description="Where the time of a session went.")
    parser.add_argument("report_dir", type=Path)
    parser.add_argument("--write", action="store_true", help=f"put the table into {PAGE.relative_to(PROJECT)}")
    arguments = parser.parse_args()
    report = msgspec.json.decode((arguments.report_dir / "report.json").read_bytes(), type=Report)
    parts = breakdown(arguments.report_dir)
    whole = sum(parts.values())
    rows = [[name, f"{seconds:.1f}", f"{seconds / whole:.0%}"] for name, seconds in parts.items()]
    table = tabulate(rows, headers=["part", "seconds", "share"], tablefmt="github")
    text = (
        f"Profile {report.profile}, {report.executed} cases, torch {report.environment['packages']['torch']}: "
        f"{report.duration_s:.0f} s, of "
        f"which {1 - (parts[_RECORDED] + parts[_MEASURED]) / whole:.0%} are not training.\n\n{table}"
    )
    print(text)
    if arguments.write:
        write_block(PAGE, "breakdown", text)


if __name__ == "__main__":
    main()
