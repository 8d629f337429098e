"""Memory laws measure steps that the trainer takes."""

from types import SimpleNamespace
from typing import Any

import pytest

from conformance.experiments import memory


def test_a_step_that_the_loss_scaler_skips_is_not_measured() -> None:
    """A skipped step needs other memory than one that is taken, and no memory law could tell."""
    trainer: Any = SimpleNamespace(train_step=lambda step: SimpleNamespace(skipped=True))
    with pytest.raises(RuntimeError, match="step 1 was skipped"):
        memory._marked_step(trainer, 1)
