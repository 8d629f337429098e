"""Accelerator of a rank, of any vendor: the device functions that the suite calls beyond tensors, streams and events.

All calls go through `torch.accelerator` and the module of the device; docs/simulated_accelerator.md lists the functions
that a device must offer.
"""

from collections.abc import Mapping

import torch


def is_in_use() -> bool:
    """Return whether this process uses an accelerator; False on a machine with devices for a rank on the CPU."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and bool(torch.get_device_module(accelerator).is_initialized())


def synchronize() -> None:
    """Wait until the accelerator, if this process uses one, has run all issued work."""
    if is_in_use():
        torch.accelerator.synchronize()


def allocate_workspaces(device: torch.device) -> None:
    """Let cuBLAS allocate the workspaces that it keeps: with its first products, for this thread and for autograd's.

    They come from the caching allocator, whose statistics would count them for the model. Not yet run on a CUDA device,
    see docs/gpu.md. https://docs.pytorch.org/docs/stable/notes/cuda.html#cublas-workspaces
    """
    if device.type != "cuda":
        return
    for dtype in (torch.float32, torch.bfloat16):
        weight = torch.ones(64, 64, dtype=dtype, device=device, requires_grad=True)
        torch.autograd.backward(torch.addmm(weight[0], weight, weight).sum())
    synchronize()


def statistics(device: torch.device) -> Mapping[str, int]:
    """Return the statistics of the device's caching allocator, by the names of `torch.cuda.memory_stats`.

    `torch.accelerator` has them since torch 2.9.
    """
    if device.type == "cuda":
        return torch.cuda.memory_stats(device)
    return torch.accelerator.memory_stats(device)


def reset_peaks(device: torch.device) -> None:
    """Make the present values of the statistics their peaks."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        torch.accelerator.reset_peak_memory_stats(device)
