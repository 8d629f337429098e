"""Groups that FSDP was told to prefetch in backward, read from FSDP's private state: no public attribute tells.

A list of one group changes nothing else that could be seen: FSDP prefetches that group without being told.
"""

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from conformance.instruments.fsdp_state import private_state


def backward_prefetch_of(model: nn.Module) -> dict[str, list[str]]:
    """Return the modules that an FSDP module was told to prefetch, in order, by FSDP module.

    The first of its modules stands for a group of several; modules that were told nothing are left out. Raises
    RuntimeError for a version of torch whose FSDP keeps the lists elsewhere.
    """
    names: dict[Any, str] = {}
    with private_state(__name__, "what FSDP was told to prefetch"):
        for name, module in model.named_modules():
            if isinstance(module, FSDPModule):
                names.setdefault(module._get_fsdp_state(), name)
        prefetched = {name: [names[to] for to in state._states_to_backward_prefetch] for state, name in names.items()}
    return {name: modules for name, modules in prefetched.items() if modules}
