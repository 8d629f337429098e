"""Precisions in terms of torch and FSDP2: dtypes of parameters, of computation and of reductions."""

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from reference_trainer.model import Transformer
from reference_trainer.precision import PRECISIONS, Dtype, PrecisionName


def torch_dtype(name: Dtype) -> torch.dtype:
    """Return the dtype of torch that has this name."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def set_parameter_dtypes(model: Transformer, precision: PrecisionName) -> None:
    """Cast parameters, before they are materialised or initialised, to the dtypes in which they will be sharded.

    Buffers are left alone: the RoPE table is fp32 throughout.
    """
    dtypes = PRECISIONS[precision]
    for module in model.modules():
        own = dtypes.norm_shard if isinstance(module, nn.RMSNorm) else dtypes.shard
        for parameter in module.parameters(recurse=False):
            parameter.data = parameter.data.to(torch_dtype(dtypes.build or own))


def mixed_precision_policy(precision: PrecisionName) -> MixedPrecisionPolicy:
    """Return the policy for `fully_shard`. Inputs are left alone: casting them would round the fp32 RoPE table."""
    dtypes = PRECISIONS[precision]
    if not dtypes.is_mixed:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(
        param_dtype=torch_dtype(dtypes.compute),
        reduce_dtype=torch_dtype(dtypes.reduce) if dtypes.reduce else None,
        cast_forward_inputs=False,
    )
