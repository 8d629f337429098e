"""Activations of a subject's model: the memory that one process needs for a micro-batch, which no trainer decides.

Measured with the ledger, or the allocator, that measures parallel runs, so that both leave out the same.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from conformance.instruments import accelerators
from conformance.instruments.dispatch_tap import DispatchTap
from conformance.sim import device as simulated
from conformance.subjects import reference
from conformance.subjects.cells import Workload
from conformance.subjects.data import map_tensors, micro_batches, tensors, to_device
from conformance.subjects.facts import ActivationMemory
from conformance.subjects.memory_log import Memory, memory_of
from conformance.subjects.protocol import Batch, Subject
from conformance.subjects.turns import turns_of


def activation_memory(subject: Subject, workload: Workload, device: torch.device) -> list[ActivationMemory]:
    """Return the memory of micro-batches in fp32 by data-parallel rank, of each the most of all steps.

    The CPU computes for the simulated accelerator, whose operators return the same tensors.
    """
    device = torch.device("cpu") if device.type == simulated.NAME else device
    accelerators.allocate_workspaces(device)
    model = reference.initial_model(subject, tied=workload.tied)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_drop)  # type: ignore[no-untyped-call]
    for module in model.modules():
        module.register_forward_pre_hook(_each_apart, with_kwargs=True)
    memory, modules = memory_of(device), [turn.module for turn in turns_of(subject)]
    with memory.installed():
        return [
            _most(
                [
                    _measured(turn.subject, model, batch, memory, device, modules)
                    for turn in turns_of(subject)
                    for batch in _batches(subject, workload, rank)
                ]
            )
            for rank in range(workload.data_ranks)
        ]


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


def _measured(
    subject: Subject, model: nn.Module, batch: Batch, memory: Memory, device: torch.device, modules: Sequence[str]
) -> ActivationMemory:
    """Return the memory of a batch; outputs are those of the modules with these paths."""
    batch = to_device(batch, device)
    before = memory.held_bytes
    memory.reset_peak()
    outputs: list[int] = []
    trained = [model.get_submodule(path) for path in modules]
    hooks = [
        each.register_forward_hook(lambda _m, _inputs, result: outputs.append(_bytes_of(result))) for each in trained
    ]
    with DispatchTap([], outcomes=memory.listeners):
        loss = subject.loss(model, batch)
        forward, held = memory.peak_bytes - before, memory.held_bytes - before
        memory.reset_peak()
        torch.autograd.backward(loss)
    for hook in hooks:
        hook.remove()
    return ActivationMemory(forward, held, sum(outputs) + loss.nbytes, memory.peak_bytes - before)


def _most(measured: Sequence[ActivationMemory]) -> ActivationMemory:
    return ActivationMemory(
        max(each.forward_bytes for each in measured),
        max(each.held_bytes for each in measured),
        max(each.output_bytes for each in measured),
        max(each.backward_bytes for each in measured),
    )


def _bytes_of(outputs: object) -> int:
    return sum(tensor.nbytes for tensor in tensors(outputs))


def _drop(parameter: Tensor) -> None:
    parameter.grad = None
