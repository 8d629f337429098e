"""Faults of torch's own clipping."""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from conformance.defects.injection import Defect, replaced
from conformance.instruments.sharding import local

_CLIP_GRAD = "torch.nn.utils.clip_grad"


def torch_norm(*, is_local: bool) -> AbstractContextManager[None]:
    """What torch.nn.utils.clip_grad_norm_ takes for the norm: of this rank's parts, or as it is."""

    def make(original: Any) -> Any:
        def get_total_norm(tensors: Iterable[Tensor], *options: Any) -> Tensor:
            parts = [local(tensor) for tensor in tensors] if is_local else list(tensors)
            return original(parts, *options)  # type: ignore[no-any-return]

        return get_total_norm

    return replaced(_CLIP_GRAD, "_get_total_norm", make)


def torch_check(*, of_infinity: bool) -> AbstractContextManager[None]:
    """What torch.nn.utils.clip_grad_norm_ raises an error for: a norm that is NaN, or one that is infinite as well."""

    def make(original: Any) -> Any:
        def get_total_norm(tensors: Iterable[Tensor], norm_type: float, error_if_nonfinite: bool, *options: Any) -> Any:
            norm = original(list(tensors), norm_type, False, *options)
            if error_if_nonfinite and (norm.isnan() or (of_infinity and norm.isinf())):
                raise RuntimeError(f"the norm {norm} is non-finite")
            return norm

        return get_total_norm

    return replaced(_CLIP_GRAD, "_get_total_norm", make)


def torch_minimum(*, left_out: bool) -> AbstractContextManager[None]:
    """What torch.nn.utils.clip_grad_value_ does to elements below the limit: nothing, or one tensor after the other."""

    def make(_original: Any) -> Any:
        def clamp_min(tensors: Iterable[Tensor], minimum: float) -> None:
            for tensor in tensors if not left_out else ():
                tensor.clamp_(min=minimum)

        return clamp_min

    return replaced("torch", "_foreach_clamp_min_", make)


def dtype_by_dtype(*, all_of_them: bool) -> AbstractContextManager[None]:
    """Scale the gradients of the first dtype, and then those of the others, or not."""

    def make(original: Any) -> Any:
        def clip(parameters: Iterable[nn.Parameter], *arguments: Any, **options: Any) -> None:
            by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
            for parameter in parameters:
                by_dtype.setdefault(parameter.dtype, []).append(parameter)
            for same_dtype in list(by_dtype.values())[: None if all_of_them else 1]:
                original(same_dtype, *arguments, **options)

        return clip

    return replaced("reference_trainer.clip", "clip_grads_with_norm_", make)


DEFECTS: tuple[Defect, ...] = (
    Defect(
        id="torch-clip-norm-local",
        title="torch clips by the norm of the local shards",
        source="https://github.com/pytorch/pytorch/issues/170862",
        mechanism="the norms of the parameters are combined as if they were complete",
        laws=("CLIP-4",),
        inject=partial(torch_norm, is_local=True),
        inject_twin=partial(torch_norm, is_local=False),
    ),
    Defect(
        id="torch-clip-one-dtype",
        title="torch scales the gradients of one dtype alone",
        source="https://github.com/NVIDIA/Megatron-LM/pull/7279",
        mechanism="gradients are grouped by dtype, and the loop over the groups ends too early",
        laws=("CLIP-2",),
        inject=partial(dtype_by_dtype, all_of_them=False),
        inject_twin=partial(dtype_by_dtype, all_of_them=True),
    ),
    Defect(
        id="torch-clip-takes-infinity",
        title="torch raises no error for an infinite norm",
        source="https://github.com/pytorch/pytorch/issues/46849",
        mechanism="error_if_nonfinite looks for NaN alone",
        laws=("CLIP-6",),
        inject=partial(torch_check, of_infinity=False),
        inject_twin=partial(torch_check, of_infinity=True),
    ),
    Defect(
        id="torch-clip-values-from-above",
        title="torch clips values from above alone",
        source="https://docs.pytorch.org/docs/stable/generated/torch.nn.utils.clip_grad_value_.html",
        mechanism="the lower limit is not applied to the elements of sharded gradients",
        laws=("CLIP-7",),
        inject=partial(torch_minimum, left_out=True),
        inject_twin=partial(torch_minimum, left_out=False),
    ),
)
