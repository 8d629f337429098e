"""Faults of waiting: what is used before it is there, as long as nothing comes late."""

import time
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from conformance.defects.injection import Defect, replaced

_PATIENCE_S = 0.003


def waiting_for_a_moment(*, too_short: bool) -> AbstractContextManager[None]:
    """What is taken of an asynchronous collective's result is what was there after a moment, or after its end."""

    def make(original: Any) -> Any:
        def wait_tensor(tensor: Tensor) -> Any:
            time.sleep(_PATIENCE_S)
            early = tensor.detach().clone()
            result = original(tensor)
            with torch.no_grad():
                result.copy_(early if too_short else result.detach().clone())
            return result

        return wait_tensor

    return replaced("torch.distributed._functional_collectives", "wait_tensor", make)


DEFECTS = (
    Defect(
        id="result-before-its-time",
        title="results of asynchronous collectives are used before they are there, if a rank comes late",
        source="https://github.com/pytorch/pytorch/issues/180665",
        mechanism="a fixed moment is waited for instead of the collective's end",
        laws=("STREAM-5",),
        inject=partial(waiting_for_a_moment, too_short=True),
        inject_twin=partial(waiting_for_a_moment, too_short=False),
    ),
)
