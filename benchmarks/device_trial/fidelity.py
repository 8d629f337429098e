"""Rules of the simulated device's model, measured on the device.

    python -m benchmarks.device_trial.fidelity cuda|sim FILE

The facts are left in FILE, for docs/gpu/fidelity.json.
"""

import sys
from pathlib import Path

import torch

from benchmarks.device_trial.stages import tell
from conformance.sim.enabling import enable


def main(device_type: str, file: Path) -> int:
    """Print how many rules hold, and the facts of those that do not; exit status 1 if there are any."""
    if device_type == "sim":
        enable("lazy", 2)
    from conformance.sim_runs.fidelity.measuring import as_json, measure
    from conformance.sim_runs.fidelity.report import disagreements, screen_lines

    measured = measure(torch.device(device_type, 0))
    file.write_text(as_json(measured))
    for name, value in screen_lines(measured).items():
        tell(name, value)
    return int(bool(disagreements(measured)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
