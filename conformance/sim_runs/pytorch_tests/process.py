"""Process of one test file: `python -m conformance.sim_runs.pytorch_tests.process DEVICE TESTS FILE [OPTION ...]`.

DEVICE is `sim` or `cpu`, TESTS the folder whose modules are translated. Each process that a test starts imports this
module again, as `__mp_main__`, and so gets the device.
"""

import sys
from pathlib import Path

from conformance.sim.enabling import enable
from conformance.sim_runs.pytorch_tests import harness
from conformance.sim_runs.pytorch_tests.running import SIM
from conformance.sim_runs.translation import translate_imports

PRELOAD = f"{__package__}.preload"
_OPTIONS = (
    "-v",
    "--tb=native",
    "--assert=plain",
    "--noconftest",
    "-c",
    "/dev/null",
    "-p",
    "no:cacheprovider",
    "-p",
    "no:warnings",
)


def prepare(name: str, tests: Path) -> None:
    """Give this process the device, and translate what it imports from torch's harness and from the tests."""
    if name != SIM:
        return
    enable()
    translate_imports([tests], harness.HARNESS)
    harness.adapt()


def main(name: str, tests: Path, file: str, options: list[str]) -> int:
    """Run a test file under pytest; returns pytest's exit status."""
    import pytest

    harness.serve_processes(PRELOAD)
    prepare(name, tests)
    return pytest.main([*_OPTIONS, f"--rootdir={tests}", *options, file])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], sys.argv[4:]))
elif __name__ == "__mp_main__":
    prepare(sys.argv[1], Path(sys.argv[2]))
