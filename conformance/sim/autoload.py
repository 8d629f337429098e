"""Entry point `torch.backends`: `import torch` calls `start` in each process that has this package.

https://docs.pytorch.org/tutorials/unstable/python_extension_autoload.html
"""

import os
import sys

from conformance.sim.settings import SCHEDULE_VARIABLE


def start() -> None:
    """Make `sim` the accelerator if the environment asks for it, see `settings`.

    A process whose import of torch comes from the device's own modules loads the device itself.
    """
    if SCHEDULE_VARIABLE in os.environ and "conformance.sim.device" not in sys.modules:
        from conformance.sim.enabling import enable

        enable()
