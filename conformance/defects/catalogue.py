"""Catalogue of all defects by id.

`--defect ID` injects a defect, `--defect ID.twin` its benign twin, `--defect A+B` both A and B, A first, and
`--defect FILE.py:NAME` a user's own.
"""

import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import cast

from conformance.defects.edits import edited_defects
from conformance.defects.injection import Defect, Injection, NotInjectable, from_file
from conformance.defects.signatures import fault_files
from reference_trainer.checks import UsageError
from reference_trainer.strict_yaml import allowed

TWIN, AND = ".twin", "+"


def ids() -> tuple[str, ...]:
    """Return the ids of all defects and of their twins."""
    return tuple(name for defect in defects() for name in (defect.id, defect.id + TWIN))


def is_known(name: str) -> bool:
    """Return whether the catalogue has all ids that `name` joins."""
    return set(_names(name)) <= set(ids())


def _names(name: str | None) -> list[str]:
    if name is None:
        return []
    return [name] if ":" in name else name.split(AND)


def require_known(name: str) -> str:
    """Return the name in a form that ranks can resolve from any working directory.

    Raises UsageError for a name that `injected` cannot inject.
    """
    if ":" in name:
        path, _, attribute = name.rpartition(":")
        name = f"{Path(path).resolve()}:{attribute}"
        from_file(name.removesuffix(TWIN))
    elif not is_known(name):
        raise UsageError(f"--defect {name}: not a known defect, nor FILE.py:NAME for your own{allowed(name, ids())}")
    return name


@contextmanager
def injected(name: str | None) -> Iterator[None]:
    """Inject all defects or twins that `name` joins, or that of `FILE.py:NAME`; None changes nothing.

    Raises NotInjectable if a defect cannot be injected, so that a mistake in the defect is not taken for a fault of the
    product. `require_known` says which names are allowed.
    """
    with ExitStack() as stack:
        for defect_name in _names(name):
            try:
                stack.enter_context(_injection(defect_name))
            except Exception as error:
                raise NotInjectable(f"{defect_name} cannot be injected: {type(error).__name__}: {error}") from error
        yield


def subjects_of(name: str | None) -> frozenset[str]:
    """Return the only subjects that sweeps try with these defects or twins; empty for all, see `Defect.subjects`."""
    faults = [_fault(each) for each in _names(name)]
    return frozenset(subject for fault in faults if isinstance(fault, Defect) for subject in fault.subjects)


def _injection(name: str) -> Injection:
    fault = _fault(name)
    if isinstance(fault, Defect):
        return fault.inject(name.endswith(TWIN))
    return cast("Callable[[], Injection]", fault)()


def _fault(name: str) -> object:
    base = name.removesuffix(TWIN)
    return from_file(base) if ":" in base else {defect.id: defect for defect in defects()}[base]


@cache
def defects() -> tuple[Defect, ...]:
    """Return the catalogue: the defects of each module of faults, then those of torch_edits.yaml, in their order."""
    # Imported only when asked for because they import torch, which the controller does without.
    modules = [importlib.import_module(f"{__package__}.{file.stem}") for file in fault_files()]
    written = (value for module in modules for value in vars(module).values() if isinstance(value, Defect))
    return (*written, *edited_defects())
