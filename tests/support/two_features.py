"""Fault that needs two features, as a user injects one: `--defect FILE.py:NAME`."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from conformance.defects.catalogue import injected
from conformance.defects.injection import replaced_call


def summed_if_offloaded_and_accumulated() -> AbstractContextManager[None]:
    """Sum gradients over ranks, in place of their mean, in trainers that offload and have several micro-batches."""

    def train_step(original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
        is_wrong = trainer.config.offload == "cpu" and trainer.config.accumulation > 1
        with injected("grads-summed" if is_wrong else None):
            return original(trainer, *args, **kwargs)

    return replaced_call("reference_trainer.train:Trainer", "train_step", train_step)
