"""Steps of the benchmark as a test of torch's harness, whose processes and process group live as long as the class of tests."""

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
