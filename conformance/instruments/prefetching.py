"""Groups that FSDP is configured to prefetch in backward, read from private state for lack of a public attribute.

A list of one group has no other visible effect: FSDP prefetches that group by default.
"""

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from conformance.instruments.fsdp_state import private_state


def backward_prefetch_of(model: nn.Module) -> dict[str, list[str]]:
    """Return the modules that each FSDP module is configured to prefetch, in order.

    The first of its modules stands for a group of several; modules without a list are left out. Raises RuntimeError for
    a version of torch whose FSDP keeps the lists elsewhere.
    """
    names: dict[Any, str] = {}
    with private_state(__name__, "what FSDP was told to prefetch"):
        for name, module in model.named_modules():
            if isinstance(module, FSDPModule):
                names.setdefault(module._get_fsdp_state(), name)
        prefetched = {name: [names[to] for to in state._states_to_backward_prefetch] for state, name in names.items()}
    return {name: modules for name, modules in prefetched.items() if modules}
