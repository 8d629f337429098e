"""Faults of torch's own clipping."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from conformance.defects.injection import Defect, replaced_call
from conformance.instruments.sharding import local

_CLIP_GRAD = "torch.nn.utils.clip_grad"


def torch_norm(*, is_local: bool) -> AbstractContextManager[None]:
    """Let torch.nn.utils.clip_grad_norm_ take the norm of this rank's shards, or of a copy of the list of gradients."""

    def get_total_norm(original: Callable[..., Tensor], tensors: Iterable[Tensor], *options: Any) -> Tensor:
        return original([local(tensor) for tensor in tensors] if is_local else list(tensors), *options)

    return replaced_call(_CLIP_GRAD, "_get_total_norm", get_total_norm)


TORCH_CLIP_NORM_LOCAL = Defect(
    id="torch-clip-norm-local",
    title="torch clips by the norm of the local shards",
    source="https://github.com/pytorch/pytorch/issues/170862",
    mechanism="the norms of the parameters are combined as if they were complete",
    laws=("CLIP-4",),
    cells="id = dp2-fp32-default-meta",
    inject=partial(torch_norm, is_local=True),
    inject_twin=partial(torch_norm, is_local=False),
)


def dtypes_scaled(*, first_alone: bool) -> AbstractContextManager[None]:
    """Scale the gradients of one dtype after the other, or those of the first dtype alone."""

    def clip(
        original: Callable[..., None], parameters: Iterable[nn.Parameter], *arguments: Any, **options: Any
    ) -> None:
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in parameters:
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
        for same_dtype in list(by_dtype.values())[: 1 if first_alone else None]:
            original(same_dtype, *arguments, **options)

    return replaced_call("reference_trainer.clip", "clip_grads_with_norm_", clip)


TORCH_CLIP_ONE_DTYPE = Defect(
    id="torch-clip-one-dtype",
    title="torch scales the gradients of one dtype alone",
    source="https://github.com/NVIDIA/Megatron-LM/pull/7279",
    mechanism="gradients are grouped by dtype, and the loop over the groups ends too early",
    laws=("CLIP-2",),
    cells="id = dp2-bf16mixed-default-meta",
    inject=partial(dtypes_scaled, first_alone=True),
    inject_twin=partial(dtypes_scaled, first_alone=False),
)


def norm_of_dtypes(*, fp32_alone: bool) -> AbstractContextManager[None]:
    """Let torch.nn.utils.clip_grad_norm_ take the norm of the fp32 gradients alone, or of all."""

    def get_total_norm(original: Callable[..., Tensor], tensors: Iterable[Tensor], *options: Any) -> Tensor:
        return original([t for t in tensors if t.dtype == torch.float32 or not fp32_alone], *options)

    return replaced_call(_CLIP_GRAD, "_get_total_norm", get_total_norm)


TORCH_NORM_OF_ONE_DTYPE = Defect(
    id="torch-norm-of-one-dtype",
    title="torch clips by the norm of the gradients of one dtype",
    source="https://github.com/NVIDIA/Megatron-LM/pull/7279",
    mechanism="gradients are grouped by dtype, and only the last group counts",
    laws=("CLIP-4",),
    cells="mesh = dp2 and precision = bf16-mixed and offload = cpu and clip = 1000.0 and saved_on = none",
    inject=partial(norm_of_dtypes, fp32_alone=True),
    inject_twin=partial(norm_of_dtypes, fp32_alone=False),
)


def torch_finite_check(*, of_infinity: bool) -> AbstractContextManager[None]:
    """Let torch.nn.utils.clip_grad_norm_ raise an error for a norm that is NaN, and for an infinite one or not."""

    def get_total_norm(
        original: Callable[..., Tensor],
        tensors: Iterable[Tensor],
        norm_type: float,
        error_if_nonfinite: bool,
        *options: Any,
    ) -> Tensor:
        norm = original(list(tensors), norm_type, False, *options)
        if error_if_nonfinite and (norm.isnan() or (of_infinity and norm.isinf())):
            raise RuntimeError(f"the norm {norm} is non-finite")
        return norm

    return replaced_call(_CLIP_GRAD, "_get_total_norm", get_total_norm)


TORCH_CLIP_TAKES_INFINITY = Defect(
    id="torch-clip-takes-infinity",
    title="torch raises no error for an infinite norm",
    source="https://github.com/pytorch/pytorch/issues/46849",
    mechanism="error_if_nonfinite looks for NaN alone",
    laws=("CLIP-6",),
    cells="id = dp2-fp32-default-meta",
    inject=partial(torch_finite_check, of_infinity=False),
    inject_twin=partial(torch_finite_check, of_infinity=True),
)


def torch_minimum(*, left_out: bool) -> AbstractContextManager[None]:
    """Let torch.nn.utils.clip_grad_value_ clamp elements below the limit one tensor after the other, or not at all."""

    def clamp_min(_original: object, tensors: Iterable[Tensor], minimum: float) -> None:
        for tensor in tensors if not left_out else ():
            tensor.clamp_(min=minimum)

    return replaced_call("torch", "_foreach_clamp_min_", clamp_min)


TORCH_CLIP_VALUES_FROM_ABOVE = Defect(
    id="torch-clip-values-from-above",
    title="torch clips values from above alone",
    source="https://docs.pytorch.org/docs/stable/generated/torch.nn.utils.clip_grad_value_.html",
    mechanism="the lower limit is not applied to the elements of sharded gradients",
    laws=("CLIP-7",),
    cells="id = dp2-fp32-default-meta",
    inject=partial(torch_minimum, left_out=True),
    inject_twin=partial(torch_minimum, left_out=False),
)


def single_gradient(*, is_left_alone: bool) -> AbstractContextManager[None]:
    """Do not clip the gradient of a single parameter, or clip it by itself and not in a list."""

    def clip(original: Callable[..., None], parameters: list[Tensor], *arguments: Any) -> None:
        if len(parameters) > 1:
            original(parameters, *arguments)
        elif not is_left_alone:
            original(parameters[0], *arguments)

    return replaced_call(_CLIP_GRAD, "_clip_grads_with_norm_", clip)


TORCH_CLIP_LEAVES_ONE_ALONE = Defect(
    id="torch-clip-leaves-one-alone",
    title="torch does not clip the gradient of a parameter that is given by itself",
    source="https://docs.pytorch.org/docs/stable/generated/torch.nn.utils.clip_grad_norm_.html",
    mechanism="a check for an empty list of gradients takes a list of one for empty",
    laws=("CLIP-4",),
    cells="id = dp2-fp32-default-meta",
    inject=partial(single_gradient, is_left_alone=True),
    inject_twin=partial(single_gradient, is_left_alone=False),
)
