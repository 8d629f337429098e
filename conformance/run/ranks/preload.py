"""Modules that the rank server imports once, so that every rank is forked with them."""

import importlib
from contextlib import suppress

from conformance.project import PACKAGE

# Measured with a small FSDP2+TP training step over gloo: with this list the first step imports three more small
# modules. `torch._dynamo` is imported by the first DTensor module in any case (about 0.5 s to 1.4 s, in every rank);
# this list only names it, and with a torch release without it ranks merely start more slowly.
PRELOADED_MODULES = (
    "numpy.random",
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.tensor.parallel",
    "torch.optim",
    "torch.utils._sympy.reference",
)


def preload() -> None:
    """Import every module of `PRELOADED_MODULES` that this torch release has, and all experiments.

    Experiments bring along the trainer, the instruments and the defects (0.3 s in every rank).
    """
    for name in PRELOADED_MODULES:
        with suppress(ImportError):
            importlib.import_module(name)
    for name in experiment_modules():
        importlib.import_module(name)


def experiment_modules() -> list[str]:
    """Return the names of all modules of `conformance.experiments`, without importing any."""
    files = sorted((PACKAGE / "experiments").glob("*.py"))
    return [f"conformance.experiments.{file.stem}" for file in files if file.stem != "__init__"]
