"""Dispatch tap: the dispatch mode of a run, through which other instruments see every operator that torch executes.

`TorchDispatchMode` lives in `torch.utils._python_dispatch`: private by name, but the base of the public
`CommDebugMode`, and the only place below autograd, FSDP2 and DTensor where all torch versions from 2.6 on show their
collectives under stable names. This is the only module of the suite that touches it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor

try:
    from torch.utils._python_dispatch import TorchDispatchMode
except ImportError as error:  # pragma: no cover - no supported version lacks it
    raise ImportError(
        f"torch {torch.__version__} has no torch.utils._python_dispatch.TorchDispatchMode: "
        "the suite needs another way to see operators, see conformance/instruments/dispatch_tap.py"
    ) from error

Listener = Callable[[Any, Sequence[Any]], None]
"""Function of (operator overload, positional arguments), called for each operator on plain tensors."""


class DispatchTap(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that calls the listeners after each operator on plain tensors, and those of `before` before it.

    An operator on wrapper tensors (DTensor) is seen as the operators on their local tensors.
    """

    def __init__(self, listeners: Sequence[Listener], *, before: Sequence[Listener] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._listeners, self._before = tuple(listeners), tuple(before)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Tell torch.compile to compile inside of the tap, which is then out of its way.

        Otherwise it would fall back to eager inside of a mode.
        """
        return True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Tell torch.compile the same, in versions of torch that ask this instead of `ignore_compile_internals`."""
        return True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Open a context in which listeners see nothing, and nothing is slowed down; it must be inside of the tap."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            self.__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Let a DTensor unwrap itself first: what it runs inside comes back here on plain tensors.
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        for listener in self._before:
            listener(func, args)
        result = func(*args, **(kwargs or {}))
        # Other subclasses (fake tensors of shape propagation) compute nothing that the run uses.
        if all(t in (torch.Tensor, torch.nn.Parameter) for t in types):
            for listener in self._listeners:
                listener(func, args)
        return result
