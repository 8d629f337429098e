"""Worlds across hosts, on two hosts made of network namespaces."""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import psutil
import pytest

from conformance.cli.verify import verify
from conformance.project import PROJECT
from conformance.report.schema import Report
from conformance.run.multihost import ANSWER_S, LINK_LIMIT_S, Location, interface_towards, spread
from tests.support.matrices import write_matrix

ADDRESSES = ("10.213.7.1", "10.213.7.2")
"""Addresses of the hosts; the leader is on the first host."""


class TwoHosts:
    """Namespaces `conformanceN-PID`, each with one interface in addition to the loopback."""

    def __init__(self) -> None:
        self._names = [f"conformance{number}-{os.getpid()}" for number in (0, 1)]
        self._links = [f"cf{number}-{os.getpid()}" for number in (0, 1)]

    def popen(self, host: int, command: Sequence[str], *, output: Path, cwd: Path) -> psutil.Popen:
        """Start a program on a host, its output in a file."""
        with output.open("wb") as file:
            inside = ["ip", "netns", "exec", self._names[host], *command]
            return psutil.Popen(inside, cwd=cwd, stdout=file, stderr=subprocess.STDOUT, env=_environment())

    def cut(self) -> None:
        """Take the link down: no packet passes, and neither side is told that the other is gone."""
        _ip("-n", self._names[0], "link", "set", self._links[0], "down")

    def make(self) -> None:
        _ip("link", "add", self._links[0], "type", "veth", "peer", "name", self._links[1])
        for name, link, address in zip(self._names, self._links, ADDRESSES, strict=True):
            _ip("netns", "add", name)
            _ip("link", "set", link, "netns", name)
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", link, "up")

    def remove(self) -> None:
        for name in self._names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", self._links[0]], capture_output=True, check=False)


@contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    """Make two hosts and remove them afterwards; raises OSError where they cannot be made."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        raise OSError("network namespaces need root and the command ip (package iproute2)")
    hosts = TwoHosts()
    try:
        hosts.make()
        yield hosts
    finally:
        hosts.remove()


def _environment() -> dict[str, str]:
    """Return the environment without variables that the tests' own session has set for its processes."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("GLOO_", "PYTEST_"))}


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


LIMIT_S = 150.0
MATRIX = """
schema: 2
axes: {mesh: [dp2]}
cells:
  seeds: {note: one cell, axes: {mesh: [dp2], seed: [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]}}
profiles:
  pr: {note: all, must: [seeds], deadline_s: 10}
"""
PORT = 29613


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    try:
        with two_hosts() as made:
            yield made
    except OSError as error:
        pytest.skip(f"no two hosts here: {error}")


def start(hosts: TwoHosts, directory: Path, *arguments: str, agents: int) -> list[psutil.Popen]:
    """Start torchrun on both hosts, with this number of agents on each."""
    processes = []
    for host in (0, 1):
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--nproc-per-node={agents}"]
        command += [f"--node-rank={host}", f"--master-addr={ADDRESSES[0]}", f"--master-port={PORT}"]
        command += ["-m", "conformance", "spmd", "--profile=pr", f"--report-dir={directory}", "--", *arguments]
        processes.append(hosts.popen(host, command, output=directory.with_suffix(f".host{host}"), cwd=PROJECT))
    return processes


def finish(processes: list[psutil.Popen], directory: Path, *, limit_s: float = LIMIT_S) -> tuple[list[int], Report]:
    until_s = time.monotonic() + limit_s
    try:
        status = [process.wait(max(1.0, until_s - time.monotonic())) for process in processes]
    except psutil.TimeoutExpired:
        pytest.fail(output(directory))
    finally:
        for process in processes:
            for member in [*process.children(recursive=True), process] if process.is_running() else []:
                member.kill()
    assert (directory / "report.json").exists(), output(directory)
    return status, msgspec.json.decode((directory / "report.json").read_bytes(), type=Report)


def output(directory: Path) -> str:
    return "\n".join(directory.with_suffix(f".host{host}").read_text() for host in (0, 1))


def test_worlds_span_two_hosts(hosts: TwoHosts, tmp_path: Path) -> None:
    ids = ("dp2-tp2-fp32-default-meta-nosp", "dp2-fp32-default-meta-sgd", "dp2-fp32-default-meta-clip0.1")
    cells = f"id in ({', '.join(ids)})"
    directory = tmp_path / "report"
    status, report = finish(
        start(hosts, directory, "--cells", cells, "--laws=CLIP-1,INIT-1,PAR-1,PAR-5,RS-1", agents=2), directory
    )
    wrong = [(case.id, case.verdict, case.reason) for case in report.cases if case.verdict != "pass"]
    assert (status, wrong) == ([0, 0], []), output(directory)
    assert report.executed == report.planned
    assert report.planned > 10
    tasks = [int(number) for number in re.findall(r"agent 2 on \S+ took part in (\d+) of", output(directory))]
    assert len(tasks) == 1
    assert tasks[0] >= 3, "the second host has run ranks of every cell"
    assert verify(directory, matrix_file=PROJECT / "matrix.yaml").problems == []


def test_a_cut_link_is_a_verdict_in_time(hosts: TwoHosts, tmp_path: Path) -> None:
    directory = tmp_path / "report"
    matrix = write_matrix(tmp_path / "matrix.yaml", MATRIX)
    processes = start(hosts, directory, f"--matrix={matrix}", "--laws=PAR-1,PAR-5", agents=1)
    until_s = time.monotonic() + LIMIT_S
    report = directory / "report.jsonl"
    while not report.exists() or report.read_text().count('"verdict":"pass"') < 2:
        assert time.monotonic() < until_s, output(directory)
        assert all(process.status() != psutil.STATUS_ZOMBIE for process in processes), output(directory)
        time.sleep(0.05)
    hosts.cut()
    cut_s = time.monotonic()
    _, final = finish(processes, directory)
    # One deadline, the wait for an answer, and the time after which the other host gives up.
    assert time.monotonic() - cut_s < 10 + ANSWER_S + LINK_LIMIT_S + 10
    verdicts = [case.verdict for case in final.cases]
    assert final.executed == final.planned == len(verdicts)
    assert (final.exit_code, set(verdicts)) == (1, {"pass", "timeout", "crash"})
    assert verdicts.count("pass") >= 2
    lost = {case.reason for case in final.cases if case.verdict == "crash"}
    assert all(reason.endswith("host or link is lost") for reason in lost), lost


def test_spread_puts_narrow_worlds_on_several_hosts() -> None:
    locations = [Location(agent, agent // 2, "host") for agent in range(4)]
    assert spread(locations) == [0, 2, 1, 3]
    assert spread([Location(0, 0, "a"), Location(1, 1, "b"), Location(2, 1, "b")]) == [0, 1, 2]


def test_interface_towards_an_address() -> None:
    assert interface_towards("127.0.0.1") == "lo"
