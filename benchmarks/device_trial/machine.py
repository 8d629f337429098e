"""Facts of the machine: device, driver, torch and its libraries, processors, memory, and the names of processes.

python -m benchmarks.device_trial.machine cuda|cpu
"""

import importlib.metadata
import os
import platform
import shutil
import sys
from contextlib import suppress

import torch

from benchmarks.device_trial.stages import tell
from conformance.run.devices.hardware import nccl_version
from conformance.run.devices.nvml import machine_devices, sees_process, visible_devices

_PACKAGES = ("pytest", "pytest-xdist", "msgspec", "numpy", "safetensors", "triton")


def main(device: str) -> int:
    """Print the facts; exit status 1 where the device is missing, and then nothing else means anything."""
    tell("torch", f"{torch.__version__}, Python {platform.python_version()}, CUDA {torch.version.cuda}")
    tell("packages", ", ".join(f"{name} {_version(name)}" for name in _PACKAGES))
    shm_gib = shutil.disk_usage("/dev/shm").total / 2**30
    tell("machine", f"{len(os.sched_getaffinity(0))} processors, /dev/shm {shm_gib:.1f} GiB, C compiler {_compiler()}")
    if device != "cuda":
        tell("device", f"none is asked for: {device}")
        return 0
    interface = machine_devices()
    devices = visible_devices(interface)
    if not devices or not torch.cuda.is_available():
        tell("device", f"NVML sees {len(devices)}, torch sees {torch.cuda.device_count()}")
        return 1
    tell(
        "device", f"{len(devices)} x {devices[0].name}, {devices[0].total_bytes / 2**30:.0f} GiB, {interface.driver()}"
    )
    tell("compute mode", "one process alone" if devices[0].is_exclusive else "default")
    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    tell("libraries", f"NCCL {'.'.join(map(str, nccl_version()))}, cuDNN {cudnn}")
    torch.ones(8, device="cuda").sum().item()
    tell("processes are named as here", sees_process(interface, devices[0].uuid, os.getpid()))
    return 0


def _version(package: str) -> str:
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return "missing"


def _compiler() -> str:
    return next((name for name in ("gcc", "clang") if shutil.which(name)), "missing")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
