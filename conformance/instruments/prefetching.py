"""What FSDP was told to gather ahead in backward. Looks into FSDP's private state: no public attribute tells.

A list of one group changes nothing else that could be seen: FSDP gathers that group ahead without being told.
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule


def backward_prefetch_of(model: nn.Module) -> dict[str, list[str]]:
    """Modules that each FSDP module was told to gather ahead, in their order; of a group of several its first module.

    Raises RuntimeError for a version of torch whose FSDP keeps this elsewhere.
    """
    names: dict[Any, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            names.setdefault(module._get_fsdp_state(), name)
    try:
        told = {name: [names[ahead] for ahead in state._states_to_backward_prefetch] for state, name in names.items()}
    except AttributeError as error:
        raise RuntimeError(
            f"torch {torch.__version__}: {error}; adapt {__name__}, which reads what FSDP was told to prefetch"
        ) from None
    return {name: ahead for name, ahead in told.items() if ahead}
