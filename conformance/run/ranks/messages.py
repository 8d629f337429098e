"""Messages between the pool, the rank server and the ranks.

Messages of any size are files in the pool's directory (msgpack, so that NaN and infinity survive); the sockets, called
channels, carry only small datagrams that say "look now". A rank that dies or hangs in the middle of a message can
therefore never block the pool.
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
"""Placeholder for the rank in the values of a task's environment variables."""
KEPT_STORE = "kept"
"""Scheme of the `init_method` whose store a world keeps from task to task, see `process_groups.KeptStore`."""
JSON_SCALARS = frozenset((type(None), bool, int, float, str))
OUTPUT_TAIL_BYTES = 4096
STACK_BYTES = 16384


class Template(msgspec.Struct, frozen=True):
    """Process that calls `function(argument)` once, and of which ranks are forks: they need not make the call again."""

    function: str
    """Name of the function, `package.module:function`."""
    argument: str
    env: dict[str, str]
    """Environment variables of the call, beside those of the rank server."""


class Task(msgspec.Struct, frozen=True):
    """Function that each rank of a world calls as `function(context, payload)`."""

    function: str
    """Name of the function, `package.module:function`."""
    payload: dict[str, Any]
    kind: str = ""
    """Ranks serve tasks of one kind only, since a process may keep state from task to task."""
    accelerated: bool = False
    """True if each rank needs a device, which ranks may have to share."""
    compiles: bool = False
    """True if ranks compile: the rank server imports the compiler once, instead of each rank."""
    template: Template | None = None
    """Process of which ranks are forks, unless its call fails; None for the rank server itself."""


@dataclass(frozen=True)
class RankContext:
    """World of a task, as the task's function on one rank sees it."""

    rank: int
    world_size: int
    rendezvous: str
    """`init_method` of the task's process group, which no other task uses."""
    timeout_s: float
    """Time that was left when the function started; the pool ends the task when that time is over."""
    device: str = ""
    """UUID of the device that this rank has leased; "" where ranks share the processors."""


class Assignment(msgspec.Struct, frozen=True):
    """One task as all ranks of a pool read it."""

    task: Task
    rendezvous: str
    deadline_s: float
    """Point in time on the system-wide clock of `time.monotonic()`."""
    env: dict[str, str]


class RankReport(msgspec.Struct, frozen=True, kw_only=True):
    """End of a task on one rank."""

    rank: int
    state: Literal["finished", "raised", "died", "hung"]
    stamp_s: float = math.inf
    """Time of the end by `time.monotonic()`; for a rank that died, the time at which the pool noticed."""
    value: Any = None
    """Result of the task's function."""
    train_s: float = 0.0
    """Time that a finished rank spent in trainers."""
    leaks: tuple[str, ...] = ()
    """Resources that the task left behind in the process."""
    exception_type: str = ""
    message: str = ""
    traceback: str = ""
    innermost_file: str = ""
    stack: str = ""
    """Stacks of all threads of a rank that hung, or that died of a fault."""
    collectives: str = ""
    """Summary of the last collectives, see `flight_recorder.summary`."""
    output_tail: str = ""
    exit_code: int | None = None


class StartRanks(msgspec.Struct, frozen=True, tag=True):
    """Request to the rank server: fork ranks of one world.

    File descriptors travel with the request: a channel for each rank, and then the open locks of the devices.
    """

    ranks: list[int]
    world_size: int
    directory: str
    devices: tuple[str, ...] = ()
    """Device of each rank, or an empty tuple."""
    compiles: bool = False
    """True if the server shall import the compiler before it forks the ranks."""
    template: Template | None = None
    """Process that shall fork the ranks; None for the server itself."""


class StartTemplate(msgspec.Struct, frozen=True, tag=True):
    """Request to the rank server: start a template, without waiting for its call."""

    template: Template


class KillRanks(msgspec.Struct, frozen=True, tag=True):
    """Request to the rank server: kill these ranks with all their descendants and collect their exit codes."""

    pids: list[int]


@dataclass(frozen=True)
class RankFiles:
    """Files that one rank shares with its pool."""

    directory: Path
    rank: int

    @property
    def assignment(self) -> Path:
        """Assignment of the current task, one file for all ranks."""
        return self.directory / "assignment"

    @property
    def report(self) -> Path:
        """RankReport on the current task."""
        return self.directory / f"rank{self.rank}.report"

    @property
    def output(self) -> Path:
        """Standard output and error of the rank and its children."""
        return self.directory / f"rank{self.rank}.out"

    @property
    def stack(self) -> Path:
        """Dump of the stacks of all threads."""
        return self.directory / f"rank{self.rank}.stack"

    @property
    def flight_stem(self) -> Path:
        """Stem of the flight recorder's files: torch appends the rank, and `.pipe` for the pipe."""
        return self.directory / "flight"

    @property
    def flight(self) -> Path:
        """Dump of the flight recorder."""
        return self.directory / f"flight{self.rank}"

    @property
    def flight_pipe(self) -> Path:
        """Pipe through which the flight recorder is asked for a dump."""
        return self.directory / f"flight{self.rank}.pipe"


def require_json_like(value: object, *, where: str) -> None:
    """Check that `value` consists of None, bool, int, float, str, list and dict with str keys, and nothing else.

    Subclasses are refused: a NumPy scalar is a float to Python, but ends a pytest-xdist session.

    Raises:
        TypeError: `value` holds something else; the message names the first position, starting with `where`.
    """
    if type(value) is list:
        for index, item in enumerate(value):
            if type(item) not in JSON_SCALARS:  # facts of a run have tens of thousands
                require_json_like(item, where=f"{where}[{index}]")
    elif type(value) is dict:
        for key, item in value.items():
            if type(key) is not str:
                raise TypeError(f"{where} has the key {key!r}, which is not a str")
            if type(item) not in JSON_SCALARS:
                require_json_like(item, where=f"{where}[{key!r}]")
    elif type(value) not in JSON_SCALARS:
        kind = type(value)
        raise TypeError(f"{where} is a {kind.__module__}.{kind.__qualname__}, not a JSON-like builtin")


def read_head(path: Path, *, size_bytes: int) -> str:
    """Return the first `size_bytes` of a text file, or "" if the file cannot be read."""
    return _read_excerpt(path, size_bytes=size_bytes, from_end=False)


def read_tail(path: Path, *, size_bytes: int) -> str:
    """Return the last `size_bytes` of a text file, or "" if the file cannot be read."""
    return _read_excerpt(path, size_bytes=size_bytes, from_end=True)


def _read_excerpt(path: Path, *, size_bytes: int, from_end: bool) -> str:
    try:
        with path.open("rb") as file:
            if from_end:
                file.seek(max(0, path.stat().st_size - size_bytes))
            return file.read(size_bytes).decode("utf-8", "backslashreplace")
    except OSError:
        return ""
