"""Forks of the rank server: can they use the device, before and after the compiler is imported?

python -m benchmarks.device_trial.forks cuda|cpu
"""

import sys
import time
from typing import Any

import torch

from benchmarks.device_trial.stages import tell
from conformance.run.devices.leases import Leases
from conformance.run.devices.nvml import machine_devices, visible_devices
from conformance.run.failures import PoolError
from conformance.run.pool import Pools, RunFailed, Task
from conformance.run.ranks.messages import RankContext

LIMIT_S = 30.0


def product(context: RankContext, _payload: dict[str, Any]) -> float:
    """Compute a product on the rank's device; returns the seconds that took, with the context of the device."""
    start_s = time.monotonic()
    device = torch.device("cuda", 0) if context.device else torch.device("cpu")
    torch.mm(torch.ones(64, 64, device=device), torch.ones(64, 64, device=device)).sum().item()
    return time.monotonic() - start_s


def main(device: str) -> int:
    """Print whether ranks compute; exit status 1 if one cannot, and then no rank of the suite can."""
    slots = [each.uuid for each in visible_devices(machine_devices())] if device == "cuda" else []
    with Pools(devices=Leases(slots) if slots else None) as pools:
        for name, compiles in (
            ("plain rank", False),
            ("rank after the compiler", True),
            ("plain rank after it", False),
        ):
            task = Task(f"{__spec__.name}:product", {}, kind=name, accelerated=bool(slots), compiles=compiles)
            try:
                (seconds,) = pools.run(task, world_size=1, deadline_s=LIMIT_S)
            except (RunFailed, PoolError) as failed:
                tell(name, f"FAILED: {failed}".splitlines()[0])
                return 1
            tell(name, f"first product after {seconds:.1f} s")
            pools.release()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
