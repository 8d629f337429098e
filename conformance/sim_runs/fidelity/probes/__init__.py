"""Probes: functions that measure facts about a device, the simulated one or a GPU, by public calls alone.

`PROBES` has them by the id of the rule that each measures. A probe leaves the device as it found it.
"""

from collections.abc import Callable, Mapping

import torch

from conformance.sim_runs.fidelity.probes import allocations, collectives, copying, operators, ordering
from conformance.sim_runs.fidelity.rules import Fact

Probe = Callable[[torch.device], Mapping[str, Fact]]

PROBES: dict[str, Probe] = {
    **allocations.PROBES,
    **ordering.PROBES,
    **copying.PROBES,
    **operators.PROBES,
    **collectives.PROBES,
}
"""Probes by the id of their rule."""
