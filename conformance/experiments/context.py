"""Where a rank computes: its device, and the process group of its world."""

import torch
import torch.distributed as dist

from conformance.run.ranks.messages import RankContext
from reference_trainer.mesh import backends, init_process_group


def device_of(context: RankContext) -> torch.device:
    """The device that the rank has leased, which is the only one that CUDA shows to it, or else the processor.

    On a device all is pinned that may make two runs differ in their last bits; what cuBLAS and NCCL read is in
    `hardware.DETERMINISM`.
    """
    if not context.device:
        return torch.device("cpu")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # else time for nothing
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    return device


def start_process_group(context: RankContext) -> torch.device:
    """Make the default process group, with backends for host and device; returns the device of this rank.

    Ranks leave it together: what rank 0 has written before is there for all.
    """
    device = device_of(context)
    init_process_group(
        backends(device, cpu_tensors=True),
        init_method=context.rendezvous,
        rank=context.rank,
        world_size=context.world_size,
        timeout_s=context.timeout_s,
    )
    dist.all_reduce(torch.zeros(1, dtype=torch.float32))  # among hosts: no backend of a device has to work for it
    return device
