"""A parameter whose `fsdp_pre_all_gather` gives two tensors gets one of them back on a mesh of one rank.

severity: low
visible: loud
training: weights in two tensors, such as those of 8 bits with scales, cannot be tried on one device
thread: none known
law: none
avoid: give one tensor, or leave fully_shard out on one rank
ranks: 1
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh
from torch.utils._pytree import tree_map_only

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


class Weight(torch.Tensor):
    """Tensor that is gathered with a scale."""

    def __new__(cls, held: torch.Tensor) -> "Weight":
        """Return a tensor like the one that it holds."""
        weight: Weight = torch.Tensor._make_wrapper_subclass(cls, held.shape, held.stride(), dtype=held.dtype)
        weight.held = held  # type: ignore[attr-defined]
        return weight

    def fsdp_pre_all_gather(self, mesh: object) -> tuple[tuple[torch.Tensor, ...], None]:
        """Return the weight and its scale."""
        return (self.held, torch.ones(1)), None  # type: ignore[attr-defined]

    def fsdp_post_all_gather(self, gathered: tuple[torch.Tensor, ...], *_: object) -> None:
        """Count the gathered tensors."""
        print(f"torch {torch.__version__}: expected 2 tensors, got {len(gathered)}", flush=True)
        sys.exit(int(len(gathered) != 2))

    @classmethod
    def __torch_dispatch__(cls, function, _, args=(), kwargs=None):  # type: ignore[no-untyped-def, override]
        """Call an operator on the held tensors."""
        return tree_map_only(torch.Tensor, cls, function(*tree_map_only(cls, lambda x: x.held, args), **(kwargs or {})))


layer = torch.nn.Linear(4, 4)
layer.weight = torch.nn.Parameter(Weight(torch.ones(4, 4)))
fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))(torch.ones(1, 4))
