"""Faults that compute the right numbers, and send more than they need."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Placement, Replicate
from torch.distributed.tensor.parallel import PrepareModuleInput

from conformance.defects.injection import Defect, replaced

_ALL_GATHER = "torch.distributed.fsdp._fully_shard._fsdp_collectives:DefaultAllGather"


def all_gather(*, dtype: torch.dtype | None = None, times: int = 1) -> AbstractContextManager[None]:
    """All-gather parameters into a buffer of its own, in a dtype (none: their own) and so many times."""

    def make(original: Any) -> Any:
        def call(
            self: Any, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
        ) -> dist.Work | None:
            buffer = torch.empty_like(output_tensor, dtype=dtype)
            for _ in range(times):
                work: dist.Work | None = original(self, buffer, input_tensor.to(buffer.dtype), group, async_op)
            output_tensor.copy_(buffer)
            return work

        return call

    return replaced(_ALL_GATHER, "__call__", make)


class _GatherByHand(PrepareModuleInput):
    """Takes a module's first input through several placements, one after the other."""

    def __init__(self, layouts: tuple[Placement | None, ...], placements: Sequence[Placement]) -> None:
        super().__init__(input_layouts=layouts, desired_input_layouts=layouts)
        self._placements = placements

    def _prepare_input_fn(self, inputs: Any, device_mesh: Any) -> Any:
        x, *others = super()._prepare_input_fn(inputs, device_mesh)  # type: ignore[no-untyped-call]
        for placement in self._placements:
            x = x.redistribute(placements=[placement])
        return (x, *others)


def module_inputs(*, times: int) -> AbstractContextManager[None]:
    """Gather inputs of tensor-parallel regions so many times, giving up in between what was gathered."""

    def make(_original: Any) -> Any:
        def gather_input(layout: Placement, *, number_of_inputs: int) -> PrepareModuleInput:
            layouts = (layout, *(None for _ in range(number_of_inputs - 1)))
            return _GatherByHand(layouts, [Replicate(), *([layout, Replicate()] * (times - 1))])

        return gather_input

    return replaced("reference_trainer.parallelize", "_gather_input", make)


DEFECTS = (
    Defect(
        id="gather-before-cast",
        title="parameters are all-gathered in fp32 and cast to bf16 afterwards",
        source="https://github.com/pytorch/torchtitan/issues/3123",
        mechanism="the all-gather communicates twice the bytes; every number is right",
        laws=("MP-4", "MP-1"),
        inject=partial(all_gather, dtype=torch.float32),
        inject_twin=all_gather,
    ),
    Defect(
        id="gather-twice",
        title="each group is all-gathered twice",
        source="https://github.com/NVIDIA-NeMo/Automodel/issues/3373",
        mechanism="what a prefetch has gathered is gathered again when it is needed",
        laws=("MP-4", "RS-1"),
        inject=partial(all_gather, times=2),
        inject_twin=all_gather,
    ),
    Defect(
        id="tp-gather-repeated",
        title="inputs of tensor-parallel regions are gathered twice",
        source="https://github.com/pytorch/torchtitan/issues/1867",
        mechanism="a needless redistribution to the sequence-parallel layout has to be undone by another all-gather",
        laws=("MP-4",),
        inject=partial(module_inputs, times=2),
        inject_twin=partial(module_inputs, times=1),
    ),
)
