"""Subjects: trainers of other people, judged by relations that any correct parallelisation keeps.

`own_loop.own_loop` makes a subject of a trainer's own loop, whose moments the suite sees by itself, and
`decorated.subject` one of a function `parallelize(model, mesh, config)`. `protocol.Subject` is the interface of both,
and of the adapters of this package. `objectives` are batches and losses that many models have.
`conformance judge` judges subjects, `judge` does so in a test.
"""

from conformance.report.judged import judge
from conformance.subjects.decorated import ParallelConfig, subject
from conformance.subjects.objectives import classification, denoising, language_model
from conformance.subjects.own_loop import LoopConfig, own_loop
from conformance.subjects.protocol import Run, StepObserver, Subject
from conformance.subjects.shims import use_shims

__all__ = [
    "LoopConfig",
    "ParallelConfig",
    "Run",
    "StepObserver",
    "Subject",
    "classification",
    "denoising",
    "judge",
    "language_model",
    "own_loop",
    "subject",
    "use_shims",
]
