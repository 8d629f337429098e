"""Storages that ranks hold in the runs whose memory laws judge, for the localisation of a failure."""

import gc
from collections.abc import Sequence

from conformance.experiments.context import RankWorld, experiment
from conformance.experiments.memory import MANY_STEPS, unscaled
from conformance.instruments.held_storages import HeldStorages, Moment
from conformance.run.experiment import Needs
from reference_trainer.build import build_model
from reference_trainer.reshard import reshard_policy


@experiment(needs=Needs.SHARDING | Needs.FORWARD, world="sampled")
def storages_of_sampled_ranks(rank: RankWorld) -> list[Moment]:
    """Return the moments of the second step, with the storages that are alive then."""
    return _moments(rank, steps=2, watched=[1])


@experiment(needs=Needs.SHARDING | Needs.FORWARD, world="sampled")
def storages_over_steps(rank: RankWorld) -> list[Moment]:
    """Return the moments of the second and of the fiftieth step, with the storages that are alive then."""
    return _moments(rank, steps=MANY_STEPS, watched=[1, MANY_STEPS - 1])


@experiment(needs=Needs.TRAINING)
def storages_on_ranks(rank: RankWorld) -> list[Moment]:
    """Return the moments of the second step of a real rank, with the storages that are alive then."""
    return _moments(rank, steps=2, watched=[1])


@experiment(needs=Needs.SHARDING)
def storages_of_building(rank: RankWorld) -> list[Moment]:
    """Return the peak of building the model, with the storages that are alive then, and the end."""
    config, mesh, policy = rank.config, rank.mesh, reshard_policy(rank.config, rank.dims, rank.device)
    storages = HeldStorages(watched=[-1])
    with storages.listening():
        model = build_model(config, mesh, rank.device, policy, storages)
    del model
    return storages.moments


def _moments(rank: RankWorld, *, steps: int, watched: Sequence[int]) -> list[Moment]:
    storages = HeldStorages(watched)
    with storages.listening():
        trainer = rank.trainer(storages, config=unscaled(rank.config, steps=steps))
        storages.optimizer = trainer.optimizer
        for step in range(steps):
            gc.collect()  # as before the steps that laws measure: garbage in cycles is not held
            trainer.train_step(step)
    return storages.moments
