"""Pytest plugin, installed as an entry point: activation where laws are collected.

Every pytest session of an environment with the suite loads this module. So it imports nothing heavy, and adds nothing
but the options `--conformance-...`, unless the session's arguments may lead to the laws.
"""

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import pytest

from conformance.project import IS_CHECKOUT, LAWS_DIRECTORY, PACKAGE, PROJECT
from reference_trainer.checks import UsageError

_ROOT = PROJECT if IS_CHECKOUT else PACKAGE
"""Outermost directory whose collection is meant to collect the laws; an environment may lie in any other project."""
_MODULES = re.compile(r"conformance(\.laws(\.\w+)*)?")
_PATHS = re.compile(r"conformance/(laws/.*)?")
_CLAIMED = pytest.StashKey[list[str]]()
"""Key of a configuration for the options that could not be added."""
_CPUS_PER_WORKER = 2  # most worlds have two ranks, and wider ones wait; `benchmarks.schedule` compares
_DEVICES_PER_WORKER = 2  # the smallest worlds that communicate have two ranks
_MAX_WORKERS = 8


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options with which a project's session judges the project's own trainers."""
    group = parser.getgroup("conformance", "FSDP2 + TP conformance suite")
    group.addoption(
        "--conformance-subject",
        action="append",
        metavar="TRAINER",
        help="judge FILE.py[:NAME], MODULE:NAME or a name of `conformance judge --list`, an item for each law and cell",
    )
    group.addoption("--conformance-fast", action="store_true", help="only the cells that show most, and no faults")
    group.addoption(
        "--conformance-accelerator", metavar="WHAT", help="cpu, sim[:SCHEDULE] or cuda, see `conformance judge --help`"
    )
    group.addoption("--conformance-accepted", metavar="FILE", help="failures that are accepted until a day (YAML)")
    group.addoption(
        "--conformance-report-dir",
        metavar="DIR",
        default="conformance-report",
        help="where a report of each trainer goes (default: %(default)s)",
    )


@pytest.hookimpl(trylast=True)  # after conftest files, which may have claimed options too
def pytest_load_initial_conftests(early_config: pytest.Config, parser: pytest.Parser) -> None:
    """Add the options of the suite if the arguments may lead to the laws.

    The values of options that are unknown so far, such as `smoke` of `--profile smoke`, look like arguments here. So
    the directory and `testpaths` count too, which pytest collects without arguments. Raises pytest.UsageError for paths
    of the laws that are elsewhere: pytest would not know the suite's options there, and name the first of these.
    """
    known = early_config.known_args_namespace
    directory = early_config.invocation_params.dir
    arguments = [*known.file_or_dir, *early_config.getini("testpaths"), str(directory)]
    if _lead_to_laws(arguments, directory, pyargs=known.pyargs):
        # Not at the top: other sessions of pytest do not pay for this import.
        from conformance.pytest_plugin.options import add_options

        early_config.stash[_CLAIMED] = add_options(parser)
        return
    for path in filter(_PATHS.fullmatch, known.file_or_dir):
        if not (directory / path).exists():
            advice = "run pytest in a checkout of the suite, or with `--pyargs conformance.laws`"
            raise pytest.UsageError(f"no {path} in {directory}: {advice}")


@pytest.hookimpl(tryfirst=True)  # before pytest's own junitxml, which reads an option set here
def pytest_configure(config: pytest.Config) -> None:
    """Start a session of the suite if the arguments lead to the laws; raises pytest.UsageError if options clash."""
    if config.option.conformance_subject:
        from conformance.pytest_plugin.guests import start_guests

        start_guests(config)
    if not _collects_laws(config):
        return
    # Not at the top, see above.
    from conformance.pytest_plugin.session import start_session

    for option in config.stash[_CLAIMED]:
        other = "leave that plugin out with -p no:NAME, or its conftest file with --noconftest"
        raise pytest.UsageError(f"{option} is an option of another plugin here too: {other}")
    start_session(config)


@pytest.hookimpl(optionalhook=True, tryfirst=True)  # before the default of xdist itself
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Return the number of workers for `-n auto`: the number of worlds that processors and devices can serve at once.

    Workers that wait for devices would take warm ranks from each other.
    """
    if not _collects_laws(config):
        return None
    workers, devices = min(_MAX_WORKERS, len(os.sched_getaffinity(0)) // _CPUS_PER_WORKER), _devices(config)
    return max(1, min(workers, devices // _DEVICES_PER_WORKER) if devices else workers)


def _devices(config: pytest.Config) -> int:
    """Return the number of devices that a session will use; 0 also for those that the session will refuse."""
    from conformance.run.devices.nvml import machine_devices, visible_devices

    if getattr(config.option, "accelerator", "auto") not in ("auto", "cuda"):
        return 0
    with suppress(UsageError):
        return len(visible_devices(machine_devices()))
    return 0


def _collects_laws(config: pytest.Config) -> bool:
    return _lead_to_laws(config.args, config.invocation_params.dir, pyargs=config.option.pyargs)


def _lead_to_laws(arguments: Iterable[str], directory: Path, *, pyargs: bool) -> bool:
    """Return whether an argument is the directory or package of the laws, a parent of it, or inside of it."""
    targets = [argument.partition("::")[0] for argument in arguments]
    if pyargs and any(map(_MODULES.fullmatch, targets)):
        return True
    return any(_is_related(Path(directory, target).resolve()) for target in targets)


def _is_related(path: Path) -> bool:
    return path.is_relative_to(LAWS_DIRECTORY) or (LAWS_DIRECTORY.is_relative_to(path) and path.is_relative_to(_ROOT))
