"""Turns of a training step: in each one optimizer steps, for one of several losses, as of the networks of a GAN.

A step of a run, by which facts and tensors are numbered, is one turn. All turns of a training step have its batches.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from conformance.subjects.protocol import Subject


@dataclass(frozen=True)
class Turn:
    """One turn."""

    module: str
    """Path of the module that is trained, in the model of one process; empty for the model itself."""
    subject: Subject
    """Subject with the turn's loss and optimizer alone."""

    def trains(self, parameter: str) -> bool:
        """Return whether the turn's optimizer has a parameter of the model of one process."""
        return not self.module or parameter.startswith(f"{self.module}.")


def turns_of(subject: Subject) -> Sequence[Turn]:
    """Return the turns of a training step; most trainers have one."""
    declared: Mapping[str, Subject] = getattr(subject, "turns", {})
    return [Turn(module, each) for module, each in declared.items()] or [Turn("", subject)]


def turn_of(subject: Subject, step: int) -> Turn:
    """Return the turn that the step of a run with a number is."""
    turns = turns_of(subject)
    return turns[step % len(turns)]
