"""Roots of FSDP on a rank: the model, or each stage of a pipeline. A root drives groups, one after the other."""

from collections.abc import Collection

import msgspec

from conformance.oracles import pipeline
from reference_trainer.config import TrainerConfig


class Root(msgspec.Struct):
    """Groups that a root drives, with the state on which their memory depends."""

    groups: list[str]
    """Groups in the order in which forward enters them; none for a stage of another rank."""
    left: list[str] = []
    """Groups in the order in which forward has left them."""
    copied_out: str = ""
    """Output of the all-gather that the last group in forward has copied out."""

    def leave(self, group: str) -> None:
        """Note that forward has left a group; one that it had left before begins another forward."""
        if group in self.left:
            self.left.clear()
        self.left.append(group)


def roots(config: TrainerConfig, held: Collection[str]) -> list[Root]:
    """Return the roots by the number of their stage, a single one without a pipeline; `held` are a rank's groups."""
    among = (pipeline.groups_of(stage, config) for stage in range(len(pipeline.owners(config))))
    return [Root([name for name in names if name in held]) for names in among]
