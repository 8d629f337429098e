"""What this machine, with this torch, can judge."""

from conformance.engine.cells import Cell
from conformance.engine.law import Law

SUBSTRATE, DEVICE = "gloo", "cpu"


def unsupported(law: Law, cell: Cell, *, torch_version: str, max_world_size: int) -> str | None:
    """What is missing for a case, with numbers; None if nothing is."""
    if "simulated" not in law.substrates and SUBSTRATE not in law.substrates:
        return (
            f"needs {cell.world_size} CUDA devices for substrate nccl, 1 for nccl-shared, found {_cuda_devices()}; "
            f"this session runs {SUBSTRATE}"
        )
    if release(torch_version) < release(law.since):
        return f"{law.id} holds from torch {law.since} on, this is {torch_version}"
    if cell.pin_memory and DEVICE == "cpu":
        return f"needs an accelerator for which memory is pinned, this session runs on {DEVICE} with 0"
    if "simulated" not in law.substrates and cell.world_size > max_world_size:
        return f"needs {cell.world_size} ranks, {SUBSTRATE} runs at most {max_world_size} here"
    return None


def _cuda_devices() -> int:
    import torch  # which the controller does without

    return torch.cuda.device_count()


def release(version: str) -> tuple[int, ...]:
    """The release part of a torch version: `2.13.0+cpu` is (2, 13)."""
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2])
