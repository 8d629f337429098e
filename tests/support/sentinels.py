"""Subjects whose buffers hold values that look uninitialised: by design, or since they were forgotten."""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from conformance.subjects import ParallelConfig, subject
from tests.support.subject_models import Model, batch, initialize, loss, shard


def slots() -> Tensor:
    return torch.tensor([0, torch.iinfo(torch.int64).max, 1])


class WithSlots(Model):
    """A table of integers more, of which the largest one says that there is no entry, and a number that is none yet."""

    slots: Tensor
    best: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slots", slots(), persistent=False)
        self.register_buffer("best", torch.tensor(torch.nan), persistent=False)


def initialize_all(model: nn.Module) -> None:
    initialize(model)
    model.slots = slots()
    model.best = torch.tensor(torch.nan)


@subject(model=WithSlots, loss=loss, batch=batch, initialize=initialize_all)
def meant(model: nn.Module, mesh: DeviceMesh, config: ParallelConfig) -> nn.Module:
    return shard(model, mesh, config)


@subject(model=WithSlots, loss=loss, batch=batch, initialize=initialize)
def forgotten(model: nn.Module, mesh: DeviceMesh, config: ParallelConfig) -> nn.Module:
    return shard(model, mesh, config)
