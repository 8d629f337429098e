"""Faults of waiting: results that are used before they are there, which only a delay shows."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from conformance.defects.injection import Defect, replaced_call

_WAIT_S = 0.003


def fixed_wait(*, too_short: bool) -> AbstractContextManager[None]:
    """Use what an asynchronous collective's result holds after a fixed time, or after the collective's end."""

    def wait_tensor(original: Callable[[Tensor], Any], tensor: Tensor) -> Any:
        time.sleep(_WAIT_S)
        early = tensor.detach().clone()
        result = original(tensor)
        with torch.no_grad():
            result.copy_(early if too_short else result.detach().clone())
        return result

    return replaced_call("torch.distributed._functional_collectives", "wait_tensor", wait_tensor)


RESULT_BEFORE_ITS_TIME = Defect(
    id="result-before-its-time",
    title="results of asynchronous collectives are used before they are there, if a rank is delayed",
    source="https://github.com/pytorch/pytorch/issues/180665",
    mechanism="the code waits for a fixed time instead of the collective's end",
    laws=("STREAM-5",),
    cells="id = tp2-fp32-default-meta",
    inject=partial(fixed_wait, too_short=True),
    inject_twin=partial(fixed_wait, too_short=False),
)
