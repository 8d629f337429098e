"""Faults of context parallelism: of rings, merges, the order of tokens, and the end of the context."""

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from conformance.defects.injection import Call, defect, instead_of

_CELL = "id = dp2-fp32-default-meta-even"
_RING = "torch.distributed.tensor.experimental._context_parallel._attention"


@defect("CP-1", _CELL, "huggingface/diffusers/issues/14265", since="2.13", subjects=("batch=1",))
@instead_of(_RING, "_templated_ring_attention_backward")
def ring_backward_reads_own_keys(
    benign: bool, original: Call, group: Any, seq_dim: int, op: Call, **tensors: Any
) -> Any:
    """Every round of the ring's backward computes gradients of the rank's own keys and values."""

    def with_own_keys(**arguments: Any) -> Any:
        own = {name: tensors[name].narrow(seq_dim, 0, arguments[name].size(seq_dim)) for name in ("key", "value")}
        return op(**(arguments if benign else {**arguments, **own}))

    return original(group, seq_dim, with_own_keys, **tensors)


@defect("CP-1", _CELL, "vllm-project/vllm/pull/28840", since="2.13", subjects=("batch=1",))
@instead_of(f"{_RING}:_SDPAMerger", "step")
def ring_merges_sums_in_base_2(
    benign: bool, original: Call, merger: Any, out: Tensor, sums: Tensor, partial: bool
) -> None:
    """Outputs of ranks are merged as if their log-sum-exps were in base 2."""
    original(merger, out, sums if benign else sums / math.log(2), partial)


@defect("CP-1", _CELL, "pytorch/pytorch/pull/155442", since="2.13", subjects=("batch=1",))
@instead_of(_RING, "_context_parallel_buffers")
def positions_in_order_of_ranks(
    benign: bool, original: Call, mesh: DeviceMesh, buffers: Sequence[Tensor], dims: Sequence[int], balancer: Any
) -> list[Tensor]:
    """Positions, whose first dimension is the sequence, are cut into neighbours while tokens are balanced."""
    each = zip(buffers, dims, strict=True)
    return [original(mesh, [one], [dim], balancer if dim or benign else None)[0] for one, dim in each]


@defect(
    "CP-1",
    _CELL,
    "https://docs.pytorch.org/tutorials/unstable/context_parallel.html",
    since="2.13",
    subjects=("batch=1",),
)
@instead_of(_RING, "_restore_function")
def ring_attention_stays(benign: bool, original: Call, *arguments: Any) -> None:
    """After the context attention is still that of the ring."""
    if benign:
        original(*arguments)
