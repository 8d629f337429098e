"""`torchrun ... -m conformance spmd`: one process of a session whose worlds span hosts."""

import argparse
import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import cast

import pytest

from conformance.cli.command import Answer, Commands, add_profile
from conformance.judge.verdicts import SUITE_FAILED
from conformance.project import LAWS_DIRECTORY
from conformance.pytest_plugin.setup import POOLS
from conformance.run.multihost import (
    SpanningPools,
    Store,
    WatchedStore,
    follow,
    meet,
    prepare_environment,
)
from reference_trainer.checks import UsageError

_VARIABLES = ("RANK", "WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
_STORE_LIMIT = timedelta(seconds=60)


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser("spmd", help="under torchrun: a session whose worlds span all hosts of the job")
    add_profile(parser)
    parser.add_argument(
        "--report-dir", type=Path, default=Path("conformance-report"), metavar="DIR", help="one that all hosts share"
    )
    parser.add_argument("more", nargs="*", metavar="...", help="after --: more arguments of pytest, such as --cells")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> Answer:
    """Lead or follow a session; the session prints. Raises UsageError as `run_agent` does."""
    return Answer("", run_agent(options.report_dir, profile=options.profile, more=options.more))


def run_agent(report_directory: Path, *, profile: str, more: Sequence[str]) -> int:
    """Lead the session, as rank 0, or follow; returns its exit status, the same everywhere.

    Raises UsageError outside of torchrun, and for a report directory that hosts do not share.
    """
    missing = [name for name in _VARIABLES if name not in os.environ]
    if missing:
        raise UsageError(f"spmd needs {', '.join(missing)} in the environment: start it with torchrun")
    agent, agents = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address = os.environ["MASTER_ADDR"]
    prepare_environment(address)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = WatchedStore(_torchruns_store(address, agent=agent), prefix=f"conformance/{attempt}/")
    directory = report_directory.resolve()
    places = meet(store, agents=agents, agent=agent, node=int(os.environ["GROUP_RANK"]), directory=directory)
    if agent:
        return follow(store, agent=agent)
    pools = SpanningPools(store, places, address=address)
    status = SUITE_FAILED
    try:
        arguments = [str(LAWS_DIRECTORY), "-n0", f"--profile={profile}", f"--report-dir={directory}", *more]
        status = int(pytest.main(arguments, plugins=[_OnAllHosts(pools)]))
    finally:
        pools.dismiss(status)
    return status


class _OnAllHosts:
    """Plugin that gives the session its ranks."""

    def __init__(self, pools: SpanningPools) -> None:
        self._pools = pools

    def pytest_load_initial_conftests(self, early_config: pytest.Config) -> None:
        """Hand over the pools before the session is configured."""
        early_config.stash[POOLS] = self._pools


def _torchruns_store(address: str, *, agent: int) -> Store:
    """Store at which torchrun's processes meet; where torchrun has none for its workers, rank 0 serves one."""
    import torch.distributed as dist

    serves = agent == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    port = int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(  # type: ignore[attr-defined]
        address, port, is_master=serves, timeout=_STORE_LIMIT, wait_for_workers=False
    )
    return cast("Store", store)  # which takes bytes too, whatever its stub says
