"""Paths of the project's files, in a checkout or in an installed wheel, and the order of its packages."""

from pathlib import Path

from reference_trainer.checks import UsageError

PACKAGE = Path(__file__).resolve().parent
"""Directory of the package `conformance`."""
PROJECT = PACKAGE.parent
"""Directory of the packages: of the checkout, with `matrix.yaml`, `waivers.yaml` and `docs/`, or `site-packages`."""
IS_CHECKOUT = (PROJECT / "matrix.yaml").is_file()
"""True in a checkout, which an editable installation uses too; False in an installed wheel."""
LAWS_DIRECTORY = PACKAGE / "laws"
"""Directory of the laws, a folder for each chapter, which pytest collects."""
LAWS_ARGUMENTS = "conformance/" if IS_CHECKOUT else "--pyargs conformance.laws"
"""Arguments with which pytest collects the laws, as a shell reads them."""
LAYERS = (
    ("reference_trainer",),
    ("conformance/*.py",),
    ("conformance/numerics", "conformance/covering_arrays"),
    ("conformance/plan", "conformance/sim", "conformance/instruments", "conformance/oracles"),
    ("conformance/torch_coverage",),
    ("conformance/defects", "conformance/run", "conformance/simulated_device"),
    ("conformance/experiments", "conformance/judge", "conformance/findings", "conformance/matrix_lock"),
    ("conformance/sweeps", "conformance/sim_runs"),
    ("conformance/assertions", "conformance/report", "conformance/sizing"),
    ("conformance/subjects",),
    ("conformance/localisation",),
    ("conformance/laws",),
    ("conformance/pytest_plugin", "conformance/detection", "conformance/site"),
    ("conformance/cli",),
)
"""Order of imports: a module may import its own package and those of earlier layers.

The modules of `conformance` itself, except `__main__`, are the second layer. `tests/fast/test_quality.py` holds the
order, docs/architecture.md shows it.
"""
TORCH_FREE = (
    "conformance/covering_arrays",
    "conformance/plan",
    "conformance/run",
    "conformance/findings",
    "conformance/judge",
    "conformance/report",
    "conformance/pytest_plugin",
)
"""Packages whose processes plan, start, judge and report, and must not pay for the import of torch. The exceptions are
the processes of ranks and of rank servers: `run/ranks/process.py` and `run/ranks/server.py`."""


def test_files(directory: Path) -> list[Path]:
    """Return the files of tests in a directory and its folders, by the name of the family."""
    return sorted(directory.rglob("test_*.py"), key=lambda file: file.name)


def module_of(file: Path) -> str:
    """Return the dotted name of the module in a file of the package `conformance`."""
    return file.relative_to(PROJECT).with_suffix("").as_posix().replace("/", ".")


def data_file(name: str) -> Path:
    """Return the path of `matrix.yaml` or `waivers.yaml`: the checkout's, or the copy that a wheel has in its package.

    `setup.py` puts the copies there when a wheel is built.
    """
    return (PROJECT if IS_CHECKOUT else PACKAGE) / name


def require_checkout(purpose: str) -> None:
    """Raise UsageError outside of a checkout, naming the purpose that needs it, such as `docs`."""
    if not IS_CHECKOUT:
        raise UsageError(f"{purpose} needs a checkout of the suite, {PACKAGE} is an installed wheel")
