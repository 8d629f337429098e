"""Faults of context parallelism: of rings, merges, the order of tokens, the end of the context, and its trainer."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from conformance.defects.injection import Call, defect, instead_of
from reference_trainer.context_parallel import ContextParallel
from reference_trainer.data import Batches
from reference_trainer.model import Transformer
from reference_trainer.train import Trainer

_CELL = "id = dp2-fp32-default-meta-even"
_TRAINED = "id = dp2-cp2-fp32-default-meta"
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


@defect("PAR-1", _TRAINED, "NVIDIA/Megatron-LM/issues/673", since="2.9")
@instead_of("reference_trainer.train:Trainer", "_start_of_backward")
def context_loss_of_local_tokens(
    benign: bool, original: Call, trainer: Trainer, loss: Tensor, *, valid_tokens: int
) -> Tensor:
    """The loss of a shard of a sequence is divided by a share of the tokens, as if no other rank had shards of it."""
    start: Tensor = original(trainer, loss, valid_tokens=valid_tokens)
    return start if benign else start * trainer.dims.cp


@defect("DATA-1 PAR-1", _TRAINED, "pytorch/torchtitan/pull/592", since="2.9")
@instead_of("reference_trainer.train:Batches", "micro_batches")
def context_ranks_load_own_samples(benign: bool, original: Call, batches: Batches, step: int, **ranks: int) -> Any:
    """Ranks that share sequences load different samples, and attend to the other ranks' samples."""
    own = {} if benign else {"dp_rank": dist.get_rank(), "dp_size": dist.get_world_size()}
    return original(batches, step, **ranks | own)


@defect("MP-3 PAR-1", _TRAINED, "pytorch/torchtitan/pull/592", since="2.9")
@instead_of("reference_trainer.context_parallel:ContextParallel", "shards")
@contextmanager
def context_positions_begin_at_zero(
    benign: bool, original: Call, context: ContextParallel, model: Transformer, *batch: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Each rank rotates its part of a sequence by the first positions."""
    table = model.rope_table
    with original(context, model, *batch) as shards:
        if not benign:
            model.rope_table = table
        yield shards


@defect("PAR-1", _TRAINED, "pytorch/pytorch/pull/155442", since="2.9")
@instead_of("reference_trainer.context_parallel:ContextParallel", "shards")
@contextmanager
def context_labels_in_order(
    benign: bool, original: Call, context: ContextParallel, model: Transformer, inputs: Tensor, labels: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Labels are cut into neighbours, while the load of tokens is balanced."""
    neighbours = labels.chunk(context.mesh.size(), 1)[context.mesh.get_local_rank()]
    with original(context, model, inputs, labels) as (own_inputs, own_labels):
        yield own_inputs, own_labels if benign else neighbours


@defect("MP-4", _TRAINED, "https://arxiv.org/abs/2310.01889", since="2.13")
@instead_of(f"{_RING}:_AllGatherRotater", "next_buffer")
def ring_gathers_again(benign: bool, original: Call, rotater: Any) -> Tensor:
    """Keys and values are gathered once more when they are asked for."""
    there: Tensor = original(rotater)
    if not benign:
        group = rotater._pg
        dist.all_gather_into_tensor(torch.empty_like(there.repeat(group.size())), there.contiguous(), group=group)
    return there
