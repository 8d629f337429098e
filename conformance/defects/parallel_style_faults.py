"""Faults of tensor-parallel styles and of `loss_parallel`, where the reference trainer does not use them."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch import Tensor

from conformance.defects.injection import Defect, replaced_call

_PARALLEL = "torch.distributed.tensor.parallel"
_DOCUMENTATION = "https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html"


def prepared_inputs(*, are_redistributed: bool) -> AbstractContextManager[None]:
    """Convert inputs to the layout that they have, or to the desired one and once more."""

    def prepare(original: Callable[..., Any], style: Any, value: Any, mesh: Any, layout: Any, desired: Any) -> Any:
        if not are_redistributed:
            return original(style, value, mesh, layout, layout)
        result = original(style, value, mesh, layout, desired)
        return original(style, result, mesh, desired, desired)

    return replaced_call(f"{_PARALLEL}.style:PrepareModuleInput", "_prepare_input_arg", prepare)


PREPARED_INPUT_KEEPS_LAYOUT = Defect(
    id="prepared-input-keeps-layout",
    title="inputs of a module are not given the layout that PrepareModuleInput is to ensure",
    source=_DOCUMENTATION,
    mechanism="desired_input_layouts is ignored",
    laws=("TP-1",),
    cells="id = tp2-fp32-default-meta",
    subjects=("PrepareModuleInput",),
    inject=partial(prepared_inputs, are_redistributed=False),
    inject_twin=partial(prepared_inputs, are_redistributed=True),
)


def class_weights(*, of_first_rank: bool) -> AbstractContextManager[None]:
    """Weigh the classes of each rank with the weights of the first classes, or with copies of their own."""

    def nll_loss(
        original: Callable[..., Any], x: Tensor, target: Tensor, weight: Tensor, own: Tensor, *rest: Any
    ) -> Any:
        if weight is not None:
            own = weight[: own.size(0)] if of_first_rank else own.clone()
        return original(x, target, weight, own, *rest)

    return replaced_call(f"{_PARALLEL}.loss", "_nll_loss_forward", nll_loss)


CLASS_WEIGHTS_OF_FIRST_RANK = Defect(
    id="class-weights-of-first-rank",
    title="under loss_parallel every rank weighs its classes as the first rank does",
    source=_DOCUMENTATION,
    mechanism="weights are cut from the first class on, whatever classes the rank has",
    laws=("TP-1",),
    cells="id = tp2-fp32-default-meta",
    subjects=("loss_parallel, mean, weighted",),
    inject=partial(class_weights, of_first_rank=True),
    inject_twin=partial(class_weights, of_first_rank=False),
)


def sequence_dimension(*, is_ignored: bool) -> AbstractContextManager[None]:
    """Take the second dimension for the sequence, or the one that the user names."""

    def initialise(original: Callable[..., None], style: Any, *, sequence_dim: int = 1, **options: Any) -> None:
        original(style, sequence_dim=1 if is_ignored else sequence_dim, **options)

    return replaced_call(f"{_PARALLEL}.style:SequenceParallel", "__init__", initialise)


SEQUENCE_DIMENSION_IGNORED = Defect(
    id="sequence-dimension-ignored",
    title="SequenceParallel shards the second dimension, whichever is the sequence",
    source="https://github.com/pytorch/pytorch/issues/129355",
    mechanism="sequence_dim does not reach the layout",
    laws=("TP-1", "TP-2"),
    cells="id in (tp2-fp32-default-meta, tp2-bf16mp-default-meta)",
    subjects=("SequenceParallel of LayerNorm",),
    inject=partial(sequence_dimension, is_ignored=True),
    inject_twin=partial(sequence_dimension, is_ignored=False),
)
