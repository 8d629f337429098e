"""Steps that both harnesses run: a trainer is built and trained, without instruments."""

import torch

from conformance.experiments.context import RankWorld, experiment
from conformance.plan.cells import cell_from_id
from conformance.run.experiment import Needs
from reference_trainer.config import TrainerConfig
from reference_trainer.train import Trainer

MESHES = ("dp2", "dp4", "dp2-tp2")


def config_on(mesh: str) -> TrainerConfig:
    """Return the configuration of the default cell of a mesh."""
    return cell_from_id(f"{mesh}-fp32-default-meta").config


def train(config: TrainerConfig, *, world_size: int) -> list[float]:
    """Build a trainer on the default process group and train all steps; returns their losses."""
    trainer = Trainer(config, device=torch.device("cpu"), world_size=world_size)
    return [trainer.train_step(step).loss for step in range(config.steps)]


@experiment(needs=Needs.TRAINING)
def trained(rank: RankWorld) -> list[float]:
    """Train as a task of the suite's ranks."""
    return train(rank.config, world_size=rank.size)
