"""Memory of a step on a device against the bounds of MEM-10, each of them, also those that hold.

    python -m benchmarks.device_trial.memory cuda|sim|cpu MESH

MEM-10 stops at the first bound that does not hold; the first run on a device shows the excess over each.
"""

import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.device_trial.stages import tell
from conformance.assertions.memory_bounds import bounds_of_ranks, usage_of
from conformance.experiments.memory import step_on_ranks
from conformance.plan.cells import Cell
from conformance.plan.substrates import REAL
from conformance.run.case_runs import CaseRuns
from conformance.run.devices.hardware import find_hardware
from conformance.run.devices.leases import Leases
from conformance.run.devices.nvml import machine_devices
from conformance.run.pool import Pools
from conformance.run.store import RecordStore

LIMIT_S = 60.0


def main(accelerator: str, mesh: str) -> int:
    """Print measured bytes with their bounds by rank and phase; exit status 0, whether they hold or not."""
    cell = Cell(mesh=mesh, model="deep")
    hardware = find_hardware(machine_devices(), accelerator=accelerator, share_gpu="auto")
    slots = [device.uuid for device in hardware.devices]
    on_device = accelerator != "cpu"
    with tempfile.TemporaryDirectory() as directory, Pools(devices=Leases(slots) if slots else None) as pools:
        store = RecordStore(
            Path(directory), "trial", str(torch.__version__), None, LIMIT_S, pools=pools, hardware=hardware
        )
        measure = CaseRuns(store, REAL).measure
        bounds_by_rank = bounds_of_ranks(measure, cell, on_device=on_device, in_flight=not on_device)
        for rank, (memory, bounds) in enumerate(zip(measure(step_on_ranks, cell), bounds_by_rank, strict=True)):
            usage = usage_of(memory)
            for (phase, kind), bound in bounds.by_phase.items():
                used = usage[phase].peak_bytes if kind == "peak" else usage[phase].end_bytes
                value = bounds.state_bytes + used
                excess = max(value - bound.upper, bound.lower - value, 0)
                tell(
                    f"rank {rank}, {kind} of {phase}",
                    f"{value} bytes, bounds {bound.lower} to {bound.upper}, outside by {excess}",
                )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
