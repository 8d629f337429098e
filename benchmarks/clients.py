"""Durations of judging trainers of other people, from `pip install` to the verdict.

`python -m benchmarks.clients timm verl` gives each of these a new environment with torch, the suite and its own
packages, and judges it there. Durations go to docs/measured.json, from which `python -m conformance docs --write` makes
the table.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import torch

from conformance.cli.clients_table import FIRST_TRIALS, ClientDurations
from conformance.cli.docs import MEASURED_FILE, read_measured
from conformance.project import PROJECT

_JUDGED = (0, 1)
"""Exit statuses of `judge` for a trainer that was judged."""


def durations(name: str, directory: Path) -> ClientDurations:
    """Install a client in a new environment and judge it; raises CalledProcessError if either fails."""
    start_s = time.monotonic()
    subprocess.run([sys.executable, "-m", "venv", str(directory / "venv")], check=True)
    python = str(directory / "venv" / "bin" / "python")
    packages = [f"torch=={torch.__version__}", f"{PROJECT}[subject-{name}]"]
    subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
    installed_s = time.monotonic()
    command = [python, "-m", "conformance", "judge", name, "--explain", "0", "--report-dir", "report"]
    judged = subprocess.run(command, cwd=directory)
    if judged.returncode not in _JUDGED:
        raise subprocess.CalledProcessError(judged.returncode, command)
    return ClientDurations(
        install_s=round(installed_s - start_s, 1),
        verdict_s=round(time.monotonic() - installed_s, 1),
        processors=len(os.sched_getaffinity(0)),
        torch=torch.__version__,
    )


def main() -> None:
    """Measure the clients that the arguments name, and write docs/measured.json after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("clients", nargs="+", choices=FIRST_TRIALS, metavar="CLIENT", help=", ".join(FIRST_TRIALS))
    for name in parser.parse_args().clients:
        with tempfile.TemporaryDirectory() as directory:
            took = durations(name, Path(directory))
        measured = read_measured()
        clients = measured.clients | {name: took}
        everything = msgspec.structs.replace(measured, clients=clients)
        MEASURED_FILE.write_bytes(msgspec.json.format(msgspec.json.encode(everything), indent=1) + b"\n")


if __name__ == "__main__":
    main()
