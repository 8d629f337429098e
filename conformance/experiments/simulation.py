"""Simulated worlds of any size in one process: torch's fake process group, whose collectives do nothing.

Such a run proves facts that do not depend on numbers: which collectives are issued, and what is allocated.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist


@contextmanager
def simulated_world(size: int) -> Iterator[None]:
    """Make this process rank 0 of a world of this size. Raises RuntimeError for a torch without the fake backend."""
    try:
        from torch.testing._internal.distributed.fake_pg import FakeStore
    except ImportError as error:
        raise RuntimeError(f"torch {torch.__version__} has no fake process group: {error}") from None
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()
