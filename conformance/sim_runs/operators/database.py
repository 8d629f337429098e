"""Torch's own database of operators: how each is called, with sample inputs for each dtype."""

import importlib
import random
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import torch

from reference_trainer.checks import UsageError

DATABASE = "torch.testing._internal.common_methods_invocations"
"""Module with the database. It is private, since torch has no public one."""
_LISTS = (
    "op_db",
    "foreach_unary_op_db",
    "foreach_binary_op_db",
    "foreach_pointwise_op_db",
    "foreach_reduce_op_db",
    "foreach_other_op_db",
)
_SEED = 0


@cache
def operators() -> dict[str, Any]:
    """Return torch's operator infos by name, with the variant such as `linalg.svd` or `sum_to_size`, sorted.

    Raises UsageError if this torch has no such database.
    """
    try:
        module = importlib.import_module(DATABASE)
        infos = [info for name in _LISTS for info in getattr(module, name)]
    except (ImportError, AttributeError) as missing:
        raise UsageError(f"torch {torch.__version__} has no operator database, {DATABASE}: {missing}") from None
    return dict(sorted((info.full_name, info) for info in infos))


def dtypes(names: Iterable[str]) -> list[torch.dtype]:
    """Return dtypes by name. Raises UsageError for a name that is no dtype."""
    found = [getattr(torch, name, None) for name in names]
    for name, dtype in zip(names, found, strict=True):
        if not isinstance(dtype, torch.dtype):
            raise UsageError(f"{name} is no dtype of torch: write float32,bfloat16 for example")
    return [dtype for dtype in found if isinstance(dtype, torch.dtype)]


def is_differentiable(info: Any, dtype: torch.dtype) -> bool:
    """Return whether the operator has a derivative for the dtype on the CPU."""
    return dtype in info.supported_backward_dtypes("cpu")


def samples(info: Any, dtype: torch.dtype) -> Sequence[Any]:
    """Return the sample inputs of an operator on the CPU, the same at each call."""
    seed()
    return list(info.sample_inputs("cpu", dtype, requires_grad=is_differentiable(info, dtype)))


def seed() -> None:
    """Seed all generators from which samples and operators draw."""
    import numpy as np

    torch.manual_seed(_SEED)
    random.seed(_SEED)
    np.random.seed(_SEED)
