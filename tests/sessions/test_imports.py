"""Processes that list or start sessions do not load torch."""

import subprocess
import sys

from conformance.project import PROJECT


def test_listing_and_sessions_do_not_load_torch() -> None:
    program = (
        "import sys, conformance.pytest_plugin.session, conformance.report.html, conformance.__main__ as main; "
        "import reference_trainer.precision; from conformance.defects.signatures import signatures; signatures(); "
        "assert main.main(['list', '--profile', 'smoke']) == 0; sys.exit('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=PROJECT, stdout=subprocess.DEVNULL, timeout=60, check=False)
    assert done.returncode == 0
