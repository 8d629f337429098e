"""Check that `benchmarks/harness.py` runs under each harness: one step of FSDP2, gradients compared."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from conformance.experiments.context import start_process_group
from conformance.oracles.reference import train_reference
from conformance.plan.cells import Cell
from conformance.run.ranks.messages import RankContext
from reference_trainer.model import Transformer
from reference_trainer.observer import Observer
from reference_trainer.train import Trainer

_RELATIVE_DEVIATION = 2**-12
"""Bound on the deviation of this model's fp32 gradients; chosen and not derived, unlike the bounds of laws."""


class _Gradients(Observer):
    def __init__(self) -> None:
        self.full: dict[str, Tensor] = {}

    def gradients(self, model: Transformer, *, step: int) -> None:
        for name, parameter in model.named_parameters():
            grad = parameter.grad
            assert isinstance(grad, DTensor)
            self.full[name] = grad.full_tensor()


def check_one_step(mesh: str) -> None:
    """Train one step in a process group that exists, and compare every gradient with that of one process.

    Raises AssertionError if one differs.
    """
    cell = Cell(mesh=mesh, steps=1)
    config = cell.config
    gradients = _Gradients()
    Trainer(config, device=torch.device("cpu"), world_size=cell.world_size, observer=gradients).train_step(0)
    expected = train_reference(config, dtype=torch.float32).gradients[0]
    assert gradients.full.keys() == expected.keys()
    for name, gradient in expected.items():
        deviation = (gradients.full[name] - gradient).norm() / gradient.norm()
        assert deviation <= _RELATIVE_DEVIATION, f"{name} deviates by {deviation:.1e}"


def on_ranks(context: RankContext, payload: dict[str, Any]) -> None:
    """Run the check as a task of this suite's ranks, with a process group of its own."""
    start_process_group(context)
    check_one_step(payload["mesh"])
    dist.destroy_process_group()
