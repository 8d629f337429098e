"""Faults of FSDP2 that show where two of its options or methods are used together."""

from contextlib import AbstractContextManager
from functools import partial

from conformance.defects.edited_source import edited
from conformance.defects.injection import Defect
from conformance.defects.interface_faults import divide_factor_of

_FULLY_SHARD = "torch.distributed.fsdp._fully_shard"
_GROUP = f"{_FULLY_SHARD}._fsdp_param_group:FSDPParamGroup"
_DOCS = "https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html"
_CELL = "id = hsdp2x2-fp32-default-meta"


DIVIDE_FACTOR_LOST_WITH_OFFLOAD = Defect(
    id="divide-factor-lost-with-offload",
    title="a gradient divide factor is ignored with CPU offload",
    source=_DOCS,
    mechanism="the path that copies gradients to the host reduces without the factor",
    laws=("API-2", "API-3"),
    cells="id in (dp2-fp32-default-meta, hsdp2x2-fp32-default-meta)",
    subjects=("offload_policy=True, gradient_divide_factor=8.0",),
    inject=partial(divide_factor_of, lambda param: param.offload_to_cpu),
    inject_twin=partial(divide_factor_of, lambda _: False),
)


def zeros_of_columns(*, dim: int) -> AbstractContextManager[None]:
    """Add 1 to the zeros of parameters that were not used if they are sharded along a dimension."""
    zeros = "fsdp_param.unsharded_zero_grad_data"
    added = f"unsharded_grads.append({zeros} + (fsdp_param.fsdp_placement.dim == {dim}))"
    return edited(_GROUP, "post_backward", f"unsharded_grads.append({zeros})", into=[added])


UNUSED_COLUMNS_NOT_ZERO = Defect(
    id="unused-columns-not-zero",
    title="with Shard(1) ranks that do not use a parameter contribute something to its gradient",
    source=_DOCS,
    mechanism="the buffer in which columns are rearranged is not cleared for parameters without a gradient",
    laws=("API-3",),
    cells=_CELL,
    subjects=("shard_placement_fn=columns, reduce_scatter_unused_params=True",),
    inject=partial(zeros_of_columns, dim=1),
    inject_twin=partial(zeros_of_columns, dim=2),
)


def accumulation(*, is_lost: bool) -> AbstractContextManager[None]:
    """Drop what the last backward pass adds to gradients that are kept in the dtype of reductions, or add it."""
    statement = "self.unsharded_accumulated_grad += self.unsharded_param.grad"
    into = [] if is_lost else ["self.unsharded_accumulated_grad.add_(self.unsharded_param.grad)"]
    return edited(f"{_FULLY_SHARD}._fsdp_param:FSDPParam", "accumulate_unsharded_grad_if_needed", statement, into=into)


LAST_GRADIENT_NOT_ACCUMULATED = Defect(
    id="last-gradient-not-accumulated",
    title="with reductions in another dtype, the last micro-batch is missing where earlier ones were not reduced",
    source="https://github.com/pytorch/pytorch/pull/125191",
    mechanism="the gradient in the dtype of computation is not added to that in the dtype of reductions",
    laws=("API-3", "PAR-2"),
    cells="id in (dp2-bf16mp-default-meta-acc2-synclast, hsdp2x2-fp32-default-meta)",
    subjects=("param_dtype=bf16, reduce_dtype=fp32, gradient_sync=last",),
    inject=partial(accumulation, is_lost=True),
    inject_twin=partial(accumulation, is_lost=False),
)
