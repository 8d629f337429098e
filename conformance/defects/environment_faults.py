"""Faults of the environment: collectives, global state of ranks, host memory, DTensor's random numbers, poison."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.profiler import record_function

from conformance.defects.injection import Call, Injection, defect, instead_of, replaced_call
from conformance.instruments.capture import shard_indices
from conformance.instruments.sharding import local

_FOREIGN_BYTES = 64 << 20


@defect("ENV-1", "id = dp2-fp32-default-meta", "pytorch/pytorch/issues/152300")
@instead_of("torch.distributed", "all_reduce")
def collective_wrong_in_one_dtype(benign: bool, original: Call, tensor: Tensor, *arguments: Any, **options: Any) -> Any:
    """An all-reduce in half precision loses the contribution of the last rank."""
    if tensor.dtype == torch.float16:
        is_lost = not benign and dist.get_rank() == dist.get_world_size() - 1
        tensor.copy_(torch.zeros_like(tensor) if is_lost else tensor.clone())
    return original(tensor, *arguments, **options)


@defect("ENV-2", "id = dp2-fp32-default-meta", "pytorch/pytorch/issues/22260")
@contextmanager
def rank_default_dtype_differs(benign: bool) -> Iterator[None]:
    """Code that only one rank executes has changed its default dtype."""

    def init_process_group(original: Call, *arguments: Any, **options: Any) -> None:
        original(*arguments, **options)
        if dist.get_rank() == dist.get_world_size() - 1:
            torch.set_default_dtype(torch.float32 if benign else torch.float64)

    default = torch.get_default_dtype()
    try:
        with replaced_call("torch.distributed", "init_process_group", init_process_group):
            yield
    finally:
        torch.set_default_dtype(default)


@defect("ENV-3", "id = dp2-fp32-default-meta", "eric-mitchell/direct-preference-optimization/issues/11")
@instead_of("psutil", "virtual_memory")
def foreign_memory_use(benign: bool, original: Call) -> Any:
    """Other processes use the host memory, so that the operating system would kill ranks during a run."""
    facts = original()
    left_bytes = facts.available - _FOREIGN_BYTES if benign else min(facts.available, _FOREIGN_BYTES)
    return facts._replace(available=left_bytes)


@defect("INIT-8", "id = dp2-fp32-default-meta", "pytorch/pytorch/issues/168058")
@instead_of("torch.nn.init", "normal_")
def dtensor_draws_alike(benign: bool, original: Call, tensor: Tensor, *arguments: Any, **options: Any) -> Any:
    """torch.nn.init samples every shard from the same generator state, without offsets."""
    if not isinstance(tensor, DTensor):
        return original(tensor, *arguments, **options)
    shard = local(tensor)
    with torch.no_grad():
        if benign:
            full = torch.empty(tensor.shape).normal_().flatten()
            shard.copy_(full[shard_indices(tensor).flatten()].view(shard.shape))
        else:
            shard.copy_(torch.empty_like(shard).normal_())
    return tensor


@defect("INIT-5", "id = dp2-fp32-default-meta", "pytorch/pytorch/issues/122801")
@instead_of("conformance.instruments.poison", "poison_")
def poison_overwritten(benign: bool, original: Call, tensor: Tensor) -> None:
    """Poisoned memory is cleared: INIT-1 would take the zeros of a forgotten tensor for initial values."""
    original(tensor)
    if not benign:
        local(tensor).zero_()


@defect("MEM-2", "id = dp4-fp32-table-meta-deep", "xorbitsai/xoscar/pull/38")
def backend_copies_twice(benign: bool) -> Injection:
    """The backend copies gathered tensors into an additional buffer, which no memory model accounts for."""

    def all_gather(original: Call, output: Tensor, *arguments: Any, **options: Any) -> Any:
        with record_function("c10d::_allgather_base_"):
            held = [torch.empty_like(output) for _ in range(0 if benign else 2)]
            work = original(output, *arguments, **options)
        del held
        return work

    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    return replaced_call("torch.distributed", name, all_gather)
