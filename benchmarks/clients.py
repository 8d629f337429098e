"""Durations of `pip install` of trainers of other people, with torch and the suite.

`python -m benchmarks.clients timm verl` makes a new environment for each of these. Durations go to docs/measured.json,
from which `python -m conformance docs --write` makes the table.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import torch

from conformance.cli.clients_table import FIRST_TRIALS
from conformance.cli.docs import MEASURED_FILE, read_measured
from conformance.project import PROJECT


def install_s(name: str, directory: Path) -> float:
    """Install a client in a new environment, and return how long it took; raises CalledProcessError if it fails."""
    start_s = time.monotonic()
    subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
    packages = [f"torch=={torch.__version__}", f"{PROJECT}[subject-{name}]"]
    subprocess.run([str(directory / "bin" / "python"), "-m", "pip", "install", "--quiet", *packages], check=True)
    return time.monotonic() - start_s


def main() -> None:
    """Measure the clients that the arguments name, and write docs/measured.json after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("clients", nargs="+", choices=FIRST_TRIALS, metavar="CLIENT", help=", ".join(FIRST_TRIALS))
    for name in parser.parse_args().clients:
        with tempfile.TemporaryDirectory() as directory:
            took_s = round(install_s(name, Path(directory)), 1)
        measured = read_measured()
        everything = msgspec.structs.replace(measured, installing_s=measured.installing_s | {name: took_s})
        MEASURED_FILE.write_bytes(msgspec.json.format(msgspec.json.encode(everything), indent=1) + b"\n")


if __name__ == "__main__":
    main()
