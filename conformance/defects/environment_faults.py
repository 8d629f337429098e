"""Faults of what the suite stands on: collectives, the state of ranks, the machine, poisoned memory."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.profiler import record_function

from conformance.defects.injection import Defect, replaced
from conformance.instruments.capture import shard_indices
from conformance.instruments.sharding import local

_TAKEN_BYTES = 64 << 20


def sums_from(contribution: Callable[[Tensor], Tensor]) -> AbstractContextManager[None]:
    """Every all-reduce in half precision sums what is made of each rank's contribution."""

    def make(original: Any) -> Any:
        def all_reduce(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
            if tensor.dtype == torch.float16:
                tensor.copy_(contribution(tensor))
            return original(tensor, *arguments, **options)

        return all_reduce

    return replaced("torch.distributed", "all_reduce", make)


def nothing_from_last_rank(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if dist.get_rank() == dist.get_world_size() - 1 else tensor


@contextmanager
def default_dtype_of_last_rank(dtype: torch.dtype) -> Iterator[None]:
    """Set as soon as the ranks know each other, and put back at the end."""

    def make(original: Any) -> Any:
        def init_process_group(*arguments: Any, **options: Any) -> None:
            original(*arguments, **options)
            if dist.get_rank() == dist.get_world_size() - 1:
                torch.set_default_dtype(dtype)

        return init_process_group

    usual = torch.get_default_dtype()
    try:
        with replaced("torch.distributed", "init_process_group", make):
            yield
    finally:
        torch.set_default_dtype(usual)


def available_memory(of: Callable[[int], int]) -> AbstractContextManager[None]:
    """What is left of the machine's memory."""

    def make(original: Any) -> Any:
        def virtual_memory() -> Any:
            facts = original()
            return facts._replace(available=of(facts.available))

        return virtual_memory

    return replaced("psutil", "virtual_memory", make)


def draws(of_part: Callable[[Tensor], Tensor]) -> AbstractContextManager[None]:
    """`normal_` on a sharded tensor takes its numbers from what is drawn for this rank's part."""

    def make(original: Any) -> Any:
        def normal_(tensor: Tensor, *arguments: Any, **options: Any) -> Tensor:
            if not isinstance(tensor, DTensor):
                drawn: Tensor = original(tensor, *arguments, **options)
                return drawn
            with torch.no_grad():
                local(tensor).copy_(of_part(tensor))
            return tensor

        return normal_

    return replaced("torch.nn.init", "normal_", make)


def drawn_alike(tensor: Tensor) -> Tensor:
    """Every rank goes on from the same state of its generator."""
    return torch.empty_like(local(tensor)).normal_()


def part_of_whole(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    whole = torch.empty(tensor.shape).normal_().flatten()
    return whole[shard_indices(tensor).flatten()].view(local(tensor).shape)


def memory_handed_out(change: Callable[[Tensor], object]) -> AbstractContextManager[None]:
    """Something is done with the embedding whenever poison has been looked for in a tensor."""

    def make(original: Any) -> Any:
        def poison_(tensor: Tensor) -> None:
            original(tensor)
            change(local(tensor))

        return poison_

    return replaced("conformance.instruments.poison", "poison_", make)


def backend_buffers(*, copies: int) -> AbstractContextManager[None]:
    """The backend allocates so many copies of the output of each all-gather, beside the one that gloo needs."""

    def make(original: Any) -> Any:
        def all_gather(output: Tensor, *arguments: Any, **options: Any) -> Any:
            with record_function("c10d::_allgather_base_"):
                held = [torch.empty_like(output) for _ in range(copies)]
                work = original(output, *arguments, **options)
            del held
            return work

        return all_gather

    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    return replaced("torch.distributed", name, make)


DEFECTS = (
    Defect(
        id="collective-wrong-in-one-dtype",
        title="An all-reduce in half precision loses the contribution of a rank",
        source="https://github.com/pytorch/pytorch/issues/152300",
        mechanism="the backend's sum is wrong for one dtype",
        laws=("ENV-1",),
        inject=partial(sums_from, nothing_from_last_rank),
        inject_twin=partial(sums_from, torch.clone),
    ),
    Defect(
        id="rank-in-another-state",
        title="A rank has another default dtype than the others",
        source="https://github.com/pytorch/pytorch/issues/22260",
        mechanism="something that only one rank executes has changed global state",
        laws=("ENV-2",),
        inject=partial(default_dtype_of_last_rank, torch.float64),
        inject_twin=partial(default_dtype_of_last_rank, torch.float32),
    ),
    Defect(
        id="memory-taken",
        title="The memory of the machine is used by others",
        source="https://github.com/eric-mitchell/direct-preference-optimization/issues/11",
        mechanism="ranks would be killed in the middle of a run",
        laws=("ENV-3",),
        inject=partial(available_memory, lambda available: min(available, _TAKEN_BYTES)),
        inject_twin=partial(available_memory, lambda available: available - _TAKEN_BYTES),
    ),
    Defect(
        id="dtensor-draws-alike",
        title="torch.nn.init draws the same numbers for every shard",
        source="https://github.com/pytorch/pytorch/issues/168058",
        mechanism="no offsets into the random sequence: each rank draws its part from the same state",
        laws=("INIT-8",),
        inject=partial(draws, drawn_alike),
        inject_twin=partial(draws, part_of_whole),
    ),
    Defect(
        id="poison-overwritten",
        title="Memory of to_empty is cleared after it was poisoned",
        source="https://github.com/pytorch/pytorch/issues/122801",
        mechanism="a forgotten tensor holds zeros, which INIT-1 takes for values: its control must say so",
        laws=("INIT-5",),
        inject=partial(memory_handed_out, Tensor.zero_),
        inject_twin=partial(memory_handed_out, Tensor.clone),
    ),
    Defect(
        id="backend-copies-twice",
        title="The backend allocates more than one copy of what it gathers",
        source="https://github.com/xorbitsai/xoscar/pull/38",
        mechanism="a buffer of the backend's own, in memory that no model of the trainer accounts for",
        laws=("MEM-2",),
        inject=partial(backend_buffers, copies=2),
        inject_twin=partial(backend_buffers, copies=0),
    ),
)
