"""Actions of a pipeline's stages, as runs have recorded them."""

from conformance.instruments.facts import RankFacts
from conformance.oracles.pipeline import Action


def recorded_actions(facts: RankFacts, step: int) -> list[Action]:
    """Return what the stages of a rank did in a step, in their order."""
    return [Action(a.action, a.stage, a.micro_batch) for a in facts.stage_actions if a.step == step]
