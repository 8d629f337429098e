"""Buffers that advance with each call: one process has them as each rank has them."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from conformance.subjects import subject
from conformance.subjects.advancing import advancing_buffers
from conformance.subjects.cells import SubjectCell, Workload
from conformance.subjects.data import micro_batches
from conformance.subjects.probes import require_sum
from conformance.subjects.protocol import Batch
from conformance.subjects.reference import initial_model, train

WORKLOAD = Workload(tied=False, data_ranks=2, accumulation=(2, 1), uneven=False)


class Annealed(nn.Module):
    """Linear layer whose output grows with the number of calls, beside statistics of the data, and a constant."""

    calls: Tensor
    mean: Tensor
    constant: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("constant", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.mean.lerp_(x.mean(0), 0.1)
        logits: Tensor = self.linear(x * self.constant) * self.calls
        return logits


def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(5, 6, generator=generator), torch.randint(4, (5,), generator=generator)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1], reduction="sum")


trainer = subject(model=Annealed, loss=loss, batch=batch)(lambda model, mesh, config: model)


def test_buffers_that_depend_on_the_data_or_stay_do_not_advance() -> None:
    batches = micro_batches(trainer, WORKLOAD, step=0, data_rank=0)
    model = Annealed()
    assert advancing_buffers(model, [loss], batches) == ["calls"]
    assert model.calls == 0


@pytest.mark.parametrize("order", [0, 1, 2, 3])
def test_each_rank_calls_the_model_for_its_own_micro_batches(order: int) -> None:
    run = train(trainer, WORKLOAD, dtype=torch.float64, order=order, max_norm=None)
    model = initial_model(trainer, tied=False).double()
    total = torch.zeros(4, 6, dtype=torch.float64)
    for rank in range(2):
        own = copy.deepcopy(model)
        for inputs, labels in micro_batches(trainer, WORKLOAD, step=0, data_rank=rank):
            (loss(own, (inputs.double(), labels)) / 20).backward()  # type: ignore[no-untyped-call]
        gradient = own.get_parameter("linear.weight").grad
        assert gradient is not None
        total += gradient
    assert torch.allclose(run.gradients[0]["linear.weight"], total, rtol=1e-12)


def test_a_loss_that_grows_with_the_calls_is_a_sum() -> None:
    assert require_sum(trainer, SubjectCell().workload, dtype=torch.float64) == []
