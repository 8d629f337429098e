"""Full copies of sharded parameters are no buffers of the modules that keep them."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from conformance.experiments.context import simulated_world
from conformance.subjects.memory_log import _without_full_copies


@pytest.fixture
def parameters() -> Iterator[list[Tensor]]:
    with simulated_world(2):
        mesh = init_device_mesh("cpu", (2,))
        yield [distribute_tensor(torch.ones(shape), mesh, [Shard(0)]) for shape in ((8, 4), (8,), (4, 4))]


def test_an_average_of_all_weights_is_left_out(parameters: list[Tensor]) -> None:
    mask = torch.ones(3, 3)
    average = [torch.zeros(parameter.shape) for parameter in parameters]
    kept = _without_full_copies([mask, *average], parameters)
    assert [id(tensor) for tensor in kept] == [id(mask)]


def test_a_mask_that_has_the_shape_of_one_weight_stays(parameters: list[Tensor]) -> None:
    mask = torch.ones(4, 4)
    assert _without_full_copies([mask], parameters) == [mask]


def test_sharded_averages_stay(parameters: list[Tensor]) -> None:
    assert _without_full_copies(parameters, parameters) is parameters
