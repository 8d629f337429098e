"""Knobs of a process that decide how kernels add up and round: the same for ranks and for oracles.

A run equals its oracle in every bit only if both compute with the same kernels, and a kernel is chosen by these knobs,
too. The variables that cuBLAS and NCCL read are in `conformance.run.devices.hardware.DETERMINISM`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from conformance.numerics import ordered_sums, other_kernels
from conformance.numerics.arithmetic import Arithmetic


@dataclass(frozen=True)
class _Knob:
    read: Callable[[], Any]
    turn: Callable[[Any], object]
    pinned: Any
    on_devices: Any = None
    """Value for computing on CUDA devices; None if it is also `pinned`."""

    def value(self, device_type: str) -> Any:
        return self.pinned if self.on_devices is None or device_type != "cuda" else self.on_devices


def _attribute(owner: Any, name: str, pinned: Any) -> _Knob:
    return _Knob(partial(getattr, owner, name), partial(setattr, owner, name), pinned)


_KNOBS = {
    # The order of a kernel's sums on the CPU, and so their rounding, depends on the number of threads.
    "one thread": _Knob(torch.get_num_threads, torch.set_num_threads, 1),
    # https://docs.pytorch.org/docs/stable/notes/cuda.html
    "products in fp32": _Knob(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "highest"),
    "TF32 off in convolutions": _attribute(torch.backends.cudnn, "allow_tf32", pinned=False),
    "bf16 sums in fp32": _attribute(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", pinned=False),
    "fp16 sums in fp32": _attribute(torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", pinned=False),
    # On a device some kernels add in the order in which threads arrive, and attention has kernels of cuDNN.
    # https://docs.pytorch.org/docs/stable/generated/torch.set_deterministic_debug_mode.html
    "deterministic algorithms": _Knob(
        torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, pinned=0, on_devices=2
    ),
    "uninitialised memory as it is": _attribute(
        torch.utils.deterministic,
        "fill_uninitialized_memory",
        pinned=False,  # saves time; INIT-1 has its poison
    ),
    "no benchmarks of kernels": _attribute(torch.backends.cudnn, "benchmark", pinned=False),
    "kernels of cuDNN as chosen": _attribute(torch.backends.cudnn, "deterministic", pinned=False),
}


def pin_knobs(device: torch.device | str) -> None:
    """Set all knobs permanently for computing on `device`, of which only the type counts."""
    for knob in _KNOBS.values():
        knob.turn(knob.value(torch.device(device).type))


def pin_numerics(device: torch.device | str) -> None:
    """Set all knobs for computing on `device`, and install the arithmetic of the environment, permanently.

    Raises as `ordered_sums.install` and `other_kernels.install` do.
    """
    pin_knobs(device)
    arithmetic = Arithmetic.here()
    if arithmetic.seed is not None:
        other_kernels.install(arithmetic.seed)
    if arithmetic.sums != "gloo":
        ordered_sums.install(arithmetic.sums)


@contextmanager
def pinned_numerics(device: torch.device | str) -> Iterator[None]:
    """Open a context in which numerics are as `pin_numerics` makes them; afterwards the knobs are as before."""
    before = {name: knob.read() for name, knob in _KNOBS.items()}
    pin_numerics(device)
    try:
        yield
    finally:
        for name, knob in _KNOBS.items():
            knob.turn(before[name])


def pinned_knobs(device: torch.device | str) -> dict[str, bool]:
    """Return for each knob whether it is set as computing on `device` needs it."""
    return {name: knob.read() == knob.value(torch.device(device).type) for name, knob in _KNOBS.items()}
