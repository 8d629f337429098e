"""Durations of profiles and the README's first command: `python -m benchmarks.profiles smoke pr [--first-command]`.

A profile is run in this environment as `pytest -n auto conformance/ --profile PROFILE`, `--runs` times. The first
command is run once in a fresh clone of the last commit, set-up included. Durations go to docs/measured.json, from which
`python -m conformance docs --write` makes the tables; they are stale as soon as a profile has other cases.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from conformance.cli.docs import MEASURED_FILE, Durations, read_measured
from conformance.project import PROJECT
from conformance.report.schema import read_report


def profile_durations(profile: str, directory: Path, *, runs: int) -> Durations:
    """Run a profile in this environment, as often as asked, and return how long it took."""
    command = [sys.executable, "-m", "pytest", "-n", "auto", "conformance/", "-q", f"--profile={profile}"]
    return _timed([*command, f"--report-dir={directory}"], cwd=PROJECT, report_directory=directory, runs=runs)


def first_command_durations(directory: Path) -> Durations:
    """Run the README's first command in a fresh clone of the last commit, once, and return how long it took."""
    subprocess.run(["git", "clone", "--quiet", str(PROJECT), str(directory)], check=True)
    report = directory / "conformance-report"
    return _timed(["make", "conformance", "PROFILE=smoke"], cwd=directory, report_directory=report, runs=1)


def _timed(command: list[str], *, cwd: Path, report_directory: Path, runs: int) -> Durations:
    load, before = os.getloadavg()[0], resource.getrusage(resource.RUSAGE_CHILDREN)
    durations_s = [_duration_s(command, cwd=cwd) for _ in range(runs)]
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    report = read_report(report_directory)
    return Durations(
        cases=report.planned,
        durations_s=tuple(round(duration_s) for duration_s in durations_s),
        processors=len(os.sched_getaffinity(0)),
        torch=report.environment["packages"]["torch"],
        load_before=round(load, 1),
        processor_s=round((after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / runs),
    )


def _duration_s(command: list[str], *, cwd: Path) -> float:
    start_s = time.monotonic()
    subprocess.run(command, cwd=cwd, check=True)
    return time.monotonic() - start_s


def main() -> None:
    """Measure the profiles that the arguments name, and write docs/measured.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("profiles", nargs="*", metavar="PROFILE", help="smoke, pr, nightly or certify")
    parser.add_argument("--runs", type=int, default=3, help="runs of each profile (default: %(default)s)")
    parser.add_argument(
        "--first-command", action="store_true", help="also the README's first command, in a fresh clone"
    )
    parser.add_argument("--reports", type=Path, metavar="DIR", help="keep the last reports in DIR/PROFILE")
    options = parser.parse_args()
    measured = read_measured()
    with tempfile.TemporaryDirectory() as scratch:
        reports = options.reports or Path(scratch)
        profiles = {name: profile_durations(name, reports / name, runs=options.runs) for name in options.profiles}
        first = first_command_durations(Path(scratch, "clone")) if options.first_command else measured.first_command
    everything = msgspec.structs.replace(measured, first_command=first, profiles=measured.profiles | profiles)
    MEASURED_FILE.write_bytes(msgspec.json.format(msgspec.json.encode(everything), indent=1) + b"\n")


if __name__ == "__main__":
    main()
