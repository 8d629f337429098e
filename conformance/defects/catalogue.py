"""All defects by id. `--defect ID` injects one, `--defect ID.twin` its benign twin, `--defect FILE.py:NAME` yours.

Known ones can be joined: `--defect A+B` injects both, A first.
"""

import importlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import cast

from conformance.defects.injection import Defect, Injection, NotInjectable, from_file

TWIN, AND = ".twin", "+"
_FAULTS = (
    "environment",
    "initialisation",
    "loss",
    "optimizer",
    "clipping",
    "torch_clipping",
    "offload",
    "reduction",
    "fsdp",
    "interface",
    "dtensor",
    "hang",
    "tp",
    "layout",
    "precision",
    "rounding",
    "loss_scale",
    "repetition",
    "traffic",
    "checkpoint",
    "memory",
    "prefetch",
    "waiting",
    "race",
)


def ids() -> tuple[str, ...]:
    """What `--defect` accepts."""
    return tuple(name for defect in defects() for name in (defect.id, defect.id + TWIN))


def is_known(name: str) -> bool:
    """Whether all that it joins are of this catalogue."""
    return set(_names(name)) <= set(ids())


def _names(name: str | None) -> list[str]:
    if name is None:
        return []
    return [name] if ":" in name else name.split(AND)


def require_known(name: str) -> str:
    """The name as ranks can find it from any directory. Raises ValueError for what `injected` cannot inject."""
    if ":" in name:
        path, _, attribute = name.rpartition(":")
        name = f"{Path(path).resolve()}:{attribute}"
        from_file(name.removesuffix(TWIN))
    elif not is_known(name):
        raise ValueError(
            f"--defect {name}: not a known defect; choose from {', '.join(ids())}, or write FILE.py:NAME for your own"
        )
    return name


@contextmanager
def injected(name: str | None) -> Iterator[None]:
    """The context in which the defects (or twins) of these ids are in force, or that of `FILE.py:NAME`, for which see
    `require_known`; None changes nothing.

    Raises NotInjectable, so that the fault of a fault is not taken for one of the product.
    """
    with ExitStack() as stack:
        for one in _names(name):
            try:
                stack.enter_context(_injection(one)())
            except Exception as error:
                raise NotInjectable(f"{one} cannot be injected: {type(error).__name__}: {error}") from error
        yield


def _injection(name: str) -> Injection:
    base, is_twin = name.removesuffix(TWIN), name.endswith(TWIN)
    found = from_file(base) if ":" in base else {defect.id: defect for defect in defects()}[base]
    if isinstance(found, Defect):
        return found.inject_twin if is_twin else found.inject
    return cast("Injection", found)


def defects() -> tuple[Defect, ...]:
    """The catalogue, in the order in which it is listed."""
    return tuple(defect for module in _modules() for defect in module.DEFECTS)


def sources_of(defect: Defect) -> list[Path]:
    """The files that say what a known defect does: its own, and those of other defects that it borrows from."""
    module = next(module for module in _modules() if defect in module.DEFECTS)
    owners = {module.__name__, *(getattr(value, "__module__", None) for value in vars(module).values())}
    return sorted(Path(str(m.__file__)) for m in _modules() if m.__name__ in owners)


@cache
def _modules() -> tuple[ModuleType, ...]:
    # Imported only when asked for because they import torch, which the controller does without.
    return tuple(importlib.import_module(f"conformance.defects.{name}_faults") for name in _FAULTS)
