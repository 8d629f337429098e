"""Entry point `torch.backends`: `import torch` calls `start` in each process that has this package.

https://docs.pytorch.org/tutorials/unstable/python_extension_autoload.html
"""

import os
import sys
from importlib.metadata import entry_points

from conformance.sim.settings import SCHEDULE_VARIABLE
from reference_trainer.checks import UsageError

_GROUP, _NAME = "torch.backends", "conformance_sim"


def start() -> None:
    """Make `sim` the accelerator if the environment asks for it, see `settings`.

    A process whose import of torch comes from the device's own modules loads the device itself.
    """
    if SCHEDULE_VARIABLE in os.environ and "conformance.sim.device" not in sys.modules:
        from conformance.sim.enabling import enable

        enable()


def require_installed() -> None:
    """Raise UsageError if the import of torch in another process of this Python would not find the entry point."""
    if not entry_points(group=_GROUP, name=_NAME):
        raise UsageError(
            f"the package is not installed in {sys.prefix}, so that `import torch` gives no process the device: "
            "run `pip install --no-deps -e .` in the project"
        )
