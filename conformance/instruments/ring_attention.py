"""Options of torch's ring attention that no public function sets, in one place.

`set_rotate_method` and `context_parallel_unshard` are documented, in a module whose name is private; the switch for
balancing the load has no function (https://docs.pytorch.org/tutorials/unstable/context_parallel.html sets it so).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental import _attention


def unsharded(mesh: DeviceMesh, shards: Sequence[Tensor], dims: Sequence[int]) -> list[Tensor]:
    """Return full tensors of shards along the sequence, in its order. A collective."""
    full: list[Tensor] = _attention.context_parallel_unshard(mesh, list(shards), list(dims))
    return full


@contextmanager
def ring_options(*, load_balance: bool, rotate: str) -> Iterator[None]:
    """Balance the load or not, and pass keys and values by `allgather` or `alltoall`.

    Raises RuntimeError for a torch without these options.
    """
    options = getattr(_attention, "_cp_options", None)
    if options is None or not hasattr(options, "enable_load_balance"):
        raise RuntimeError("this torch has no options of ring attention at torch.distributed.tensor.experimental")
    before = options.enable_load_balance, options.rotate_method
    options.enable_load_balance = load_balance
    _attention.set_rotate_method(rotate)
    try:
        yield
    finally:
        options.enable_load_balance, options.rotate_method = before
