"""Plugin of pytest for sessions that tests start: their workers fork rank servers, see `warm_servers`."""

import os

import pytest

from tests.support.forked import RANK_SERVERS_VARIABLE


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput") and RANK_SERVERS_VARIABLE in os.environ:
        from tests.support import warm_servers

        warm_servers.use()
