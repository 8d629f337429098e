"""The pytest plugin, installed as an entry point: options, and activation where laws are collected.

It is loaded into every pytest session of an environment that has the suite installed, so it imports nothing heavy and
does nothing unless the session's arguments lead to the laws.
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
    group = parser.getgroup("conformance", "FSDP2 + TP conformance suite")
    group.addoption("--profile", default=DEFAULT_PROFILE, help=f"profile of matrix.yaml (default: {DEFAULT_PROFILE})")
    group.addoption("--cells", metavar="EXPR", help="only these cells, such as 'tp=2 and precision=fp32'")
    group.addoption(
        "--seed", type=int, default=0, metavar="N", help="add N to the seed of every cell: other weights and data"
    )
    group.addoption("--shard", metavar="I/N", help="only the I-th of N parts of the cells, for N machines")
    group.addoption(
        "--accelerator", default="auto", metavar="WHAT", help="auto (CUDA devices, if there are any), cpu or cuda"
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
        "--baseline", metavar="DIR", help="an earlier report: what passes, and has moved since, is a quality-warning"
    )
    group.addoption(
        "--defect", metavar="ID", help="inject a known fault, or yours, FILE.py:NAME: the laws that it breaks must fail"
    )


@pytest.hookimpl(tryfirst=True)  # before pytest's own junitxml, which reads an option set here
def pytest_configure(config: pytest.Config) -> None:
    if not _collects_laws(config):
        return
    # Imported here: only now is it known that this is a session of the suite.
    from conformance.pytest_plugin.session import start_session

    start_session(config)


@pytest.hookimpl(optionalhook=True, tryfirst=True)  # before the default of xdist itself
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """`-n auto`: as many workers as there are worlds of ranks that the processors can serve at once."""
    if not _collects_laws(config):
        return None
    return max(1, min(_MAX_WORKERS, len(os.sched_getaffinity(0)) // _CPUS_PER_WORKER))


def _collects_laws(config: pytest.Config) -> bool:
    """Whether one of the arguments is the directory of the laws, above it, or in it."""
    for argument in config.args:
        path = Path(config.invocation_params.dir, argument.split("::")[0]).resolve()
        if LAWS_DIRECTORY.is_relative_to(path) or path.is_relative_to(LAWS_DIRECTORY):
            return True
    return False
