"""Steps of the benchmark as tests of torch's harness, whose process group lives as long as a class of tests."""

import torch
from torch.testing._internal.common_distributed import MultiProcContinuousTest

from benchmarks.warm_runs.steps import config_on, train


class _Training(MultiProcContinuousTest):
    mesh: str

    @classmethod
    def backend_str(cls) -> str:
        return "gloo"

    @classmethod
    def device_type(cls) -> str:
        return "cpu"

    def test_trains(self) -> None:
        torch.set_num_threads(1)  # as the suite's ranks do
        train(config_on(self.mesh), world_size=self.world_size)


class TrainingOnDp2(_Training):
    """Training on `dp2`."""

    mesh, world_size = "dp2", 2


class TrainingOnDp4(_Training):
    """Training on `dp4`."""

    mesh, world_size = "dp4", 4


class TrainingOnDp2Tp2(_Training):
    """Training on `dp2-tp2`."""

    mesh, world_size = "dp2-tp2", 4


CLASSES = {each.mesh: each for each in (TrainingOnDp2, TrainingOnDp4, TrainingOnDp2Tp2)}
