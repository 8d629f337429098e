"""A parameter whose `fsdp_pre_all_gather` gives two tensors gets one of them back on a mesh of one rank.

`FSDPParamGroup.wait_for_unshard` copies the first tensor alone where there is nothing to gather.

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

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


class Weight(torch.Tensor):
    """Tensor that is gathered with a scale."""

    def __new__(cls, held: torch.Tensor) -> "Weight":
        """Return a tensor like the one that it holds."""
        weight: Weight = torch.Tensor._make_wrapper_subclass(cls, held.shape, held.stride(), dtype=held.dtype)
        weight.held = held  # type: ignore[attr-defined]
        weight.fsdp_pre_all_gather = lambda mesh: ((held, torch.ones(1)), None)  # type: ignore[attr-defined]
        return weight

    def fsdp_post_all_gather(self, gathered: tuple[torch.Tensor, ...], *_: object) -> None:
        """Count the gathered tensors."""
        print(f"torch {torch.__version__}: expected 2 tensors, got {len(gathered)}", flush=True)
        sys.exit(int(len(gathered) != 2))

    @classmethod
    def __torch_dispatch__(cls, function, _, args=(), kwargs=None):  # type: ignore[no-untyped-def, override]
        """Call an operator on the held tensors."""
        held = torch.utils._pytree.tree_map_only(cls, lambda x: x.held, args)
        return torch.utils._pytree.tree_map_only(torch.Tensor, cls, function(*held, **(kwargs or {})))


layer = torch.nn.Linear(4, 4)
layer.weight = torch.nn.Parameter(Weight(torch.ones(4, 4)))
fully_shard(layer, mesh=dist.init_device_mesh("cpu", (1,)))(torch.ones(1, 4))
