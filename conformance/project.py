"""Paths of the project's files, in the checkout that contains this package, and the order of its packages."""

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
"""Directory of the package `conformance`."""
PROJECT = PACKAGE.parent
"""Directory of the checkout, with `matrix.yaml`, `waivers.yaml` and `docs/`."""
LAYERS = (
    ("reference_trainer",),
    ("conformance/*.py",),
    ("conformance/plan", "conformance/instruments", "conformance/oracles"),
    ("conformance/defects", "conformance/run"),
    ("conformance/experiments", "conformance/judge"),
    ("conformance/laws", "conformance/report"),
    ("conformance/pytest_plugin", "conformance/detection"),
    ("conformance/cli",),
)
"""Order of imports: a module may import its own package and those of earlier layers. `tests/test_quality.py` holds it,
docs/architecture.md shows it. The modules of `conformance` itself are the second layer, but for `__main__`."""
TORCH_FREE = (
    "conformance/plan",
    "conformance/run",
    "conformance/judge",
    "conformance/report",
    "conformance/pytest_plugin",
)
"""Packages whose processes plan, start, judge and report, and must not pay for the import of torch. The exceptions are
the processes of ranks and of rank servers: `run/ranks/process.py` and `run/ranks/server.py`."""
