"""Table of precisions, and what torch is told of it."""

from dataclasses import FrozenInstanceError
from typing import get_args

import msgspec
import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from reference_trainer.config import ModelConfig
from reference_trainer.mixed_precision import mixed_precision_policy, set_parameter_dtypes
from reference_trainer.model import Transformer
from reference_trainer.precision import PRECISIONS, Dtype, PrecisionName

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


def test_every_name_is_in_the_table() -> None:
    assert tuple(PRECISIONS) == get_args(PrecisionName)


def test_the_table_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        PRECISIONS["fp32"] = PRECISIONS["bf16-mp"]  # type: ignore[index]
    with pytest.raises(FrozenInstanceError):
        PRECISIONS["fp32"].compute = "bfloat16"  # type: ignore[misc]


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


@pytest.mark.parametrize("precision", get_args(PrecisionName))
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_parameters_are_sharded_in_the_dtypes_of_the_precision(precision: PrecisionName, tied: bool) -> None:
    with torch.device("meta"):
        model = Transformer(msgspec.structs.replace(ModelConfig(), tied_embeddings=tied))
    set_parameter_dtypes(model, precision)
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    in_bf16 = {
        "bf16-init": set(dtypes),
        "bf16-mixed": {name for name in dtypes if "norm" not in name},
    }.get(precision, set())
    assert dtypes == {name: BF16 if name in in_bf16 else FP32 for name in dtypes}
    assert (model.output.weight is model.tok_embeddings.weight) == tied
    assert model.rope_table.dtype == FP32


def test_a_loss_is_scaled_where_computation_is_in_fp16() -> None:
    assert [name for name, precision in PRECISIONS.items() if precision.scales_loss] == ["fp16-mp", "fp16-reduce"]
