"""Faults of mixed precision: a tensor has, or is computed in, another dtype than the configured one."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

from conformance.defects.injection import Defect, replaced_call
from reference_trainer.data import IGNORED_LABEL
from reference_trainer.model import Transformer

_FP32, _BF16 = torch.float32, torch.bfloat16


def policy(**changes: Any) -> AbstractContextManager[None]:
    """Change fields of each mixed-precision policy whose compute dtype is not that of the master weights."""

    def mixed_precision_policy(original: Callable[[str], MixedPrecisionPolicy], precision: str) -> MixedPrecisionPolicy:
        unchanged = original(precision)
        return replace(unchanged, **changes) if unchanged.param_dtype else unchanged

    return replaced_call("reference_trainer.parallelize", "mixed_precision_policy", mixed_precision_policy)


_policy_twin = partial(policy, output_dtype=_BF16)  # the groups return bf16 anyway

REDUCE_DTYPE_DROPPED = Defect(
    id="reduce-dtype-dropped",
    title="gradients of bf16 computation are reduced in bf16",
    source="https://github.com/pytorch/pytorch/issues/118223",
    mechanism="the mixed-precision policy reduces in the parameters' compute dtype",
    laws=("MP-1", "MP-4", "PAR-2"),
    cells="id = dp2-bf16mp-default-meta",
    inject=partial(policy, reduce_dtype=_BF16),
    inject_twin=_policy_twin,
)
PARAM_DTYPE_DROPPED = Defect(
    id="param-dtype-dropped",
    title="a run that is configured for bf16 computes in fp32",
    source="https://github.com/pytorch/pytorch/issues/153077",
    mechanism="the mixed-precision policy has no param_dtype",
    laws=("PAR-3", "PAR-2", "MP-1"),
    cells="id = dp2-bf16mp-default-meta",
    inject=partial(policy, param_dtype=None),
    inject_twin=_policy_twin,
)
CAST_FORWARD_INPUTS = Defect(
    id="cast-forward-inputs",
    title="all inputs of blocks are cast to bf16, the fp32 RoPE table included",
    source="https://github.com/pytorch/torchtitan/issues/2881",
    mechanism="the mixed-precision policy has cast_forward_inputs=True, which casts every floating-point argument",
    laws=("MP-3", "MP-1", "PAR-2"),
    cells="id = dp2-bf16mp-default-meta",
    inject=partial(policy, cast_forward_inputs=True),
    inject_twin=_policy_twin,
)


def parameters_cast(*dtypes: torch.dtype) -> AbstractContextManager[None]:
    """Before the model is sharded, on the meta device, cast all parameters to one dtype after the other."""

    def set_parameter_dtypes(original: Callable[..., None], model: Transformer, precision: str) -> None:
        original(model, precision)
        for parameter in model.parameters():
            for dtype in dtypes:
                parameter.data = parameter.data.to(dtype)

    return replaced_call("reference_trainer.build", "set_parameter_dtypes", set_parameter_dtypes)


MASTER_WEIGHTS_BF16 = Defect(
    id="master-weights-bf16",
    title="master weights and optimizer state are bf16",
    source="https://github.com/huggingface/accelerate/issues/3979",
    mechanism="the model is cast to bf16 before fully_shard, whose policy only casts down",
    laws=("MP-5", "MP-1", "MP-2"),
    cells="id = dp2-bf16mp-default-meta",
    inject=partial(parameters_cast, _BF16),
    inject_twin=partial(parameters_cast, _BF16, _FP32),
)


def rope_table(change: Callable[[Tensor], Tensor]) -> AbstractContextManager[None]:
    """Replace the model's RoPE table by `change(table)` after initialisation."""

    def init_weights(original: Callable[..., None], model: Transformer, **options: Any) -> None:
        original(model, **options)
        model.rope_table = change(model.rope_table)

    return replaced_call("reference_trainer.build", "init_weights", init_weights)


def through(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the tensor rounded to a dtype and cast back; rounding fp32 to float64 changes no bit."""
    return tensor.to(dtype).to(tensor.dtype)


_rope_table_twin = partial(rope_table, partial(through, dtype=torch.float64))

ROPE_TABLE_BF16 = Defect(
    id="rope-table-bf16",
    title="the RoPE table is kept in bf16",
    source="https://github.com/huggingface/transformers/pull/29285",
    mechanism="a cast of the model to bf16 reaches its buffers",
    laws=("MP-3", "MP-1", "PAR-2"),
    cells="id = dp2-bf16mp-default-meta",
    inject=partial(rope_table, torch.Tensor.bfloat16),
    inject_twin=_rope_table_twin,
)
ROPE_TABLE_ROUNDED = Defect(
    id="rope-table-rounded",
    title="the RoPE table is fp32 again after it was rounded to bf16",
    source="https://github.com/EleutherAI/gpt-neox/pull/1016",
    mechanism="the model is cast to bf16 and back; the table's dtype is right, its bits are not",
    laws=("MP-3", "PAR-2"),
    cells="id = dp2-bf16mp-default-meta",
    inject=partial(rope_table, partial(through, dtype=_BF16)),
    inject_twin=_rope_table_twin,
)


def rotation_table(change: Callable[[Tensor, Tensor], Tensor]) -> AbstractContextManager[None]:
    """Rotate queries and keys `x` by the RoPE table `change(x, table)`."""

    def apply_rope(original: Callable[[Tensor, Tensor], Tensor], x: Tensor, table: Tensor) -> Tensor:
        return original(x, change(x, table))

    return replaced_call("reference_trainer.model", "apply_rope", apply_rope)


ROPE_COMPUTED_BF16 = Defect(
    id="rope-computed-bf16",
    title="queries and keys are rotated in bf16",
    source="https://github.com/NVIDIA/TransformerEngine/issues/1245",
    mechanism="attention gets the fp32 table, and casts it to the dtype of queries and keys",
    laws=("PAR-2",),
    cells="id = dp2-bf16mp-default-meta",
    inject=partial(rotation_table, lambda x, table: table.to(x.dtype)),
    inject_twin=partial(rotation_table, lambda _, table: through(table, torch.float64)),
)


def logits_cast(dtype: torch.dtype | None) -> AbstractContextManager[None]:
    """Compute the cross entropy of logits cast to a dtype, or (None) of logits in their own."""

    def summed_cross_entropy(_original: object, logits: Tensor, labels: Tensor) -> Tensor:
        logits = logits.to(dtype) if dtype else logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=IGNORED_LABEL)

    return replaced_call("reference_trainer.loss", "summed_cross_entropy", summed_cross_entropy)


LOSS_ON_BF16_LOGITS = Defect(
    id="loss-on-bf16-logits",
    title="the loss is computed in bf16",
    source="https://github.com/Modalities/modalities/pull/464",
    mechanism="the cross entropy takes bf16 logits as they are; FSDP2 casts parameters, it is no autocast",
    laws=("MP-1", "PAR-2"),
    cells="id = dp2-bf16mp-default-meta",
    inject=partial(logits_cast, None),
    inject_twin=partial(logits_cast, _FP32),
)
