"""History of a device's caching allocator for https://docs.pytorch.org/memory_viz, to explain a failed memory law.

torch documents the functions that record it, although their names begin with an underscore
(https://docs.pytorch.org/docs/stable/torch_cuda_memory.html); this is the only module that touches them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

_MAX_ENTRIES = 100_000
_NEEDED = ("_record_memory_history", "_dump_snapshot")


@contextmanager
def allocator_snapshot(file: Path, device: torch.device) -> Iterator[None]:
    """Record the history of the allocator in the context, and write it to `file`.

    Does nothing on the CPU, and for a torch that lacks the functions.
    """
    memory = torch.cuda.memory
    if device.type != "cuda" or not all(hasattr(memory, name) for name in _NEEDED):
        yield
        return
    # With those of C++, which are the default, a hundred stacks take seconds to be named when they are dumped.
    memory._record_memory_history(max_entries=_MAX_ENTRIES, stacks="python")
    try:
        yield
        memory._dump_snapshot(str(file))  # type: ignore[no-untyped-call]
    finally:
        memory._record_memory_history(enabled=None)
