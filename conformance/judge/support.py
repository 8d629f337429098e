"""What this machine, with this torch, can judge."""

from conformance.judge.law import Law
from conformance.plan.cells import Cell
from conformance.plan.matrix import Profile
from conformance.run.devices.hardware import Hardware, device_type


def unsupported(
    law: Law,
    cell: Cell,
    *,
    torch_version: str,
    max_world_size: int,
    hardware: Hardware,
    profile: Profile | None = None,
) -> str | None:
    """What is missing for a case, with numbers; None if nothing is."""
    if profile and len(hardware.devices) < profile.requires_devices:
        return f"the profile requires {profile.requires_devices} CUDA devices, found {len(hardware.devices)}"
    substrate = hardware.substrate(cell.world_size, law.substrates)
    if substrate is None:
        return (
            f"needs {cell.world_size} CUDA devices for substrate nccl, 1 for nccl-shared, found "
            f"{len(hardware.devices)}, {_sharing(hardware)}"
        )
    if release(torch_version) < release(law.since):
        return f"{law.id} holds from torch {law.since} on, this is {torch_version}"
    if cell.pin_memory and device_type(substrate) == "cpu":
        return "needs an accelerator for which memory is pinned, this case runs on the CPU with 0"
    if cell.tf32 and device_type(substrate) == "cpu":
        return "needs a CUDA device, which rounds products to TF32; this case runs on the CPU"
    if cell.expandable_segments != "unset" and device_type(substrate) == "cpu":
        return "needs a device whose allocator has segments that grow, this case runs on the CPU with 0"
    if substrate != "simulated" and cell.world_size > max_world_size:
        return f"needs {cell.world_size} ranks, {substrate} runs at most {max_world_size} here"
    return None


def _sharing(hardware: Hardware) -> str:
    ranks = hardware.ranks_per_device
    return "with one rank on each" if ranks == 1 else f"with up to {ranks} ranks on each"


def release(version: str) -> tuple[int, ...]:
    """The release part of a torch version: `2.13.0+cpu` is (2, 13)."""
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2])
