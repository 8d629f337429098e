"""Python programs in separate processes, for tests of their output and exit status."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conformance.project import PROJECT


def run_python(
    *arguments: str, cwd: Path = PROJECT, limit_s: float = 300.0, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run Python, in which the modules of the project can be imported, with more variables in its environment."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(PROJECT), **(variables or {})},
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )


def output_of(*arguments: str, status: int = 0, **options: Any) -> str:
    """Return the text that Python prints, also to stderr; fails with another exit status."""
    done = run_python(*arguments, **options)
    assert done.returncode == status, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr
