"""The modules that the rank server imports once, so that every rank is forked with them."""

import importlib
from contextlib import suppress

# Measured with a small FSDP2+TP training step over gloo: with this list the first step imports three more small
# modules. `torch._dynamo` is imported by the first DTensor module in any case (about 0.5 s to 1.4 s, in every rank);
# it is only named here, never used, and a torch release without it merely starts its ranks more slowly. The modules
# with the tasks of ranks bring along the trainer, the instruments and the defects (0.3 s in every rank).
PRELOADED_MODULES = (
    "conformance.experiments.clipping",
    "conformance.experiments.device_memory",
    "conformance.experiments.dtensor",
    "conformance.experiments.fsdp_api",
    "conformance.experiments.memory",
    "conformance.experiments.build",
    "conformance.experiments.torch_clipping",
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
    """Import every module of the list that this torch release has."""
    for name in PRELOADED_MODULES:
        with suppress(ImportError):
            importlib.import_module(name)
