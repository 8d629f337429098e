"""Process groups of a rank's tasks: where the ranks of a world meet, and how groups end beside the next task.

Every task has groups of its own. What they share is the store in which ranks find each other: a file for each task
would be polled every 10 ms.
"""

import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import TCPStore, register_rendezvous_handler  # type: ignore[attr-defined]

from conformance.run.ranks.messages import KEPT_STORE

_HOST = "127.0.0.1"
_PORT_POLL_S = 0.001
_NO_LIMIT = timedelta(days=1)  # `init_process_group` sets the limit of each task

_held: list[dist.ProcessGroup] = []


class KeptStore:
    """Store of a world on this host, which rank 0 serves as long as it lives, from the first task that needs it."""

    def __init__(self, *, directory: Path, rank: int, world_size: int) -> None:
        self._port_file = directory / "store.port"
        self._rank, self._world_size = rank, world_size
        self._store: TCPStore | None = None
        self._meetings = 0

    def register(self) -> None:
        """Make URLs with the scheme `KEPT_STORE` an `init_method` of this process."""
        register_rendezvous_handler(KEPT_STORE, self._meet)  # type: ignore[no-untyped-call]

    def _meet(self, url: str, *, timeout: timedelta, **_options: object) -> Iterator[tuple[Store, int, int]]:
        """Yield the store under a prefix of this process group alone; every rank makes the same groups in turn.

        Waits happen one call below, where the stack of a hung rank shows that it waits for its peers, see
        `failures.waits_for_peers`.
        """
        query = {name: value for name, (value,) in parse_qs(urlsplit(url).query).items()}
        if self._store is None:
            self._store = self._serve() if self._rank == 0 else self._client(self._port(timeout))
        self._meetings += 1
        store = PrefixStore(f"{query['task']}/{self._meetings}", self._store)
        yield store, int(query["rank"]), int(query["world_size"])
        raise RuntimeError("ranks meet once for each process group")

    def _serve(self) -> TCPStore:
        """Serve the store on the loopback alone; the port is told when connections are accepted."""
        listener = socket.create_server((_HOST, 0))
        port: int = listener.getsockname()[1]
        store = TCPStore(
            _HOST,
            port,
            self._world_size,
            is_master=True,
            timeout=_NO_LIMIT,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
            # The other backend takes no socket that listens; this can go with torch 2.7, the last of which that is
            # true: https://github.com/pytorch/pytorch/pull/150215
            use_libuv=False,
        )
        written = self._port_file.with_suffix(".new")
        written.write_text(str(port))
        written.rename(self._port_file)
        return store

    def _client(self, port: int) -> TCPStore:
        return TCPStore(_HOST, port, self._world_size, is_master=False, timeout=_NO_LIMIT, wait_for_workers=False)

    def _port(self, limit: timedelta) -> int:
        until_s = time.monotonic() + limit.total_seconds()
        while not self._port_file.exists():
            if time.monotonic() > until_s:
                raise TimeoutError("timed out waiting for the store of rank 0")
            time.sleep(_PORT_POLL_S)
        return int(self._port_file.read_text())


def hold_process_groups() -> None:
    """Keep all process groups of this process in memory until `drop_held_groups`.

    To end a group of gloo takes 20 ms, in which its thread notices that it shall end. A reference that nobody else
    holds moves this wait from `destroy_process_group`, or from the garbage collection that finds the last reference.
    """
    known = getattr(distributed_c10d, "_world", None)
    _held.extend(known.pg_map if known else ())


def drop_held_groups() -> None:
    """Let a thread wait for the ends of groups that are held, while this process goes on."""
    groups = list(_held)
    _held.clear()
    if groups:
        threading.Thread(target=groups.clear, name="ends of process groups", daemon=True).start()
