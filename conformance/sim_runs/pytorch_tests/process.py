"""Process of one test file: `python -m conformance.sim_runs.pytorch_tests.process FILE [OPTION ...]`.

The environment says on which device, see `conformance/sim/settings.py`, and which folder is translated.
"""

import os
import sys
from pathlib import Path

import pytest

from conformance.sim import settings
from conformance.sim_runs.pytorch_tests import harness
from conformance.sim_runs.pytorch_tests.names import own_temporary_directory

_PRELOAD = f"{__package__}.preload"
_OPTIONS = ("-v", "--tb=native", "--assert=plain", "--noconftest", "-c", "/dev/null")
_WITHOUT = ("cacheprovider", "warnings", "logging")  # the last adds handlers to loggers, which a test counts


def main(arguments: list[str]) -> int:
    """Run a test file, the first argument, under pytest; returns pytest's exit status."""
    if settings.RECORD_VARIABLE in os.environ:
        own_temporary_directory()
    if harness.starts_ranks(Path(arguments[0])):
        harness.serve_processes(_PRELOAD)
    harness.prepare()
    harness.share_device()
    return pytest.main([*_OPTIONS, *(f"-pno:{plugin}" for plugin in _WITHOUT), *arguments])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
