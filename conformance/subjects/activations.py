"""Memory that one process needs for a micro-batch, and for a step of its optimizer, which no trainer decides.

Measured with the ledger, or the allocator, that measures parallel runs, so that both leave out the same.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any, Literal

import torch
from torch import Tensor, nn

from conformance.instruments import accelerators
from conformance.instruments.dispatch_tap import DispatchTap, OutcomeHandler
from conformance.instruments.saved_tensors import SavedTensors
from conformance.subjects import reference
from conformance.subjects.cells import Workload
from conformance.subjects.data import map_tensors, micro_batches, tensors, to_device
from conformance.subjects.facts import ActivationMemory
from conformance.subjects.memory_log import Memory, memory_of
from conformance.subjects.protocol import Batch, Subject
from conformance.subjects.turns import turns_of

Way = Literal["fp32", "cast", "autocast"]
"""Way to compute: in fp32, or in bf16, see `reference.InBf16`."""


def activation_memory(
    subject: Subject, workload: Workload, device: torch.device, *, way: Way
) -> list[ActivationMemory]:
    """Return the memory of micro-batches by data-parallel rank, of each the most of all steps.

    A model that refuses to be cast to bf16 has no activations to tell: an empty list. The device is that of the ranks,
    since an operator such as attention keeps other tensors on another one.
    """
    accelerators.allocate_workspaces(device)
    model = reference.initial_model(subject, tied=workload.tied).to(device)
    model = reference.parameters_in_bf16(model) if way == "cast" else model
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_drop)  # type: ignore[no-untyped-call]
    for module in model.modules():
        module.register_forward_pre_hook(_each_apart, with_kwargs=True)
    memory, modules = memory_of(device), [turn.module for turn in turns_of(subject)]
    with memory.installed(), suppress(*reference.REFUSALS) if way == "cast" else nullcontext():
        return [
            _most(
                [
                    _measured(turn.subject, model, batch, memory, device, modules, way)
                    for turn in turns_of(subject)
                    for batch in _batches(subject, workload, rank)
                ]
            )
            for rank in range(workload.data_ranks)
        ]
    return []


def _each_apart(_module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
    """Return inputs of which no tensor is another one: FSDP2 passes those of its modules through an autograd function.

    A module that looks whether two are one, as self-attention in `nn.MultiheadAttention`, needs more memory then.
    """
    seen: set[int] = set()

    def apart(tensor: Tensor) -> Tensor:
        repeated = id(tensor) in seen
        seen.add(id(tensor))
        return tensor.view_as(tensor) if repeated else tensor

    return map_tensors(apart, inputs), map_tensors(apart, named)


def _batches(subject: Subject, workload: Workload, data_rank: int) -> list[Batch]:
    steps = range(len(workload.accumulation))
    return [batch for step in steps for batch in micro_batches(subject, workload, step=step, data_rank=data_rank)]


class _Others:
    """Listener that finds the most bytes that were held at once, above those that autograd has saved for backward."""

    def __init__(self, memory: Memory, saved: SavedTensors) -> None:
        self._memory, self._saved = memory, saved
        self._before_bytes = memory.held_bytes
        self.peak_bytes = 0

    def listen_to_outcomes(self, _func: Any) -> OutcomeHandler:
        """Return the handler that looks at the memory; to be a listener of the outcomes of a `DispatchTap`."""
        return self._look

    def _look(self, _args: Sequence[Any], _kwargs: Mapping[str, Any], _result: Any) -> None:
        other_bytes = self._memory.held_bytes - self._before_bytes - self._saved.held_bytes
        self.peak_bytes = max(self.peak_bytes, other_bytes)


def _measured(
    subject: Subject,
    model: nn.Module,
    batch: Batch,
    memory: Memory,
    device: torch.device,
    modules: Sequence[str],
    way: Way,
) -> ActivationMemory:
    """Return the memory of a batch; outputs are those of the modules with these paths."""
    batch = to_device(batch, device)
    saved = SavedTensors()
    saved.leave_out([*model.parameters(), *model.buffers(), *tensors(batch)])
    before = memory.held_bytes
    memory.reset_peak()
    others = _Others(memory, saved)
    outputs: list[int] = []
    trained = [model.get_submodule(path) for path in modules]
    hooks = [
        each.register_forward_hook(lambda _m, _inputs, result: outputs.append(_bytes_of(result))) for each in trained
    ]
    with saved.installed(), DispatchTap([], outcomes=[*memory.listeners, others.listen_to_outcomes]):
        with torch.autocast(device.type, torch.bfloat16) if way == "autocast" else nullcontext():
            loss = subject.loss(model, batch)
        forward, held = memory.peak_bytes - before, memory.held_bytes - before
        saved_bytes, in_forward = saved.held_bytes, others.peak_bytes
        others.peak_bytes = 0
        memory.reset_peak()
        torch.autograd.backward(loss)
    for hook in hooks:
        hook.remove()
    return ActivationMemory(
        forward_bytes=forward,
        held_bytes=held,
        output_bytes=sum(outputs) + loss.nbytes,
        backward_bytes=memory.peak_bytes - before,
        saved_bytes=saved_bytes,
        others_in_forward_bytes=in_forward,
        others_in_backward_bytes=others.peak_bytes,
    )


def _most(measured: Sequence[ActivationMemory]) -> ActivationMemory:
    most = {name: max(getattr(each, name) for each in measured) for name in ActivationMemory.__struct_fields__}
    return ActivationMemory(**most)


def _bytes_of(outputs: object) -> int:
    return sum(tensor.nbytes for tensor in tensors(outputs))


def _drop(parameter: Tensor) -> None:
    parameter.grad = None


def optimizer_bytes(subject: Subject, workload: Workload, device: torch.device) -> int:
    """Return the most bytes that an optimizer needs in a step on full tensors, besides its state."""
    model = reference.initial_model(subject, tied=workload.tied).to(device)
    memory, most = memory_of(device), 0
    for turn in turns_of(subject):
        trained = [p for name, p in model.named_parameters() if p.requires_grad and turn.trains(name)]
        batch = to_device(micro_batches(subject, workload, step=0, data_rank=0)[0], device)
        torch.autograd.backward(turn.subject.loss(model, batch))
        optimizer = turn.subject.make_optimizer(trained)
        with memory.installed(), DispatchTap([], outcomes=memory.listeners):
            optimizer.step()  # which makes the state
            before = memory.held_bytes
            memory.reset_peak()
            optimizer.step()
            most = max(most, memory.peak_bytes - before)
        model.zero_grad()
    return most
