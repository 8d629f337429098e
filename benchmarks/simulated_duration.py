"""Time of a training step on the simulated device against the CPU: `python -m benchmarks.simulated_duration`.

Two ranks train the same FSDP2 model, on the CPU with gloo and on the simulated device under two schedules. The median
duration of a step is that of the first rank, after steps that are not counted.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import nn
from torch.distributed.fsdp import fully_shard

from conformance.sim.device import BACKENDS
from conformance.sim.enabling import enable
from conformance.sim_runs.running import command_of

DEVICES = ("cpu", "sim:eager", "sim:lazy")
RANKS = 2
_WARM_UP_STEPS = 3
_RESULT = "median step s: "


def step_duration_s(device: str, options: argparse.Namespace) -> float:
    """Start the ranks and return the median duration of a step on a device, such as `sim:lazy`."""
    sizes = ["--steps", str(options.steps), "--width", str(options.width), "--blocks", str(options.blocks)]
    command = command_of(["-m", "benchmarks.simulated_duration", "--rank-on", device, *sizes], world_size=RANKS)
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True)
    done.check_returncode()
    (result,) = (line for line in done.stdout.splitlines() if line.startswith(_RESULT))
    return float(result.removeprefix(_RESULT))


def train(device: str, options: argparse.Namespace) -> None:
    """Train as one rank; the first prints the median duration of a step."""
    device_type, _, schedule = device.partition(":")
    if device_type == "sim":
        enable(schedule, RANKS)
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(BACKENDS if device_type == "sim" else "gloo")
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(options.width, options.width), nn.ReLU()) for _ in range(options.blocks))
    )
    model.to(device_type)
    mesh = dist.device_mesh.init_device_mesh(device_type, (RANKS,))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(64, options.width).to(device_type)
    durations_s = []
    for _ in range(_WARM_UP_STEPS + options.steps):
        start_s = time.monotonic()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        durations_s.append(time.monotonic() - start_s)
    if dist.get_rank() == 0:
        print(f"{_RESULT}{statistics.median(durations_s[_WARM_UP_STEPS:])}", flush=True)
    dist.destroy_process_group()


def main() -> None:
    """Measure each device, and print durations and ratios to the CPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="steps that are counted (default: %(default)s)")
    parser.add_argument("--width", type=int, default=256, help="width of a block (default: %(default)s)")
    parser.add_argument("--blocks", type=int, default=6, help="blocks of the model (default: %(default)s)")
    parser.add_argument("--rank-on", choices=DEVICES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_on:
        train(options.rank_on, options)
        return
    durations_s = {device: step_duration_s(device, options) for device in DEVICES}
    rows = [
        [device, f"{duration_s * 1e3:.1f}", f"{duration_s / durations_s['cpu']:.1f}"]
        for device, duration_s in durations_s.items()
    ]
    print(f"{sys.argv[0]}: torch {torch.__version__}, {options.blocks} blocks of {options.width}, {RANKS} ranks")
    print(tabulate(rows, headers=["device", "ms per step", "times the CPU"], disable_numparse=True))


if __name__ == "__main__":
    main()
