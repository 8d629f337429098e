"""Pytest plugin, installed as an entry point: options, and activation where laws are collected.

Every pytest session of an environment with the suite loads this module, so it imports nothing heavy and does nothing
unless the session's arguments lead to the laws.
"""

import os
from pathlib import Path

import pytest

from conformance.project import PACKAGE

LAWS_DIRECTORY = PACKAGE / "laws"
DEFAULT_PROFILE = "pr"
_CPUS_PER_WORKER = 4  # most worlds have four ranks
_MAX_WORKERS = 8


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the suite."""
    group = parser.getgroup("conformance", "FSDP2 + TP conformance suite")
    group.addoption("--profile", default=DEFAULT_PROFILE, help=f"profile of matrix.yaml (default: {DEFAULT_PROFILE})")
    group.addoption("--cells", metavar="EXPR", help="only these cells, such as 'tp=2 and precision=fp32'")
    group.addoption(
        "--seed", type=int, default=0, metavar="N", help="add N to the seed of every cell: other weights and data"
    )
    group.addoption("--shard", metavar="I/N", help="only the I-th of N shards of the cells, for N machines")
    group.addoption(
        "--accelerator", default="auto", metavar="WHAT", help="auto (CUDA devices if available), cpu or cuda"
    )
    group.addoption(
        "--share-gpu",
        default="auto",
        metavar="N",
        help="how many ranks may share a GPU where a world has more ranks than there are GPUs: auto, never or a number",
    )
    group.addoption("--isolate", action="store_true", help="fresh processes for every run, instead of warm ones")
    group.addoption("--matrix", metavar="FILE", help="matrix file (default: matrix.yaml of the project)")
    group.addoption(
        "--report-dir", metavar="DIR", default="conformance-report", help="where the report goes (default: %(default)s)"
    )
    group.addoption("--record-dir", metavar="DIR", help="where records go (default: DIR/records of the report)")
    group.addoption(
        "--baseline", metavar="DIR", help="an earlier report: a case that passes and has drifted is a quality-warning"
    )
    group.addoption(
        "--defect", metavar="ID", help="inject a known fault, or FILE.py:NAME; the laws that it violates must fail"
    )


@pytest.hookimpl(tryfirst=True)  # before pytest's own junitxml, which reads an option set here
def pytest_configure(config: pytest.Config) -> None:
    """Start a session of the suite if the arguments lead to the laws."""
    if not _collects_laws(config):
        return
    # Not at the top: other sessions of pytest do not pay for this import.
    from conformance.pytest_plugin.session import start_session

    start_session(config)


@pytest.hookimpl(optionalhook=True, tryfirst=True)  # before the default of xdist itself
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Return the number of workers for `-n auto`: the number of worlds that the processors can serve at once."""
    if not _collects_laws(config):
        return None
    return max(1, min(_MAX_WORKERS, len(os.sched_getaffinity(0)) // _CPUS_PER_WORKER))


def _collects_laws(config: pytest.Config) -> bool:
    """Return whether an argument is the directory of the laws, a parent of it, or inside of it."""
    for argument in config.args:
        path = Path(config.invocation_params.dir, argument.split("::")[0]).resolve()
        if LAWS_DIRECTORY.is_relative_to(path) or path.is_relative_to(LAWS_DIRECTORY):
            return True
    return False
