"""Subject whose model one process computes on an accelerator; its data come from the host, as they do for ranks."""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from conformance.subjects.data import to_device
from conformance.subjects.protocol import Batch, Subject


def on_device(subject: Subject, device: torch.device) -> Subject:
    """Return a subject whose model and loss are computed on a device.

    The CPU computes for the simulated accelerator, whose operators return the same numbers.
    """
    return cast("Subject", OnDevice(subject, device)) if device.type == "cuda" else subject


class OnDevice:
    """Subject on a device; all that it does not define is the subject's own."""

    def __init__(self, subject: Subject, device: torch.device) -> None:
        self._subject, self._device = subject, device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._subject, name)

    @property
    def turns(self) -> dict[str, Subject]:
        """Turns on the device."""
        each_turn = getattr(self._subject, "turns", {}).items()
        return {name: on_device(each, self._device) for name, each in each_turn}

    def model(self, *, tied: bool) -> nn.Module:
        """Return the model on the device, with weights that the CPU has drawn, as `made_on` makes it."""
        model = self._subject.model(tied=tied)
        is_ready = isinstance(model, nn.Module) and not any(each.is_meta for each in model.parameters())
        return model.to(self._device) if is_ready else model

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the loss of a batch of the host."""
        return self._subject.loss(model, to_device(batch, self._device))


def made_on(device: torch.device, make: Callable[[], nn.Module], *, on_meta: bool) -> nn.Module:
    """Return the model that a function makes on a device, or on the meta device, as a rank begins with it.

    A CUDA device draws other random numbers than the CPU, so that weights are drawn on the CPU and moved.
    """
    is_cuda = device.type == "cuda" and not on_meta
    with torch.device("meta" if on_meta else "cpu" if is_cuda else device):
        model = make()
    return model.to(device) if is_cuda else model
