"""Subjects: trainers of other people, judged by relations that any correct parallelisation keeps.

`decorated.subject` makes a subject of a function `parallelize(model, mesh, config)`; `protocol.Subject` is for trainers
with loops of their own, such as those of this package. `conformance judge` judges them.
"""

from conformance.subjects.decorated import ParallelConfig, subject
from conformance.subjects.protocol import Run, StepObserver, Subject
from conformance.subjects.shims import use_shims

__all__ = ["ParallelConfig", "Run", "StepObserver", "Subject", "subject", "use_shims"]
