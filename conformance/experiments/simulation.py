"""Simulated worlds of any size in one process: torch's fake process group, whose collectives do nothing.

Such a run proves facts that do not depend on numbers: collectives and allocations.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor


@contextmanager
def simulated_world(size: int, *, rank: int = 0, device_type: str = "cpu") -> Iterator[None]:
    """Make this process one rank of a world of this size, with tensors on a type of device.

    Raises RuntimeError for a torch without the fake backend.
    """
    try:
        from torch.testing._internal.distributed.fake_pg import FakeStore
    except ImportError as error:
        raise RuntimeError(f"torch {torch.__version__} has no fake process group: {error}") from None
    backends = ",".join(f"{each}:fake" for each in dict.fromkeys(("cpu", device_type)))
    dist.init_process_group(backends, store=FakeStore(), rank=rank, world_size=size)
    try:
        with patch.object(dist, "recv", _receive_ones):
            yield
    finally:
        dist.destroy_process_group()


def _receive_ones(tensor: Tensor, *_arguments: Any, **_options: Any) -> None:
    """Receive from a peer that agrees: the stages of a pipeline ask each other whether all know their shapes.

    The fake process group would leave the tensor as it is. torch.distributed.pipelining votes so from 2.13 on
    (`_warmup_forward_vote` in torch/distributed/pipelining/stage.py).
    """
    tensor.fill_(1)
