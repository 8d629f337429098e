"""What the pool, the rank server and the ranks say to each other.

Messages of any size are files in the pool's directory (msgpack, so that NaN and infinity survive); the sockets carry
only small datagrams that say "look now". A rank that dies or hangs in the middle of a message can therefore never
block the pool. This module must not import torch: the pytest worker imports it.
"""

import math
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

READY = b"ready"
MAX_WORLD_SIZE = 8
# The kernel delivers this signal to a rank; when its stack dump is complete, the rank sends the number as one byte.
DUMP_SIGNAL = signal.SIGUSR1
DUMPED = bytes([DUMP_SIGNAL])
RANK_IN_VALUE = "{rank}"
"""In the value of a variable of a task's environment it stands for the rank."""
JSON_SCALARS = (type(None), bool, int, float, str)
OUTPUT_TAIL_BYTES = 4096
STACK_BYTES = 16384


class Task(msgspec.Struct, frozen=True):
    """`function` is "package.module:function"; each rank calls it as `function(context, payload)`."""

    function: str
    payload: dict[str, Any]
    kind: str = ""
    """Ranks that have served a task of one kind serve no other: for what a process keeps from task to task."""
    accelerated: bool = False
    """Whether each rank needs a device, which it may have to share."""


@dataclass(frozen=True)
class RankContext:
    """What a task's function learns about its place. `rendezvous` is an `init_method` that no other task uses.

    `timeout_s` is the time that was left when the function started; the pool ends the task when it is over. `device` is
    the one that this rank has leased, by its UUID, "" where ranks share the processors.
    """

    rank: int
    world_size: int
    rendezvous: str
    timeout_s: float
    device: str = ""


class Assignment(msgspec.Struct, frozen=True):
    """One task as all ranks of a pool read it; `deadline_s` is a point on the system-wide `time.monotonic()` clock."""

    task: Task
    rendezvous: str
    deadline_s: float
    env: dict[str, str]


class RankReport(msgspec.Struct, frozen=True, kw_only=True):
    """How one rank ended a task.

    `stamp_s` is `time.monotonic()` of the event (of its discovery for a rank that died). `stack` is the dump of all
    threads of a hung rank, or of one that died of a fault. `collectives` is what `flight_recorder.summary` tells.
    `train_s` is what a finished rank spent in trainers, and `leaks` names what it left behind.
    """

    rank: int
    state: Literal["finished", "raised", "died", "hung"]
    stamp_s: float = math.inf
    value: Any = None
    train_s: float = 0.0
    leaks: tuple[str, ...] = ()
    exception_type: str = ""
    message: str = ""
    traceback: str = ""
    innermost_file: str = ""
    stack: str = ""
    collectives: str = ""
    output_tail: str = ""
    exit_code: int | None = None


class StartRanks(msgspec.Struct, frozen=True, tag=True):
    """Request to the rank server: fork ranks of one world. A socket for each travels with it, and then the open locks
    of the devices."""

    ranks: list[int]
    world_size: int
    directory: str
    devices: tuple[str, ...] = ()
    """One for each rank, or none."""


class BuryRanks(msgspec.Struct, frozen=True, tag=True):
    """Request to the rank server: kill these ranks with all their descendants and collect their exit codes."""

    pids: list[int]


@dataclass(frozen=True)
class RankFiles:
    """The files that one rank shares with its pool."""

    directory: Path
    rank: int

    @property
    def assignment(self) -> Path:
        return self.directory / "assignment"

    @property
    def report(self) -> Path:
        return self.directory / f"rank{self.rank}.report"

    @property
    def output(self) -> Path:
        return self.directory / f"rank{self.rank}.out"

    @property
    def stack(self) -> Path:
        return self.directory / f"rank{self.rank}.stack"

    @property
    def flight_stem(self) -> Path:
        """What torch adds the rank to, and for the pipe `.pipe`."""
        return self.directory / "flight"

    @property
    def flight(self) -> Path:
        return self.directory / f"flight{self.rank}"

    @property
    def flight_pipe(self) -> Path:
        return self.directory / f"flight{self.rank}.pipe"


def require_json_like(value: object, *, where: str) -> None:
    """Check that `value` consists of None, bool, int, float, str, list and dict with str keys, and nothing else.

    Subclasses do not count: a NumPy scalar is a float to Python, but ends a pytest-xdist session.

    Raises:
        TypeError: names the first place that holds something else.
    """
    if type(value) is list:
        for index, item in enumerate(value):
            require_json_like(item, where=f"{where}[{index}]")
    elif type(value) is dict:
        for key, item in value.items():
            if type(key) is not str:
                raise TypeError(f"{where} has the key {key!r}, which is not a str")
            require_json_like(item, where=f"{where}[{key!r}]")
    elif type(value) not in JSON_SCALARS:
        kind = type(value)
        raise TypeError(f"{where} is a {kind.__module__}.{kind.__qualname__}, not a JSON-like builtin")


def read_head(path: Path, *, size_bytes: int) -> str:
    """The first `size_bytes` of a text file, or "" if it cannot be read."""
    return _read_part(path, size_bytes=size_bytes, from_end=False)


def read_tail(path: Path, *, size_bytes: int) -> str:
    """The last `size_bytes` of a text file, or "" if it cannot be read."""
    return _read_part(path, size_bytes=size_bytes, from_end=True)


def _read_part(path: Path, *, size_bytes: int, from_end: bool) -> str:
    try:
        with path.open("rb") as file:
            if from_end:
                file.seek(max(0, path.stat().st_size - size_bytes))
            return file.read(size_bytes).decode("utf-8", "backslashreplace")
    except OSError:
        return ""
