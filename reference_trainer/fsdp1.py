"""FSDP1, `FullyShardedDataParallel`, with the options that the comparison with FSDP2 needs.

FSDP1 flattens the parameters of a group into one vector, of which each rank holds a shard; groups are the embedding,
each block, and at the root norm and output. Such a shard has neither the shape of a parameter nor its placements.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_

from reference_trainer.config import TrainerConfig
from reference_trainer.mesh import degree
from reference_trainer.mixed_precision import torch_dtype
from reference_trainer.model import Block, Transformer
from reference_trainer.precision import PRECISIONS, PrecisionName


class FSDP1Model(FullyShardedDataParallel):
    """Model in groups of FSDP1. The model to wrap has its weights, and its tensor parallelism, already."""

    def __init__(self, model: Transformer, mesh: DeviceMesh, config: TrainerConfig, device: torch.device) -> None:
        tp = degree(mesh, "tp")
        copies = [1 if _is_sharded(parameter) else tp for parameter in model.parameters()]
        super().__init__(
            model,
            device_mesh=mesh["dp_shard"],  # FSDP1 finds the tensor-parallel dimension by itself
            device_id=device,
            auto_wrap_policy=ModuleWrapPolicy({Block, nn.Embedding}),
            # FULL_SHARD never reshards the root after forward, as `default` demands.
            sharding_strategy=getattr(ShardingStrategy, "SHARD_GRAD_OP" if config.reshard == "never" else "FULL_SHARD"),
            mixed_precision=_mixed_precision(config.precision),
            limit_all_gathers=config.limit_all_gathers,
            use_orig_params=True,
        )
        self.copies = copies
        """Number of tensor-parallel ranks that hold the same elements of a parameter, for each parameter."""

    def named_parameters(self, *args: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield each parameter with the name that it has in the model itself."""
        for name, parameter in super().named_parameters(*args, **options):
            yield own_name(name), parameter

    @torch.no_grad()
    def clip(self, *, max_norm: float) -> Tensor:
        """Scale gradients down to a 2-norm of `max_norm` (0: leave them), and return the norm before, a scalar.

        FSDP1's method `clip_grad_norm_` is not enough: it adds up over data-parallel ranks alone, so that the norm
        differs between tensor-parallel ranks (torch 2.13).
        """
        parameters = zip(self.parameters(), self.copies, strict=True)
        squares = [p.grad.square().sum() / copies for p, copies in parameters if p.grad is not None]
        total = torch.stack(squares).sum()
        dist.all_reduce(total)  # all ranks of the world together hold each element as often as there are copies
        norm = total.sqrt()
        if max_norm > 0:
            clip_grads_with_norm_(self.parameters(), max_norm, norm)
        return norm


def own_name(name: str) -> str:
    """Return the name that a parameter or module has in the model itself, without FSDP1's wrappers."""
    return name.replace("_fsdp_wrapped_module.", "")


def summon_full_params(model: nn.Module) -> AbstractContextManager[None]:
    """Return a context in which parameters and gradients of FSDP1 are not sharded, or by tensor parallelism alone.

    Entering and leaving are collective calls, not to be made in forward or backward. For any other model the context
    does nothing.
    """
    if isinstance(model, FSDP1Model):
        context: AbstractContextManager[None] = model.summon_full_params(model, writeback=False, with_grads=True)
        return context
    return nullcontext()


def _is_sharded(parameter: nn.Parameter) -> bool:
    return isinstance(parameter, DTensor) and not all(placement.is_replicate() for placement in parameter.placements)


def _mixed_precision(precision: PrecisionName) -> MixedPrecision | None:
    """FSDP1's counterpart of `mixed_precision.mixed_precision_policy`."""
    dtypes = PRECISIONS[precision]
    if not dtypes.is_mixed:
        return None
    return MixedPrecision(
        param_dtype=torch_dtype(dtypes.compute),
        reduce_dtype=torch_dtype(dtypes.reduce) if dtypes.reduce else None,
        cast_forward_inputs=False,
        cast_root_forward_inputs=False,
    )
