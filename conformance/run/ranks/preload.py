"""Modules that the rank server imports once, so that every rank is forked with them."""

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from unittest.mock import patch

from conformance.project import PACKAGE, module_of

# Measured with a small FSDP2+TP training step over gloo: with this list the first step imports three more small
# modules. `torch._dynamo` is imported by the first DTensor module in any case (about 0.5 s to 1.4 s, in every rank);
# this list only names it, and with a torch release without it ranks merely start more slowly. A checkpoint
# that is saved or loaded imports fsspec.
PRELOADED_MODULES = (
    "numpy.random",
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "torch.distributed.checkpoint._fsspec_filesystem",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.tensor.parallel",
    "torch.optim",
    "torch.utils._sympy.reference",
)
EXPERIMENTS, SUBJECTS = "experiments", "subjects"
"""Tasks that a session's ranks perform: experiments, or runs of another trainer, which need fewer modules."""
_TASKS_OF_SUBJECTS = ("safetensors.torch", "conformance.subjects.tasks")
_COMPILER_MODULES = ("torch._functorch.aot_autograd", "torch._inductor.lowering")
"""Modules whose import covers nearly all imports of the first compilation (1 s in every rank)."""


def preload(tasks: str = EXPERIMENTS) -> None:
    """Import every module of `PRELOADED_MODULES` that this torch release has, and those of a session's tasks.

    Experiments bring along the trainer, the instruments and the defects (0.3 s in every rank).
    """
    for name in PRELOADED_MODULES:
        with suppress(ImportError):
            importlib.import_module(name)
    for name in experiment_modules() if tasks == EXPERIMENTS else _TASKS_OF_SUBJECTS:
        importlib.import_module(name)


@cache
def preload_compiler() -> None:
    """Import the modules of torch.compile with the backends `aot_eager` and `inductor`."""
    # In releases such as torch 2.6 the import starts processes that compile for Triton, which the server would end as
    # strays of its ranks.
    with patch.dict(os.environ, {"TORCH_WARM_POOL": "0"}), _without_asking_cuda():
        for name in _COMPILER_MODULES:
            with suppress(ImportError):
                importlib.import_module(name)


@contextmanager
def _without_asking_cuda() -> Iterator[None]:
    """Open a context in which torch seems to have no CUDA device, so that the driver is not called.

    A fork of a process that has called the driver cannot use CUDA. `torch._inductor.runtime.benchmarking` calls it when
    it is imported, for an experiment that is off by default; the patch can go with torch 2.12, the last to do so.
    """
    with patch("torch.cuda.is_available", lambda: False):
        yield


def experiment_modules() -> list[str]:
    """Return the names of all modules of `conformance.experiments` and `conformance.sweeps`, without importing any."""
    files = sorted(file for folder in ("experiments", "sweeps") for file in (PACKAGE / folder).glob("[!_]*.py"))
    return [module_of(file) for file in files]
