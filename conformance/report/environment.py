"""Facts about the machine and its software that stand in every report; nothing here imports torch."""

import hashlib
import importlib.metadata
import os
import platform
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import psutil

from conformance.plan.substrates import REAL
from conformance.project import IS_CHECKOUT, PROJECT
from conformance.run.devices.hardware import Hardware

_SUITE = [PROJECT / name for name in ("conformance", "reference_trainer")]
_CPU_IS_BLIND_TO = "NCCL, CUDA streams, GPU memory, pinned host memory"
_SIMULATION_IS_BLIND_TO = (
    "CUDA's kernels and allocator, NCCL, the driver, fragmentation, speed (the simulated accelerator is a model)"
)
_SHARED_DEVICE_IS_BLIND_TO = "bandwidth, overlap and peer-to-peer copies in worlds that share a GPU"
_PACKAGES = ("torch", "numpy", "pytest", "pytest-xdist", "msgspec", "safetensors")
_VARIABLE_PREFIXES = ("CUBLAS", "CUDA", "GLOO", "MKL", "NCCL", "OMP", "PYTORCH", "TORCH")


def environment_facts(hardware: Hardware) -> dict[str, Any]:
    """Return versions, devices, memory, variables that change torch's behaviour, and the suite's commit."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "device": _device(hardware),
        "processor": {"name": _processor_name(), "count": len(os.sched_getaffinity(0))},
        "backends": _backends(hardware),
        "hardware": msgspec.json.decode(msgspec.json.encode(hardware)),
        "memory_bytes": psutil.virtual_memory().total,
        "variables": {k: v for k, v in sorted(os.environ.items()) if k.startswith(_VARIABLE_PREFIXES)},
        "substrate": hardware.substrate(1, REAL),
        "cannot_show": _cannot_show(hardware),
        "git": _git_commit(),
    }


def _device(hardware: Hardware) -> dict[str, Any]:
    """Device that ranks compute on, if the case and the law allow."""
    if hardware.simulated:
        return {"type": "sim", "name": f"simulated accelerator, schedule {hardware.simulated.schedule}", "count": 1}
    if not hardware.devices:
        return {"type": "cpu", "name": _processor_name(), "count": len(os.sched_getaffinity(0))}
    names = dict.fromkeys(device.name for device in hardware.devices)
    return {"type": "cuda", "name": ", ".join(names), "count": len(hardware.devices), "driver": hardware.driver}


def _cannot_show(hardware: Hardware) -> str:
    """Return the subjects, with commas, about which no case on this machine says anything; empty if there are none."""
    if hardware.simulated:
        return _SIMULATION_IS_BLIND_TO
    if not hardware.devices:
        return _CPU_IS_BLIND_TO
    return _SHARED_DEVICE_IS_BLIND_TO if hardware.ranks_per_device > 1 else ""


def _backends(hardware: Hardware) -> dict[str, str]:
    nccl = {"nccl": ".".join(map(str, hardware.nccl))} if hardware.devices else {}
    return {"gloo": "as bundled with torch", **nccl}


@cache
def suite_digest() -> str:
    """Return a digest of all code of the suite and of the trainer."""
    digest = hashlib.sha256()
    for package in _SUITE:
        for file in sorted(package.rglob("*.py")):
            digest.update(file.relative_to(package).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def _processor_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()  # not every architecture has a model name there


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    """The suite's commit, with `-dirty` if files differ from it; None outside of a checkout.

    An installed wheel may lie in the directory of another project, whose commit says nothing of the suite.
    """
    if not IS_CHECKOUT:
        return None
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
