"""Gradient synchronisation of FSDP2's modules as the judged code has set it.

torch has setters alone (`FSDPModule.set_requires_gradient_sync`, `set_requires_all_reduce`), so their calls are heard.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from unittest.mock import patch
from weakref import WeakKeyDictionary

from torch import nn
from torch.distributed.fsdp import FSDPModule

_Setter = Callable[..., None]


@dataclass(frozen=True)
class _Switches:
    """Values of one module, at first those with which `fully_shard` makes it."""

    gradient_sync: bool = True
    all_reduce: bool = True


class GradientSync:
    """Switches of all FSDP modules of this process, while it listens."""

    def __init__(self) -> None:
        self._found: WeakKeyDictionary[FSDPModule, _Switches] = WeakKeyDictionary()
        self._setters: tuple[_Setter, _Setter] | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Open the context in which FSDP modules must be made, and trained."""
        # As they are now: a fault may have replaced them.
        sync, reduce = self._setters = FSDPModule.set_requires_gradient_sync, FSDPModule.set_requires_all_reduce

        def set_gradient_sync(module: FSDPModule, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
            sync(module, requires_gradient_sync, recurse=recurse)
            for each in _set_by(module, recurse=recurse):
                self._found[each] = _Switches(requires_gradient_sync, requires_gradient_sync)

        def set_all_reduce(module: FSDPModule, requires_all_reduce: bool, *, recurse: bool = True) -> None:
            reduce(module, requires_all_reduce, recurse=recurse)
            for each in _set_by(module, recurse=recurse):
                self._found[each] = replace(self._last_of(each), all_reduce=requires_all_reduce)

        try:
            with (
                patch.object(FSDPModule, "set_requires_gradient_sync", set_gradient_sync),
                patch.object(FSDPModule, "set_requires_all_reduce", set_all_reduce),
            ):
                yield
        finally:
            self._setters = None

    @contextmanager
    def postponed(self, model: nn.Module) -> Iterator[None]:
        """Open a context in which the modules of a model reduce no gradients, but where the judged code says so there.

        Afterwards each module has the values that the judged code has set last. Raises RuntimeError where calls of the
        setters are not heard: values that nobody knows cannot be given back.
        """
        if self._setters is None:
            raise RuntimeError("gradients can be postponed while GRADIENT_SYNC is listening only")
        set_gradient_sync, set_all_reduce = self._setters
        modules = _fsdp_modules(model)
        for module in modules:
            set_gradient_sync(module, False, recurse=False)
        try:
            yield
        finally:
            for module in modules:
                found = self._last_of(module)
                set_gradient_sync(module, found.gradient_sync, recurse=False)
                set_all_reduce(module, found.all_reduce, recurse=False)

    def _last_of(self, module: FSDPModule) -> _Switches:
        return self._found.get(module, _Switches())


def _set_by(module: FSDPModule, *, recurse: bool) -> list[FSDPModule]:
    """Return the FSDP modules that a call of a setter reaches."""
    return _fsdp_modules(module) if recurse and isinstance(module, nn.Module) else [module]


def _fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


GRADIENT_SYNC = GradientSync()
"""Switches of the process, which runs one trainer at a time."""
