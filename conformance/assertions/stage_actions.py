"""Recorded actions of a pipeline's stages."""

from conformance.instruments.facts import RankFacts
from conformance.oracles.pipeline import Action


def recorded_actions(facts: RankFacts, step: int) -> list[Action]:
    """Return the actions of the stages of a rank in a step, in their order."""
    return [Action(a.action, a.stage, a.micro_batch) for a in facts.stage_actions if a.step == step]
