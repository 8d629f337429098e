"""Support of cases: those that this machine, with this torch, can judge."""

import os
from shutil import which

import msgspec

from conformance.judge.law import Law
from conformance.numerics.arithmetic import OWN
from conformance.plan.cells import Cell
from conformance.plan.content import Profile
from conformance.plan.mesh import Mesh
from conformance.plan.substrates import SIM, Substrate
from conformance.run.devices.hardware import Hardware, device_type
from conformance.torch_release import release

_NAMES = {"cpu": "the CPU", "sim": "the simulated accelerator", "cuda": "CUDA devices"}
_C_COMPILERS = ("gcc", "clang")
"""Compilers that Triton looks for if the variable CC names none (triton/runtime/build.py)."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Hardware and software on which cases are judged."""

    hardware: Hardware
    torch_version: str
    max_world_size: int
    """Largest number of ranks that can be started."""


def unsupported(law: Law, cell: Cell, machine: Machine, *, profile: Profile | None = None) -> str | None:
    """Return a sentence about a case that the machine cannot judge, or None if it can."""
    devices = len(machine.hardware.devices)
    if profile and devices < profile.requires_devices:
        return f"the profile needs {_gpus(profile.requires_devices)}; {_count(devices)} found"
    if lacking := _lacks_for_ranks(law, cell, machine):
        return lacking
    substrate = judging_substrate(law, cell, machine.hardware)
    if release(machine.torch_version) < release(law.since):
        return f"{law.id} holds from torch {law.since} on; this is {machine.torch_version}"
    if substrate == "sim" and machine.hardware.simulated and machine.hardware.simulated.lacks:
        return machine.hardware.simulated.lacks
    lacking = _lacks_for_pipeline(cell, substrate, machine.torch_version)
    if lacking:
        return f"torch {machine.torch_version} {lacking}"
    lacking = _needs_device(cell, device=device_type(substrate))
    if lacking:
        return f"needs {lacking}; this run is on {_NAMES[device_type(substrate)]}"
    if law.memory and machine.hardware.arithmetic != OWN:
        return "is about the memory of torch's own kernels and of gloo, and this session has others"
    return None


def _lacks_for_ranks(law: Law, cell: Cell, machine: Machine) -> str | None:
    """Return the missing devices or ranks for a cell, or for the run whose state the cell resumes, or None."""
    for started in (cell, cell.saver) if cell.steps_before_save else (cell,):
        substrate = machine.hardware.substrate(started.world_size, law.substrates)
        if substrate is None:
            return _not_simulated(law) or _no_devices(started, machine.hardware)
        if substrate != "simulated" and started.world_size > machine.max_world_size:
            return f"needs {started.world_size} ranks; {substrate} runs at most {machine.max_world_size} here"
    return None


def _not_simulated(law: Law) -> str | None:
    """Return the message for a law that holds on the simulated accelerator alone, or None."""
    return "is about streams and memory of a device: add --accelerator sim" if law.substrates == SIM else None


def judging_substrate(law: Law, cell: Cell, hardware: Hardware) -> Substrate:
    """Return the substrate on which a case runs, or would run on a machine with the devices that its law needs."""
    return hardware.substrate(cell.world_size, law.substrates) or law.substrates[-1]


def _lacks_for_pipeline(cell: Cell, substrate: Substrate, torch_version: str) -> str | None:
    """Return why a version of torch cannot run the pipeline of a cell, or None.

    Before their first step stages connect (`_get_init_p2p_neighbors_ops` in torch/distributed/pipelining/stage.py).
    """
    if Mesh.parse(cell.mesh).pp == 1:
        return None
    if release(torch_version) < (2, 10):
        return (
            "has stages send int64 numbers into fp32 buffers, on which gloo aborts; pipelines are judged from 2.10 on"
        )
    if cell.pipeline == "zbv-zero-bubble" and substrate == "gloo" and release(torch_version) < (2, 13):
        return "has the stages of one rank send to each other, which gloo cannot do"
    if substrate == "sim" and (2, 12) <= release(torch_version) < (2, 13):
        return "forks CUDA's generators for stages on any device, https://github.com/pytorch/pytorch/pull/180512"
    return None


def _no_devices(cell: Cell, hardware: Hardware) -> str:
    """Return the message for a law that needs devices and has no substrate on this machine."""
    shared = -(-cell.world_size // max(hardware.ranks_per_device, 1))
    sharing = f" or {_gpus(shared, 'shared ')} (nccl-shared)" if hardware.ranks_per_device > 1 else ""
    return f"needs {_gpus(cell.world_size)} (nccl){sharing}; {_count(len(hardware.devices))} found"


def _needs_device(cell: Cell, *, device: str) -> str | None:
    """Return a need of a cell that this type of device, or this machine, does not meet, or None."""
    if device == "cuda":
        lacks_compiler = cell.compile and not any(map(which, (os.environ.get("CC", ""), *_C_COMPILERS)))
        return "a C compiler for the kernels that inductor generates: install gcc" if lacks_compiler else None
    if cell.pin_memory and device == "cpu":
        return "an accelerator for which host memory is pinned"
    if cell.tf32:
        return "a CUDA device, which rounds products to TF32"
    if cell.expandable_segments != "unset":
        return "CUDA expandable segments"
    return None


def _gpus(count: int, kind: str = "") -> str:
    return f"{count} {kind}GPU{'' if count == 1 else 's'}"


def _count(devices: int) -> str:
    return str(devices) if devices else "none"
