"""Set-up of all tests, and fixtures that several of them share."""

import json
import signal
import tempfile
from collections import defaultdict
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from conformance.assertions.fixtures import Run
from conformance.plan.cells import Cell
from conformance.project import PROJECT
from conformance.run.case_runs import CaseRuns
from conformance.run.devices.leases import DIRECTORY_VARIABLE
from conformance.run.pool import Pools
from conformance.run.record import Record
from conformance.run.store import RecordStore
from tests.support import warm_servers
from tests.support.shared_ranks import SharedRanks
from tests.support.simulated_processes import library

# A shell that runs CI as a background job ignores SIGINT in it, and so would every process that the tests start: tests
# that send Ctrl-C would wait for ever. Children inherit the default action once this process has a handler of its own.
signal.signal(signal.SIGINT, signal.default_int_handler)

torch.set_num_threads(1)  # as in every process that judges, see `hardware.ONE_THREAD`

DURATIONS = PROJECT / "tests" / "durations.json"
"""Seconds that the tests of a file take, by its path below `tests`, from a run with `--write-durations`."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that keeps durations."""
    parser.addoption("--write-durations", action="store_true", help=f"keep how long files took in {DURATIONS.name}")


def pytest_configure(config: pytest.Config) -> None:
    """Let all workers fork processes from one that has torch, which loads it while they collect."""
    if config.getoption("numprocesses", None):
        warm_servers.share()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort long files first, so that with `--no-loadscope-reorder` no worker starts one of them at the end."""
    seconds = json.loads(DURATIONS.read_text())
    items.sort(key=lambda item: -seconds.get(below_tests(item.nodeid), 0.0))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Show how long the folders took, in seconds of one worker, and the longest files; keep all if asked to."""
    seconds: dict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[below_tests(report.nodeid)] += report.duration
    if not seconds:
        return
    folders: dict[str, float] = defaultdict(float)
    for file, spent_s in seconds.items():
        folders[file.partition("/")[0]] += spent_s
    for title, spent in (("folders", folders), ("longest files", seconds)):
        longest = sorted(spent.items(), key=lambda item: -item[1])[:10]
        terminalreporter.write_line(f"{title}: " + ", ".join(f"{name} {spent_s:.0f} s" for name, spent_s in longest))
    if config.getoption("write_durations"):
        kept = {file: round(spent_s, 1) for file, spent_s in sorted(seconds.items()) if spent_s >= 1.0}
        DURATIONS.write_text(json.dumps(kept, indent=1) + "\n")


def below_tests(nodeid: str) -> str:
    """Return the path of a test's file below `tests`."""
    return nodeid.partition("::")[0].removeprefix("tests/")


@pytest.fixture(scope="session", autouse=True)
def own_leases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Use leases of this worker alone: other workers and sessions must not wait for ranks that a test lets hang."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(DIRECTORY_VARIABLE, str(tmp_path_factory.mktemp("leases")))
        yield


@pytest.fixture(scope="session", autouse=True)
def forked_servers() -> Iterator[None]:
    """Fork rank servers, whose start takes seconds of a processor."""
    with warm_servers.used():
        yield


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    """Return warm ranks for all tests of a worker."""
    with Pools() as pools:
        yield pools


@pytest.fixture(scope="session")
def shared_ranks() -> Iterator[Pools]:
    """Return warm ranks for the trainers of other people in all tests of a worker."""
    with SharedRanks() as pools:
        yield pools


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, pools: Pools) -> RecordStore:
    """Return a record store for the tests of a file."""
    version = str(torch.__version__)
    return RecordStore(tmp_path_factory.mktemp("records"), "test", version, defect=None, deadline_s=60.0, pools=pools)


@pytest.fixture(scope="module")
def run(store: RecordStore) -> Run:
    """Return a function that trains a cell once, within a separate deadline."""

    def run_alone(cell: Cell, *, repeat: int = 0, tapped: bool = False) -> Record:
        return CaseRuns(store).run(cell, repeat=repeat, tapped=tapped)

    return run_alone


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """Return the mesh of a world of one rank in this process."""
    with tempfile.TemporaryDirectory() as directory:
        dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=0, world_size=1)
        yield init_device_mesh("cpu", (1,), mesh_dim_names=("dp_shard",))
        dist.destroy_process_group()


@pytest.fixture(scope="session")
def compiled_device() -> None:
    """Compile the simulated device; skip a test whose processes need it where nothing can compile it."""
    if library() is None:
        pytest.skip("nothing here can compile the simulated device")
