"""Precisions as data: the dtypes that each name means. Without torch, so that any process can read the table.

The functions of `mixed_precision` translate the table for torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

Dtype = Literal["float32", "bfloat16", "float16"]
"""Name of a dtype, as an attribute of `torch`."""
PrecisionName = Literal[
    "fp32", "bf16-mp", "bf16-init", "bf16-reduce", "bf16-params", "bf16-mixed", "fp16-mp", "fp16-reduce"
]


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Dtypes of a training run."""

    compute: Dtype
    """Dtype of unsharded parameters, all-gathers and activations."""
    reduce: Dtype | None = "float32"
    """Dtype in which gradients are reduced over data-parallel ranks. None: torch chooses, the dtype of computation up
    to torch 2.14, that of the sharded parameters from 2.15 on."""
    shard: Dtype = "float32"
    """Dtype of sharded parameters, and with them of reduced gradients and optimizer state; norms have their own."""
    norm_shard: Dtype = "float32"
    """Dtype of the sharded parameters of norms. If it is not `shard`, norms are separate FSDP groups, since all
    parameters of a group must have one dtype."""
    build: Dtype | None = None
    """Dtype in which all parameters are built, sharded and initialised before they are cast to `shard`. None: each is
    built in the dtype that it keeps."""

    @property
    def is_mixed(self) -> bool:
        """True if some parameters are computed with in another dtype than they are sharded in."""
        return {self.shard, self.norm_shard} != {self.compute}

    @property
    def norms_apart(self) -> bool:
        """True if norms are separate FSDP groups."""
        return self.norm_shard != self.shard

    @property
    def scales_loss(self) -> bool:
        """True if the loss is scaled: the exponents of fp16 are too few for gradients."""
        return self.compute == "float16"


PRECISIONS: Mapping[PrecisionName, Precision] = MappingProxyType(
    {
        "fp32": Precision(compute="float32"),
        "bf16-mp": Precision(compute="bfloat16"),
        "bf16-init": Precision(compute="bfloat16", build="bfloat16"),
        "bf16-reduce": Precision(compute="bfloat16", reduce="bfloat16"),
        "bf16-params": Precision(compute="bfloat16", reduce=None),
        "bf16-mixed": Precision(compute="bfloat16", shard="bfloat16"),
        "fp16-mp": Precision(compute="float16"),
        "fp16-reduce": Precision(compute="float16", reduce="float16"),
    }
)
