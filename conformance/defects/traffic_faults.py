"""Faults that compute the right numbers and communicate more bytes than necessary."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Placement, Replicate
from torch.distributed.tensor.parallel import PrepareModuleInput

from conformance.defects.injection import Defect, replaced_call

_ALL_GATHER = "torch.distributed.fsdp._fully_shard._fsdp_collectives:DefaultAllGather"


def all_gather(*, dtype: torch.dtype | None = None, times: int = 1) -> AbstractContextManager[None]:
    """All-gather parameters `times` times into a buffer of a given dtype (None: their own), and copy it."""

    def call(
        original: Callable[..., dist.Work | None],
        self: Any,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        buffer = torch.empty_like(output_tensor, dtype=dtype)
        for _ in range(times):
            work = original(self, buffer, input_tensor.to(buffer.dtype), group, async_op)
        output_tensor.copy_(buffer)
        return work

    return replaced_call(_ALL_GATHER, "__call__", call)


GATHER_BEFORE_CAST = Defect(
    id="gather-before-cast",
    title="parameters are all-gathered in fp32 and cast to bf16 afterwards",
    source="https://github.com/pytorch/torchtitan/issues/3123",
    mechanism="the all-gather communicates twice the bytes; every number is right",
    laws=("MP-4", "MP-1"),
    cells="id = dp2-bf16mp-default-meta",
    inject=partial(all_gather, dtype=torch.float32),
    inject_twin=all_gather,
)
GATHER_TWICE = Defect(
    id="gather-twice",
    title="each group is all-gathered twice",
    source="https://github.com/NVIDIA-NeMo/Automodel/issues/3373",
    mechanism="parameters that were prefetched are gathered again when they are needed",
    laws=("MP-4", "RS-1"),
    cells="id = dp2-fp32-default-meta-acc2",
    inject=partial(all_gather, times=2),
    inject_twin=all_gather,
)


class _RedistributedInput(PrepareModuleInput):
    """Redistributes a module's first input to several placements, one after the other."""

    def __init__(self, layouts: tuple[Placement | None, ...], placements: Sequence[Placement]) -> None:
        super().__init__(input_layouts=layouts, desired_input_layouts=layouts)
        self._placements = placements

    def _prepare_input_fn(self, inputs: Any, device_mesh: Any) -> Any:
        x, *others = super()._prepare_input_fn(inputs, device_mesh)  # type: ignore[no-untyped-call]
        for placement in self._placements:
            x = x.redistribute(placements=[placement])
        return (x, *others)


def module_inputs(*, times: int) -> AbstractContextManager[None]:
    """Gather inputs of tensor-parallel regions `times` times, sharding them again in between."""

    def gather_input(_original: object, layout: Placement, *, number_of_inputs: int) -> PrepareModuleInput:
        layouts = (layout, *(None for _ in range(number_of_inputs - 1)))
        return _RedistributedInput(layouts, [Replicate(), *([layout, Replicate()] * (times - 1))])

    return replaced_call("reference_trainer.parallelize", "_gather_input", gather_input)


TP_GATHER_REPEATED = Defect(
    id="tp-gather-repeated",
    title="inputs of tensor-parallel regions are gathered twice",
    source="https://github.com/pytorch/torchtitan/issues/1867",
    mechanism="a needless redistribution to the sequence-parallel layout has to be undone by another all-gather",
    laws=("MP-4",),
    cells="id = tp2-fp32-default-meta",
    inject=partial(module_inputs, times=2),
    inject_twin=partial(module_inputs, times=1),
)
