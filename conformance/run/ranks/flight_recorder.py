"""NCCL's flight recorder: the last collectives that a rank of a failed task had issued, and their states.

torch keeps a ring buffer of collectives in each process, and dumps the buffer as a pickle of builtins when its watchdog
runs into a timeout. It also listens to a pipe, but only in the first process group of a process (`getUid() == 0` in
ProcessGroupNCCL.cpp), and a warm rank makes one for each task: therefore the suite gives each rank a pipe and a thread.

The pool's process, which has no torch, reads the dumps: torch's own readers (`torch.distributed.flight_recorder`, the
command `torchfrtrace`) need torch and the dumps of all ranks. Not yet run on a device, see docs/gpu.md; the
format is that of a dump of torch 2.13. Gloo's recorder leaves each collective at `scheduled` (seen with torch 2.13).

https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html
https://docs.pytorch.org/tutorials/intermediate/debug_hangs_with_flight_recorder.html
"""

import importlib
import io
import os
import pickle
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from conformance.run.ranks.messages import RankFiles

DUMP_LIMIT_S = 4.0
"""Time that ranks have for their dumps; one that holds the interpreter's lock never dumps."""
_POLL_S = 0.05
_ENTRIES = 2000
_SHOWN = 8


def variables(files: RankFiles) -> dict[str, str]:
    """Return the environment variables that switch the recorder on in a rank.

    They have NCCL's names, which all versions know, and the newer names for all backends, which torch 2.13 knows too.
    """
    size, stem = str(_ENTRIES), str(files.flight_stem)
    return {
        "TORCH_NCCL_TRACE_BUFFER_SIZE": size,
        "TORCH_FR_BUFFER_SIZE": size,
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": stem,
        "TORCH_FR_DUMP_TEMP_FILE": stem,
    }


def listen(files: RankFiles) -> None:
    """Start the thread that dumps the buffer of this rank at each write into the rank's pipe."""
    os.mkfifo(files.flight_pipe)
    fd = os.open(files.flight_pipe, os.O_RDWR)  # opened at once, and never at its end
    threading.Thread(target=_dump_on_request, args=(fd, files.flight), name="flight recorder", daemon=True).start()


def _dump_on_request(fd: int, file: Path) -> None:
    c10d = importlib.import_module("torch._C._distributed_c10d")
    dump = getattr(c10d, "_dump_nccl_trace", None) or getattr(c10d, "_dump_fr_trace", None)
    while os.read(fd, 64):
        if dump is not None:
            file.write_bytes(dump(includeStackTraces=False))


def collect_dumps(ranks: Sequence[RankFiles], *, limit_s: float = DUMP_LIMIT_S) -> None:
    """Ask all ranks that have a pipe for a dump, and wait for the dumps, at most for `limit_s`."""
    waiting = [files for files in ranks if _ask(files.flight_pipe)]
    until_s = time.monotonic() + limit_s
    while waiting and time.monotonic() < until_s:
        time.sleep(_POLL_S)
        waiting = [files for files in waiting if _decoded(files.flight) is None]


def _ask(pipe: Path) -> bool:
    """Write into a pipe; returns whether a process reads it."""
    try:
        fd = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return False
    with suppress(OSError):
        os.write(fd, b"1\n")
    os.close(fd)
    return True


def summary(file: Path) -> str:
    """Return the last collectives in a dump, one line each, oldest first; "" if no dump can be read."""
    dump = _decoded(file)
    entries = dump.get("entries") if isinstance(dump, Mapping) else None
    if not isinstance(entries, Sequence):
        return ""
    return "\n".join(_line(entry) for entry in entries[-_SHOWN:] if isinstance(entry, Mapping))


def _line(entry: Mapping[str, Any]) -> str:
    """Return a line such as `#12 nccl:all_reduce of dp_shard: started; Float [4] -> Float [4]`."""
    group = entry.get("process_group")
    name = group[-1] if isinstance(group, Sequence) and group else group
    number = entry.get("p2p_seq_id" if entry.get("is_p2p") else "collective_seq_id")
    inputs, outputs = (_tensors(entry, kind) for kind in ("input", "output"))
    return f"#{number} {entry.get('profiling_name')} of {name}: {entry.get('state')}; {inputs} -> {outputs}"


def _tensors(entry: Mapping[str, Any], kind: str) -> str:
    sizes, dtypes = (entry.get(f"{kind}_{what}") or [] for what in ("sizes", "dtypes"))
    padded = [*dtypes, *["?"] * (len(sizes) - len(dtypes))]
    return ", ".join(f"{dtype} {size}" for dtype, size in zip(padded, sizes, strict=False)) or "nothing"


class _Builtins(pickle.Unpickler):
    """Unpickler of numbers, strings and containers, which refuses any name of a class or a function."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"a dump of builtins names {module}.{name}")


def _decoded(file: Path) -> Any:
    """Return the content of a dump; None for a file that is missing, half written, or no pickle of builtins."""
    try:
        return _Builtins(io.BytesIO(file.read_bytes())).load()
    except Exception:  # a truncated pickle raises any exception
        return None
