"""Table of precisions, and the policy for `fully_shard`."""

from typing import get_args

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from reference_trainer.mixed_precision import mixed_precision_policy
from reference_trainer.precision import PRECISIONS, Dtype, PrecisionName

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


def test_every_name_is_in_the_table() -> None:
    assert tuple(PRECISIONS) == get_args(PrecisionName)


@pytest.mark.parametrize("name", get_args(Dtype))
def test_dtypes_are_those_of_torch(name: str) -> None:
    assert str(getattr(torch, name)) == f"torch.{name}"


@pytest.mark.parametrize(
    ("precision", "compute", "reduce"),
    [
        ("fp32", None, None),
        ("bf16-mp", BF16, FP32),
        ("bf16-init", BF16, FP32),
        ("bf16-reduce", BF16, BF16),
        ("bf16-params", BF16, None),
        ("bf16-mixed", BF16, FP32),
        ("fp16-mp", FP16, FP32),
        ("fp16-reduce", FP16, FP16),
    ],
)
def test_what_fully_shard_is_told(
    precision: PrecisionName, compute: torch.dtype | None, reduce: torch.dtype | None
) -> None:
    """`cast_forward_inputs` has its default, True, only with the default policy, which casts nothing."""
    expected = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce, cast_forward_inputs=compute is None)
    assert mixed_precision_policy(precision) == expected


def test_a_loss_is_scaled_where_computation_is_in_fp16() -> None:
    assert [name for name, precision in PRECISIONS.items() if precision.scales_loss] == ["fp16-mp", "fp16-reduce"]
