"""What a precision means to torch and FSDP2: dtypes of parameters, of computation and of reductions."""

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from reference_trainer.config import scales_loss
from reference_trainer.model import Transformer
from reference_trainer.precision import PrecisionName


def set_parameter_dtypes(model: Transformer, precision: PrecisionName) -> None:
    """Give parameters, on the meta device, the dtype in which they are sharded and get their first values.

    Buffers are left alone: the RoPE table is fp32 throughout.
    """
    if precision not in ("bf16-init", "bf16-mixed"):
        return
    for module in model.modules():
        if precision == "bf16-init" or not isinstance(module, nn.RMSNorm):
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.to(torch.bfloat16)


def mixed_precision_policy(precision: PrecisionName) -> MixedPrecisionPolicy:
    """Inputs are left alone: casting them would round the fp32 RoPE table."""
    if precision == "fp32":
        return MixedPrecisionPolicy()
    compute = torch.float16 if scales_loss(precision) else torch.bfloat16
    reduce_dtypes = {"bf16-reduce": torch.bfloat16, "bf16-params": None, "fp16-reduce": torch.float16}
    reduce_dtype = reduce_dtypes.get(precision, torch.float32)
    return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
