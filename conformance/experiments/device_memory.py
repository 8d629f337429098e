"""What a rank measures of the memory of its CUDA device. Not yet run: no machine with such a device was there."""

import os
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from conformance.defects.catalogue import injected
from conformance.experiments.context import start_process_group
from conformance.run.devices.hardware import DETERMINISM
from conformance.run.devices.nvml import foreign_processes, machine_devices
from conformance.run.ranks.messages import RankContext
from reference_trainer.config import TrainerConfig
from reference_trainer.mesh import destroy_process_group
from reference_trainer.observer import Observer, Phase
from reference_trainer.train import Trainer

_WIDTH = 4096
_PRODUCTS = 50
"""7 TFLOP in all, over a tenth of a second on the fastest devices: the host issues a whole pass of `deep` meanwhile."""


def step_on_device(context: RankContext, payload: dict[str, Any]) -> dict[str, int]:
    """Peaks of one step after a warm one, while the host runs ahead of the device: bytes above what was there before.

    `allocated` is in use; `active` is that and what was freed, but is held until a stream has caught up; `reserved` is
    what the caching allocator has taken from the device.
    """
    config = msgspec.convert(payload["config"], TrainerConfig)
    with injected(payload["defect"]):
        device = start_process_group(context)
        busy = _HostAhead(device)
        before = _bytes(device, "current")
        trainer = Trainer(config, device=device, world_size=context.world_size, observer=busy)
        trainer.train_step(0)
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        trainer.train_step(1)
        peaks = _bytes(device, "peak")
        destroy_process_group()
    return {kind: peak - before[kind] for kind, peak in peaks.items()}


def surroundings(context: RankContext, payload: dict[str, Any]) -> dict[str, Any]:
    """Who else is on this rank's device, what is pinned down, and what libraries take of its memory for themselves."""
    with injected(payload["defect"]):
        device = start_process_group(context)
        interface = machine_devices()
        before = _bytes(device, "current")
        torch.mm(torch.ones(128, 128, device=device), torch.ones(128, 128, device=device))
        workspace = _bytes(device, "current")["allocated"] - before["allocated"]
        torch.cuda.synchronize(device)
        used = interface.used_bytes(context.device)
        dist.all_reduce(torch.ones(1 << 20, device=device))
        torch.cuda.synchronize(device)
        found = {
            "foreign_processes": foreign_processes(interface, context.device),
            "pinned": _pinned(),
            "cublas_workspace_bytes": workspace,
            "nccl_buffer_bytes": interface.used_bytes(context.device) - used,
            "free_bytes": torch.cuda.mem_get_info(device)[0],
        }
        destroy_process_group()
    return found


def _pinned() -> dict[str, bool]:
    """Whether each of the knobs is where bounds and comparisons of bits need it."""
    matmul = torch.backends.cuda.matmul
    return {
        "TF32 off": not (matmul.allow_tf32 or torch.backends.cudnn.allow_tf32),
        "bf16 sums in fp32": not matmul.allow_bf16_reduced_precision_reduction,
        "fp16 sums in fp32": not matmul.allow_fp16_reduced_precision_reduction,
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        **{name: os.environ.get(name) == value for name, value in DETERMINISM.items()},
    }


class _HostAhead(Observer):
    """Gives the device work before forward and before backward, as large models do.

    A device that waits for the host has always caught up: nothing is held then, whatever is done wrong.
    """

    def __init__(self, device: torch.device) -> None:
        self._factor, self._product = (torch.zeros(_WIDTH, _WIDTH, device=device) for _ in range(2))

    def phase(self, name: Phase, *, step: int) -> None:
        for _ in range(_PRODUCTS if name in ("forward", "backward") else 0):
            torch.mm(self._factor, self._factor, out=self._product)


def _bytes(device: torch.device, when: str) -> dict[str, int]:
    statistics = torch.cuda.memory_stats(device)
    return {kind: statistics[f"{kind}_bytes.all.{when}"] for kind in ("allocated", "active", "reserved")}
