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
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh
from torch.utils._pytree import tree_map_only

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


class Weight(torch.Tensor):
    """Tensor that is gathered with a scale."""

    def __new__(cls, held: Any) -> Any:
        """Return a tensor like the one that it holds."""
        weight = torch.Tensor._make_wrapper_subclass(cls, held.shape, held.stride(), dtype=held.dtype)
        weight.fsdp_pre_all_gather = lambda mesh: ((held, torch.ones(1)), None)
        weight.held = held
        return weight

    def fsdp_post_all_gather(self, gathered: Any, *_: Any) -> Any:
        """Tell what was gathered."""
        print(f"torch {torch.__version__}: expected 2 tensors, got {len(gathered)}", flush=True)
        sys.exit(int(len(gathered) != 2))

    @classmethod
    def __torch_dispatch__(cls, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operator on the held tensors."""
        return tree_map_only(torch.Tensor, cls, function(*tree_map_only(cls, lambda x: x.held, args), **(kwargs or {})))


layer = torch.nn.Linear(4, 4)
layer.weight = torch.nn.Parameter(Weight(torch.ones(4, 4)))
fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))(torch.ones(1, 4))
