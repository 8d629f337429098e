"""Two ranks, of which one is behind: `python -m conformance.sim_runs.fidelity.probes.pair DEVICE MEETING RANK`.

Both are on the first device. Each prints its facts as JSON.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from conformance.run.devices.hardware import find_hardware
from conformance.run.devices.nvml import machine_devices
from conformance.run.ranks.messages import RANK_IN_VALUE
from conformance.sim.device import BACKENDS
from conformance.sim.enabling import enable
from conformance.sim_runs.fidelity.probes.device_work import current_stream, new_stream, on
from conformance.sim_runs.fidelity.rules import Fact

_RANKS = 2
_LIMIT_S = 60.0
_BEHIND_S = 1.0
"""Time by which the second rank is behind in each collective."""


def facts_of_two_ranks(device: torch.device) -> Mapping[str, Fact]:
    """Start two ranks and return the facts of the first. Raises RuntimeError with the output of a rank that fails."""
    variables = _environment(device.type)
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", __name__, device.type, f"{directory}/meeting"]
        ranks = started(command, variables, size=_RANKS)
        try:
            outputs = [rank.communicate(timeout=_LIMIT_S)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    for rank, output in zip(ranks, outputs, strict=True):
        if rank.returncode:
            raise RuntimeError(f"a rank ended with status {rank.returncode}: {output.strip()[-500:]}")
    facts: Mapping[str, Fact] = json.loads(outputs[0].splitlines()[-1])
    return facts


def started(command: Sequence[str], variables: Mapping[str, str], *, size: int) -> list["subprocess.Popen[str]"]:
    """Start a process of each rank, whose number follows the command and replaces `RANK_IN_VALUE` in variables."""
    return [
        subprocess.Popen(
            [*command, str(rank)],
            env={name: value.replace(RANK_IN_VALUE, str(rank)) for name, value in variables.items()},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]


def _environment(device_type: str) -> dict[str, str]:
    if device_type != "cuda":
        return dict(os.environ)
    hardware = find_hardware(machine_devices(), accelerator="cuda", share_gpu=str(_RANKS))
    return {**os.environ, **hardware.environment("nccl-shared")}


def _measure(device: torch.device, rank: int) -> Mapping[str, Fact]:
    x, side, default = torch.ones(1024, device=device), new_stream(device), current_stream(device)
    dist.all_reduce(x)
    default.synchronize()

    def reduce_on_side(*, async_op: bool) -> dist.Work | None:
        """Issue a collective on another stream, in which the first rank then waits for the second."""
        time.sleep(_BEHIND_S * rank)
        with on(side):
            work: dist.Work | None = dist.all_reduce(x, async_op=async_op)
        return work

    reduce_on_side(async_op=False)
    with on(default):
        torch.zeros((), device=device)
    default.synchronize()
    facts: dict[str, Fact] = {"a synchronous one holds up its caller's stream": not side.query()}
    side.synchronize()
    work = reduce_on_side(async_op=True)
    assert work is not None
    with on(side):
        torch.zeros((), device=device)
    side.synchronize()
    facts["an asynchronous one holds up its caller's stream"] = rank == 0 and work.is_completed()
    with on(side):
        work.wait()
    facts["a wait for it does"] = not side.query()
    torch.accelerator.synchronize(device)
    return facts


def _main(device_type: str, meeting: str, rank: int) -> None:
    if device_type == "sim":
        enable("lazy", 1)
    device = torch.device(device_type, 0)
    torch.accelerator.set_device_index(0)
    dist.init_process_group(
        "nccl" if device_type == "cuda" else BACKENDS,
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=_RANKS,
        timeout=timedelta(seconds=_LIMIT_S),
    )
    facts = _measure(device, rank)
    dist.destroy_process_group()
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
