"""Faults of the environment: collectives, global state of ranks, host memory, DTensor's random numbers, poison."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.profiler import record_function

from conformance.defects.injection import Defect, replaced_call
from conformance.instruments.capture import shard_indices
from conformance.instruments.sharding import local

_TAKEN_BYTES = 64 << 20


def half_precision_sums(contribution: Callable[[Tensor], Tensor]) -> AbstractContextManager[None]:
    """Let every all-reduce in fp16 reduce `contribution(tensor)` in place of each rank's tensor."""

    def all_reduce(original: Callable[..., Any], tensor: Tensor, *arguments: Any, **options: Any) -> Any:
        if tensor.dtype == torch.float16:
            tensor.copy_(contribution(tensor))
        return original(tensor, *arguments, **options)

    return replaced_call("torch.distributed", "all_reduce", all_reduce)


def zeros_of_last_rank(tensor: Tensor) -> Tensor:
    """Return zeros on the last rank, and the tensor on all others."""
    return torch.zeros_like(tensor) if dist.get_rank() == dist.get_world_size() - 1 else tensor


COLLECTIVE_WRONG_IN_ONE_DTYPE = Defect(
    id="collective-wrong-in-one-dtype",
    title="an all-reduce in half precision loses the contribution of a rank",
    source="https://github.com/pytorch/pytorch/issues/152300",
    mechanism="the backend's sum is wrong for one dtype",
    laws=("ENV-1",),
    cells="id = dp2-fp32-default-meta",
    inject=partial(half_precision_sums, zeros_of_last_rank),
    inject_twin=partial(half_precision_sums, torch.clone),
)


@contextmanager
def default_dtype_of_last_rank(dtype: torch.dtype) -> Iterator[None]:
    """Set the default dtype of the last rank when the process group is initialised, and restore it at the end."""

    def init_process_group(original: Callable[..., None], *arguments: Any, **options: Any) -> None:
        original(*arguments, **options)
        if dist.get_rank() == dist.get_world_size() - 1:
            torch.set_default_dtype(dtype)

    usual = torch.get_default_dtype()
    try:
        with replaced_call("torch.distributed", "init_process_group", init_process_group):
            yield
    finally:
        torch.set_default_dtype(usual)


RANK_IN_ANOTHER_STATE = Defect(
    id="rank-in-another-state",
    title="one rank has another default dtype than the others",
    source="https://github.com/pytorch/pytorch/issues/22260",
    mechanism="code that only one rank executes has changed global state",
    laws=("ENV-2",),
    cells="id = dp2-fp32-default-meta",
    inject=partial(default_dtype_of_last_rank, torch.float64),
    inject_twin=partial(default_dtype_of_last_rank, torch.float32),
)


def available_memory(change: Callable[[int], int]) -> AbstractContextManager[None]:
    """Let psutil report `change(available_bytes)` as the available host memory."""

    def virtual_memory(original: Callable[[], Any]) -> Any:
        facts = original()
        return facts._replace(available=change(facts.available))

    return replaced_call("psutil", "virtual_memory", virtual_memory)


MEMORY_TAKEN = Defect(
    id="memory-taken",
    title="other processes use the memory of the machine",
    source="https://github.com/eric-mitchell/direct-preference-optimization/issues/11",
    mechanism="the operating system would kill ranks in the middle of a run",
    laws=("ENV-3",),
    cells="id = dp2-fp32-default-meta",
    inject=partial(available_memory, lambda available: min(available, _TAKEN_BYTES)),
    inject_twin=partial(available_memory, lambda available: available - _TAKEN_BYTES),
)


def dtensor_normal(sample_shard: Callable[[Tensor], Tensor]) -> AbstractContextManager[None]:
    """Let `torch.nn.init.normal_` fill this rank's shard of a DTensor with `sample_shard(tensor)`."""

    def normal_(original: Callable[..., Tensor], tensor: Tensor, *arguments: Any, **options: Any) -> Tensor:
        if not isinstance(tensor, DTensor):
            return original(tensor, *arguments, **options)
        with torch.no_grad():
            local(tensor).copy_(sample_shard(tensor))
        return tensor

    return replaced_call("torch.nn.init", "normal_", normal_)


def sampled_from_equal_states(tensor: Tensor) -> Tensor:
    """Sample a shard on every rank from the same generator state, without an offset."""
    return torch.empty_like(local(tensor)).normal_()


def sampled_in_full(tensor: Tensor) -> Tensor:
    """Sample the full tensor on every rank, and return this rank's shard of it."""
    assert isinstance(tensor, DTensor)
    full = torch.empty(tensor.shape).normal_().flatten()
    return full[shard_indices(tensor).flatten()].view(local(tensor).shape)


DTENSOR_SHARDS_ALIKE = Defect(
    id="dtensor-draws-alike",
    title="torch.nn.init samples the same numbers for every shard",
    source="https://github.com/pytorch/pytorch/issues/168058",
    mechanism="no offsets into the random sequence: each rank samples its shard from the same generator state",
    laws=("INIT-8",),
    cells="id = dp2-fp32-default-meta",
    inject=partial(dtensor_normal, sampled_from_equal_states),
    inject_twin=partial(dtensor_normal, sampled_in_full),
)


def poisoned_memory(change: Callable[[Tensor], object]) -> AbstractContextManager[None]:
    """Call `change` with the local tensor whenever a tensor has been poisoned."""

    def poison_(original: Callable[[Tensor], None], tensor: Tensor) -> None:
        original(tensor)
        change(local(tensor))

    return replaced_call("conformance.instruments.poison", "poison_", poison_)


POISON_OVERWRITTEN = Defect(
    id="poison-overwritten",
    title="memory of to_empty is cleared after it was poisoned",
    source="https://github.com/pytorch/pytorch/issues/122801",
    mechanism="a forgotten tensor holds zeros, which INIT-1 takes for initial values: its control must say so",
    laws=("INIT-5",),
    cells="id = dp2-fp32-default-meta",
    inject=partial(poisoned_memory, Tensor.zero_),
    inject_twin=partial(poisoned_memory, Tensor.clone),
)


def backend_buffers(*, copies: int) -> AbstractContextManager[None]:
    """Let the backend allocate further copies of each all-gather's output, in addition to the one that gloo needs."""

    def all_gather(original: Callable[..., Any], output: Tensor, *arguments: Any, **options: Any) -> Any:
        with record_function("c10d::_allgather_base_"):
            held = [torch.empty_like(output) for _ in range(copies)]
            work = original(output, *arguments, **options)
        del held
        return work

    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    return replaced_call("torch.distributed", name, all_gather)


BACKEND_COPIES_TWICE = Defect(
    id="backend-copies-twice",
    title="the backend allocates more than one copy of what it gathers",
    source="https://github.com/xorbitsai/xoscar/pull/38",
    mechanism="a buffer of the backend's own, in memory that no model of the trainer accounts for",
    laws=("MEM-2",),
    cells="id = dp4-fp32-table-meta-deep",
    inject=partial(backend_buffers, copies=2),
    inject_twin=partial(backend_buffers, copies=0),
)
