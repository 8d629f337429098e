"""Worlds across hosts: the agents that `torchrun ... -m conformance spmd` starts, one for each rank.

Torch elastic is the launcher and brings the agents together. The agent of rank 0 is the leader: it runs the pytest
session, whose `Pools` are replaced by `SpanningPools`. For each task the leader writes an order into torchrun's store;
every agent runs its rank in a child process (`Pools.run_ranks`), so that the agent survives the end of the rank, and
writes a report into the store. Collectives of the ranks use connections of their own. An agent that does not answer
within `ANSWER_S` of the task's end is lost, with its host, and so is every later task that needs this agent; nothing
waits for the agent again.

All hosts must see the report's directory under the same path, as torch's own distributed checkpoints require.
"""

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
import psutil

from conformance.run.failures import RunFailed, find_cause
from conformance.run.pool import Pools, require_runnable
from conformance.run.ranks.messages import RankReport, Task, Template
from reference_trainer.checks import UsageError

ANSWER_S = 15.0
"""Time limit for taking up a task, and for the report after its end; starting ranks takes seconds on a busy host."""
LINK_LIMIT_S = 30.0
"""Time limit for one operation on torchrun's store."""
_POLL_S = 0.01
_OWN_RENDEZVOUS = {"TORCHELASTIC_USE_AGENT_STORE": "False"}
"""Environment without which torch.distributed expects torchrun's store at any address, see
torch/distributed/rendezvous.py."""
_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


class Store(Protocol):
    """Methods of `torch.distributed.Store` that agents use."""

    def set(self, key: str, value: str | bytes) -> None:
        """Set the value of a key."""

    def get(self, key: str) -> bytes:
        """Wait for a key; returns its value."""

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys have values."""

    def add(self, key: str, amount: int) -> int:
        """Add to a counter; returns the sum."""


_T = TypeVar("_T")


class WatchedStore:
    """Store that ends this process, with exit code 3, if it does not answer: torch's client would wait for minutes."""

    def __init__(self, store: Store, *, prefix: str) -> None:
        self._store = store
        self._prefix = prefix
        self._since_s: float | None = None
        threading.Thread(target=self._watch, daemon=True).start()

    def set(self, key: str, value: str | bytes) -> None:
        """See `Store`."""
        self._timed(lambda: self._store.set(self._prefix + key, value))

    def get(self, key: str) -> bytes:
        """See `Store`."""
        return self._timed(lambda: self._store.get(self._prefix + key))

    def check(self, keys: list[str]) -> bool:
        """See `Store`."""
        return self._timed(lambda: self._store.check([self._prefix + key for key in keys]))

    def add(self, key: str, amount: int) -> int:
        """See `Store`."""
        return self._timed(lambda: self._store.add(self._prefix + key, amount))

    def _timed(self, ask: Callable[[], _T]) -> _T:
        self._since_s = time.monotonic()
        try:
            return ask()
        finally:
            self._since_s = None

    def _watch(self) -> None:
        while True:
            time.sleep(1.0)
            since_s = self._since_s
            if since_s is not None and time.monotonic() - since_s > LINK_LIMIT_S:
                print(f"conformance spmd: no answer from the leader's host for {LINK_LIMIT_S:g} s", file=sys.stderr)
                os._exit(3)  # the rank server ends with this process, and the ranks with the server


class Order(msgspec.Struct, frozen=True):
    """One task for some agents; the index in `agents` is the rank."""

    task: Task
    agents: list[int]
    rendezvous: str
    deadline_s: float
    env: dict[str, str]


class Location(msgspec.Struct, frozen=True):
    """Node and host of an agent."""

    agent: int
    node: int
    host: str


class AgentsLost(RunFailed):
    """A task was not started, because agents that it needs have not answered before."""


def meet(store: Store, *, agents: int, agent: int, node: int, directory: Path, limit_s: float = 60.0) -> list[Location]:
    """Announce the location of this agent and wait for those of all agents, which are returned.

    Raises UsageError if a host does not see the leader's directory, TimeoutError if an agent is missing.
    """
    mark = directory / ".spmd"
    if agent == 0:
        directory.mkdir(parents=True, exist_ok=True)
        mark.write_text(str(os.getpid()))
        store.set("mark", mark.read_bytes())
    _wait(store, "mark", limit_s=limit_s, who="the leader")
    seen = mark.exists() and mark.read_bytes() == store.get("mark")
    own = Location(agent, node, socket.gethostname() if seen else "")
    store.set(f"location/{agent}", msgspec.json.encode(own))
    locations = []
    for other in range(agents):
        _wait(store, f"location/{other}", limit_s=limit_s, who=f"agent {other}")
        locations.append(msgspec.json.decode(store.get(f"location/{other}"), type=Location))
    blind = [location.agent for location in locations if not location.host]
    if blind:
        raise UsageError(f"agents {blind} do not see {directory}: name a --report-dir that all hosts share")
    return locations


def follow(store: Store, *, agent: int) -> int:
    """Execute the leader's orders until the leader ends the session; returns the session's exit status."""
    number = taken = 0
    with Pools(share_processors=False) as pools:
        pools.prepare()
        while True:
            number += 1
            while not store.check([f"order/{number}"]):
                time.sleep(_POLL_S)
            content = store.get(f"order/{number}")
            if content.isdigit():
                print(f"agent {agent} on {socket.gethostname()} took part in {taken} of {number - 1} tasks", flush=True)
                return int(content)
            order = msgspec.json.decode(content, type=Order)
            if agent in order.agents:
                taken += 1
                _run_own_rank(store, pools, order, number=number, agent=agent)


def _run_own_rank(store: Store, pools: Pools, order: Order, *, number: int, agent: int) -> None:
    """Run this agent's rank and put its report into the store."""
    store.set(f"taken/{number}/{agent}", "")
    rank = order.agents.index(agent)
    (report,) = pools.run_ranks(
        order.task,
        range(rank, rank + 1),
        world_size=len(order.agents),
        deadline_s=order.deadline_s,
        env=order.env,
        rendezvous=order.rendezvous,
        stop=lambda: store.check([f"failed/{number}"]),
    )
    if report.state in ("raised", "died"):
        # Clocks of hosts differ: the order of failures is that in which they arrive in the store.
        report = msgspec.structs.replace(report, stamp_s=float(store.add(f"failed/{number}", 1)))
    store.set(f"report/{number}/{rank}", msgspec.msgpack.encode(report))


class SpanningPools:
    """Pools of the leader, whose worlds are agents on several hosts; see `pool.RunsTasks`."""

    def __init__(self, store: Store, locations: Sequence[Location], *, address: str) -> None:
        self.waited_s = 0.0
        self.trained_s = 0.0
        self.max_world_size = len(locations)
        self._store = store
        self._locations = locations
        self._address = address
        self._pools = Pools(share_processors=False)
        self._number = 0
        self._lost: dict[int, str] = {}

    def prepare(self, template: Template | None = None) -> None:
        """Start the leader's own rank server."""
        self._pools.prepare(template)

    def run(self, task: Task, *, world_size: int, deadline_s: float, env: Mapping[str, str] | None = None) -> list[Any]:
        """Run a task as `Pools.run` does; raises AgentsLost if an agent that the task needs is lost."""
        require_runnable(task, world_size=world_size, deadline_s=deadline_s)
        agents = spread(self._locations)[:world_size]
        self._require_present(agents)
        self._number += 1
        rendezvous = f"tcp://{self._address}:{_free_port(self._address)}"
        order = Order(task, agents, rendezvous, deadline_s, {**(env or {}), **_OWN_RENDEZVOUS})
        self._store.set(f"order/{self._number}", msgspec.json.encode(order))
        _run_own_rank(self._store, self._pools, order, number=self._number, agent=0)
        reports = self._reports(order)
        if any(report.state != "finished" for report in reports):
            raise find_cause(reports, deadline_s=deadline_s)
        self.trained_s += max(report.train_s for report in reports)
        return [report.value for report in reports]

    def close(self) -> None:
        """End the leader's own ranks; `dismiss` ends the agents."""
        self._pools.close()

    def dismiss(self, status: int) -> None:
        """End all agents with the session's exit status."""
        self._store.set(f"order/{self._number + 1}", str(status))

    def _require_present(self, agents: Sequence[int]) -> None:
        lost = [rank for rank, agent in enumerate(agents) if agent in self._lost]
        if lost:
            reports = tuple(
                RankReport(rank=rank, state="died" if rank in lost else "finished") for rank in range(len(agents))
            )
            raise AgentsLost(kind="crash", first_rank=lost[0], reason=self._lost[agents[lost[0]]], ranks=reports)

    def _reports(self, order: Order) -> list[RankReport]:
        """Return the reports of all ranks; called when the leader's own rank has ended, so that the rest are due."""
        until_s = time.monotonic() + ANSWER_S
        reports = []
        for rank, agent in enumerate(order.agents):
            key = f"report/{self._number}/{rank}"
            while not self._store.check([key]) and time.monotonic() < until_s:
                time.sleep(_POLL_S)
            if self._store.check([key]):
                reports.append(msgspec.msgpack.decode(self._store.get(key), type=RankReport))
                continue
            host = self._locations[agent].host
            taken = self._store.check([f"taken/{self._number}/{agent}"])
            state = "since a task that it had taken up" if taken else "when it was given a task"
            self._lost[agent] = f"the agent of rank {rank} on {host} has not answered {state}: host or link is lost"
            reports.append(RankReport(rank=rank, state="hung", message=self._lost[agent]))
        return reports


def interface_towards(address: str) -> str | None:
    """Return the network interface of this host that has the address, or whose route leads to the address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing
        own = probe.getsockname()[0]
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, entries in interfaces if own in {entry.address for entry in entries}), None)


def prepare_environment(address: str) -> None:
    """Let gloo use the interface on which the hosts reach each other, unless the user has named one."""
    interface = interface_towards(address)
    if interface:
        os.environ.setdefault(_GLOO_INTERFACE, interface)


def spread(locations: Sequence[Location]) -> list[int]:
    """Return all agents, the leader first, in an order whose prefixes are spread over as many nodes as possible."""
    nodes: dict[int, list[int]] = {}
    for location in locations:
        nodes.setdefault(location.node, []).append(location.agent)
    turns = max(map(len, nodes.values()))
    return [agents[turn] for turn in range(turns) for agents in nodes.values() if turn < len(agents)]


def _free_port(address: str) -> int:
    with socket.create_server((address, 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _wait(store: Store, key: str, *, limit_s: float, who: str) -> None:
    until_s = time.monotonic() + limit_s
    while not store.check([key]):
        if time.monotonic() > until_s:
            raise TimeoutError(f"{who} did not come within {limit_s:g} s")
        time.sleep(_POLL_S)
