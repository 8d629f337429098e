"""Faults of torch's optimizers on DTensors, where the reference trainer does not use them."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from conformance.defects.injection import Defect, replaced_call


def orthogonalised(*, own_shard: bool) -> AbstractContextManager[None]:
    """Let Muon orthogonalise each rank's own shard of a matrix, or the full matrix, which every rank gathers."""

    def zeropower(original: Callable[..., Tensor], update: Tensor, *options: Any) -> Tensor:
        if not isinstance(update, DTensor):
            return original(update, *options)
        mesh, layout = update.device_mesh, update.placements
        if own_shard:
            own = original(update.to_local(), *options)
            return DTensor.from_local(own, mesh, layout, shape=update.shape, stride=update.stride())
        gathered = original(update.full_tensor(), *options)
        return DTensor.from_local(gathered, mesh).redistribute(placements=layout)

    return replaced_call("torch.optim._muon", "_zeropower_via_newtonschulz", zeropower)


MUON_OF_OWN_SHARD = Defect(
    id="muon-of-own-shard",
    title="Muon orthogonalises each rank's shard instead of the matrix",
    source="https://github.com/deepspeedai/DeepSpeed/issues/8437",
    mechanism="Newton-Schulz iterations are given local tensors",
    laws=("OPT-3",),
    cells="id = dp2-tp2-fp32-default-meta-nosp",
    subjects=("Muon",),
    inject=partial(orthogonalised, own_shard=True),
    inject_twin=partial(orthogonalised, own_shard=False),
    since="2.9",
)


def listed_steps(*, skips_last: bool) -> AbstractContextManager[None]:
    """Leave the last of several DTensors out when NAdam steps with lists of tensors, or step with it alone."""

    def multi_tensor(original: Callable[..., None], parameters: list[Tensor], *lists: Any, **options: Any) -> None:
        if not isinstance(parameters[0], DTensor):
            original(parameters, *lists, **options)
            return
        original(parameters[:-1], *(each[:-1] for each in lists), **options)
        if not skips_last:
            original(parameters[-1:], *(each[-1:] for each in lists), **options)

    return replaced_call("torch.optim.nadam", "_multi_tensor_nadam", multi_tensor)


LIST_OF_DTENSORS_CUT = Defect(
    id="list-of-dtensors-cut",
    title="an optimizer that steps with lists leaves out the last sharded parameter",
    source="https://github.com/pytorch/pytorch/issues/183207",
    mechanism="lists are grouped by the kind of their tensors, and the last group is lost",
    laws=("OPT-3",),
    cells="id = dp2-tp2-fp32-default-meta-nosp",
    subjects=("NAdam, foreach, weight_decay",),
    inject=partial(listed_steps, skips_last=True),
    inject_twin=partial(listed_steps, skips_last=False),
)


def pending_gradients(*, own_number: bool) -> AbstractContextManager[None]:
    """Let Adagrad take each rank's own number for a gradient that is a pending sum, or add the sum up first."""

    def single_tensor(
        original: Callable[..., None], parameters: list[Tensor], grads: list[Tensor], *lists: Any, **options: Any
    ) -> None:
        original(parameters, [_as_parameter(*pair) for pair in zip(grads, parameters, strict=True)], *lists, **options)

    def _as_parameter(grad: Tensor, parameter: Tensor) -> Tensor:
        if not (isinstance(grad, DTensor) and isinstance(parameter, DTensor)):
            return grad
        mesh, layout = parameter.device_mesh, parameter.placements
        if not own_number:
            return grad.redistribute(placements=layout)
        return DTensor.from_local(grad.to_local(), mesh, layout, shape=grad.shape, stride=grad.stride())

    return replaced_call("torch.optim.adagrad", "_single_tensor_adagrad", single_tensor)


PENDING_GRADIENT_OF_OWN_RANK = Defect(
    id="pending-gradient-of-own-rank",
    title="gradients that are pending sums over tensor-parallel ranks are not added up before the step",
    source="https://github.com/pytorch/pytorch/issues/144054",
    mechanism="the optimizer steps with local tensors",
    laws=("OPT-3",),
    cells="id = dp2-tp2-fp32-default-meta-nosp",
    subjects=("Adagrad",),
    inject=partial(pending_gradients, own_number=True),
    inject_twin=partial(pending_gradients, own_number=False),
)
