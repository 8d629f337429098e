"""Faults of mixed precision: something has, or is computed in, another dtype than was asked for."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

from conformance.defects.injection import Defect, replaced
from reference_trainer.data import IGNORED_LABEL
from reference_trainer.model import Transformer

_FP32, _BF16 = torch.float32, torch.bfloat16


def policy(**changes: Any) -> AbstractContextManager[None]:
    """Change fields of each mixed-precision policy that computes in another dtype than that of the masters."""

    def make(original: Any) -> Any:
        def mixed_precision_policy(precision: str) -> MixedPrecisionPolicy:
            unchanged: MixedPrecisionPolicy = original(precision)
            return replace(unchanged, **changes) if unchanged.param_dtype else unchanged

        return mixed_precision_policy

    return replaced("reference_trainer.parallelize", "mixed_precision_policy", make)


def sharded_dtypes(*dtypes: torch.dtype) -> AbstractContextManager[None]:
    """Before the model is sharded, on the meta device, cast all parameters to one dtype after the other."""

    def make(original: Any) -> Any:
        def set_parameter_dtypes(model: Transformer, precision: str) -> None:
            original(model, precision)
            for parameter in model.parameters():
                for dtype in dtypes:
                    parameter.data = parameter.data.to(dtype)

        return set_parameter_dtypes

    return replaced("reference_trainer.build", "set_parameter_dtypes", make)


def rope_table(change: Callable[[Tensor], Tensor]) -> AbstractContextManager[None]:
    """After initialisation put a changed RoPE table into the model."""

    def make(original: Any) -> Any:
        def init_weights(model: Transformer, **options: Any) -> None:
            original(model, **options)
            model.rope_table = change(model.rope_table)

        return init_weights

    return replaced("reference_trainer.build", "init_weights", make)


def rope_operand(change: Callable[[Tensor, Tensor], Tensor]) -> AbstractContextManager[None]:
    """Rotate queries and keys by a changed table; the arguments are what is rotated and the table."""

    def make(original: Any) -> Any:
        def apply_rope(x: Tensor, table: Tensor) -> Tensor:
            rotated: Tensor = original(x, change(x, table))
            return rotated

        return apply_rope

    return replaced("reference_trainer.model", "apply_rope", make)


def loss_operand(dtype: torch.dtype | None) -> AbstractContextManager[None]:
    """Compute the cross entropy of logits cast to a dtype, or of logits as they are."""

    def make(_original: Any) -> Any:
        def summed_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
            logits = logits.to(dtype) if dtype else logits
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=IGNORED_LABEL)

        return summed_cross_entropy

    return replaced("reference_trainer.loss", "summed_cross_entropy", make)


def through(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor rounded to a dtype and cast back; through float64 no bit of float32 is lost."""
    return tensor.to(dtype).to(tensor.dtype)


_policy_twin = partial(policy, output_dtype=_BF16)
"""What the groups return is bf16 anyway."""
_rope_table_twin = partial(rope_table, partial(through, dtype=torch.float64))

DEFECTS = (
    Defect(
        id="reduce-dtype-dropped",
        title="gradients of bf16 computation are reduced in bf16",
        source="https://github.com/pytorch/pytorch/issues/118223",
        mechanism="the mixed-precision policy reduces in the parameters' compute dtype",
        laws=("MP-1", "MP-4", "PAR-2"),
        inject=partial(policy, reduce_dtype=_BF16),
        inject_twin=_policy_twin,
    ),
    Defect(
        id="param-dtype-dropped",
        title="bf16 was asked for and fp32 is computed in",
        source="https://github.com/pytorch/pytorch/issues/153077",
        mechanism="the mixed-precision policy has no param_dtype",
        laws=("PAR-3", "PAR-2", "MP-1"),
        inject=partial(policy, param_dtype=None),
        inject_twin=_policy_twin,
    ),
    Defect(
        id="cast-forward-inputs",
        title="what blocks are given is cast to bf16, the fp32 RoPE table included",
        source="https://github.com/pytorch/torchtitan/issues/2881",
        mechanism="the mixed-precision policy has cast_forward_inputs=True, which casts every floating-point argument",
        laws=("MP-3", "MP-1", "PAR-2"),
        inject=partial(policy, cast_forward_inputs=True),
        inject_twin=_policy_twin,
    ),
    Defect(
        id="master-weights-bf16",
        title="master weights and optimizer state are bf16",
        source="https://github.com/huggingface/accelerate/issues/3979",
        mechanism="the model is cast to bf16 before fully_shard, whose policy only casts down",
        laws=("MP-5", "MP-1", "MP-2"),
        inject=partial(sharded_dtypes, _BF16),
        inject_twin=partial(sharded_dtypes, _BF16, _FP32),
    ),
    Defect(
        id="rope-table-bf16",
        title="the RoPE table is kept in bf16",
        source="https://github.com/huggingface/transformers/pull/29285",
        mechanism="a cast of the model to bf16 reaches its buffers",
        laws=("MP-3", "MP-1", "PAR-2"),
        inject=partial(rope_table, torch.Tensor.bfloat16),
        inject_twin=_rope_table_twin,
    ),
    Defect(
        id="rope-table-rounded",
        title="the RoPE table is fp32 again, but was rounded to bf16 on the way",
        source="https://github.com/EleutherAI/gpt-neox/pull/1016",
        mechanism="the model is cast to bf16 and back; the table's dtype is right, its bits are not",
        laws=("MP-3", "PAR-2"),
        inject=partial(rope_table, partial(through, dtype=_BF16)),
        inject_twin=_rope_table_twin,
    ),
    Defect(
        id="rope-computed-bf16",
        title="queries and keys are rotated in bf16",
        source="https://github.com/NVIDIA/TransformerEngine/issues/1245",
        mechanism="attention is given the fp32 table, and casts it to the dtype of what it rotates",
        laws=("PAR-2",),
        inject=partial(rope_operand, lambda x, table: table.to(x.dtype)),
        inject_twin=partial(rope_operand, lambda _, table: through(table, torch.float64)),
    ),
    Defect(
        id="loss-on-bf16-logits",
        title="the loss is computed in bf16",
        source="https://github.com/Modalities/modalities/pull/464",
        mechanism="the cross entropy takes bf16 logits as they are; FSDP2 casts parameters, it is no autocast",
        laws=("MP-1", "PAR-2"),
        inject=partial(loss_operand, None),
        inject_twin=partial(loss_operand, _FP32),
    ),
)
