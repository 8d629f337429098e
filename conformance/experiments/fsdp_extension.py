"""Documented extensions of FSDP2 without public names: tensors gathered in two dtypes, and meshes of parameters."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import Shard
from torch.utils._pytree import tree_map_only

_CARRIED = 2
"""Factor of the integers of 8 bits that are gathered beside the rest of each element, which is gathered in bf16."""


def placed_on(mesh: DeviceMesh, dim: int) -> Any:
    """Return the answer of a `shard_placement_fn` that gives a parameter a mesh, over whose ranks it is sharded.

    Torch has its class from 2.13 on.
    """
    return _fsdp_common.ShardPlacementResult(Shard(dim), _fsdp_common.FSDPMeshInfo(mesh, shard_mesh_dim=0))


class TwoDtypeTensor(Tensor):
    """Tensor of small integers whose shards are gathered as numbers of bf16 and integers of 8 bits."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> "TwoDtypeTensor":
        """Return a tensor like the one that it holds."""
        wrapped: TwoDtypeTensor = Tensor._make_wrapper_subclass(
            cls, held.shape, held.stride(), held.storage_offset(), dtype=held.dtype, device=held.device
        )
        return wrapped

    def __init__(self, held: Tensor) -> None:
        self.held = held

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], int]:
        """Return the two tensors to gather, and the factor of the second one."""
        return ((self.held - _CARRIED).bfloat16(), torch.ones_like(self.held, dtype=torch.int8)), _CARRIED

    def fsdp_post_all_gather(
        self, all_gather_outputs: tuple[Tensor, ...], metadata: int, param_dtype: torch.dtype, *, out: Any = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Add the gathered tensors: the sum is that of another weight if any of them, or the factor, is another's."""
        rest, carried = all_gather_outputs
        total = (rest.float() + metadata * carried).to(param_dtype)
        if out is None:
            return total, (total, *all_gather_outputs)
        out.data.copy_(total)  # which backward must not take for a change after forward
        return None

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call an operator on the held tensors, and return tensors that are gathered in the same way."""
        given_args, given_kwargs = tree_map_only(TwoDtypeTensor, lambda x: x.held, (args, kwargs or {}))
        found = function(*given_args, **given_kwargs)
        if function._schema.name.endswith("_"):  # in place
            return args[0]
        return tree_map_only(Tensor, lambda x: x if isinstance(x, TwoDtypeTensor) else TwoDtypeTensor(x), found)
