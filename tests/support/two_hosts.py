"""Two hosts on one machine: network namespaces with a link between them, which can be cut. Needs root and `ip`."""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

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
