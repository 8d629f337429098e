"""Dispatch tap: the dispatch mode of a run, through which other instruments see every operator that torch executes.

`TorchDispatchMode` lives in `torch.utils._python_dispatch`: private by name, but the base of the public
`CommDebugMode`, and the only place below autograd, FSDP2 and DTensor where all torch versions from 2.6 on show their
collectives under stable names. `AsyncCollectiveTensor`, which functional collectives return until it is waited for, is
as private. No other module of the suite touches either.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

try:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.utils._python_dispatch import TorchDispatchMode
except ImportError as error:  # pragma: no cover - no supported version lacks them
    raise ImportError(
        f"torch {torch.__version__} lacks TorchDispatchMode or AsyncCollectiveTensor ({error}): "
        "the suite needs another way to see operators, see conformance/instruments/dispatch_tap.py"
    ) from error

Handler = Callable[[Sequence[Any]], None]
"""Function of the positional arguments of one call of an operator."""
Listener = Callable[[Any], Handler | None]
"""Function of an operator overload that returns the handler of the operator's calls, None for an operator to ignore.

A tap asks each listener once for each operator: a run calls thousands of operators, but few different ones."""
EarlyHandler = Callable[[Sequence[Any], Mapping[str, Any]], None]
"""Function of the positional and the keyword arguments of a call of an operator that is about to run."""
EarlyListener = Callable[[Any], EarlyHandler | None]
"""Function of an operator overload that returns the handler of its calls before they run; see `Listener`."""
OutcomeHandler = Callable[[Sequence[Any], Mapping[str, Any], Any], None]
"""Function of the positional arguments, the keyword arguments and the result of one call of an operator."""
OutcomeListener = Callable[[Any], OutcomeHandler | None]
"""Function of an operator overload that returns the handler of its calls with their results; see `Listener`."""
_Handlers = tuple[tuple[EarlyHandler, ...], tuple[Handler, ...], tuple[OutcomeHandler, ...]]
"""Handlers of an operator: before its calls, after them, and of their outcomes."""
_Answer = TypeVar("_Answer")


class DispatchTap(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that calls its listeners for each operator on plain tensors.

    Listeners of `before` are called before the operator runs, those of `outcomes` also get its result. An operator on
    wrapper tensors is seen as the operators on the wrapped tensors: the shards of DTensors, the results of functional
    collectives, the numbers and scales of float8 tensors.
    """

    def __init__(
        self,
        listeners: Sequence[Listener],
        *,
        before: Sequence[EarlyListener] = (),
        outcomes: Sequence[OutcomeListener] = (),
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._listeners, self._before, self._outcomes = tuple(listeners), tuple(before), tuple(outcomes)
        self._is_deaf = False
        self._handlers: dict[Any, _Handlers] = {}
        """Handlers of the calls of each operator seen so far."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile compile inside of the tap, which is then left while it traces.

        Otherwise it would fall back to eager inside of a mode.
        """
        return True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return the same as `ignore_compile_internals`, for versions of torch that call this instead."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Ask torch not to wrap `__torch_dispatch__` in `torch._dynamo.disable`, a quarter of the mode's overhead.

        Nothing is traced here if each compiled function is one graph: torch.compile leaves the mode while it traces
        (`ignore_compile_internals`), and calls its graphs with tracing disabled.
        """
        return False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Open a context, inside of the tap, in which listeners see nothing and operators run at full speed."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            self.__enter__()  # type: ignore[no-untyped-call]

    @contextmanager
    def deaf(self) -> Iterator[None]:
        """Open a context in which listeners see nothing, where other modes may be above the tap, as in a hook."""
        before, self._is_deaf = self._is_deaf, True
        try:
            yield
        finally:
            self._is_deaf = before

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Let a wrapper unwrap itself first: its inner operators come back here on plain tensors.
        if types and _any_wrapper(tuple(types)):
            return NotImplemented
        if self._is_deaf:
            return func(*args, **(kwargs or {}))
        before, after, outcomes = self._handlers.get(func) or self._handlers_of(func)
        for handle_early in before:
            handle_early(args, kwargs or {})
        result = func(*args, **kwargs) if kwargs else func(*args)
        # Other subclasses (fake tensors of shape propagation) compute nothing that the run uses.
        if not types or _all_plain(tuple(types)):
            for handle in after:
                handle(args)
            for handle_outcome in outcomes:
                handle_outcome(args, kwargs or {}, result)
        return result

    def _handlers_of(self, func: Any) -> _Handlers:
        """Ask the listeners for their handlers of an operator, and remember the answers."""
        handlers = _answers(self._before, func), _answers(self._listeners, func), _answers(self._outcomes, func)
        self._handlers[func] = handlers
        return handlers


class UntracedTap(DispatchTap):  # type: ignore[no-untyped-call]
    """Tap of runs whose compiled functions are several graphs: between these torch.compile would trace listeners."""

    __torch_dispatch__ = torch.compiler.disable(DispatchTap.__torch_dispatch__)  # type: ignore[no-untyped-call]


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors that a wrapper such as a DTensor holds, or a plain tensor itself; no operator is issued.

    `__tensor_flatten__` is the protocol of wrapper subclasses under `torch.compile`.
    """
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor
    else:
        held = (getattr(tensor, name) for name in flatten()[0])  # of a DTensor also its mesh
        for inner in held:
            if isinstance(inner, Tensor):
                yield from plain_tensors(inner)


def plain(tensor: Tensor) -> Tensor:
    """Return the plain tensor that a wrapper wraps, or that float8 numbers and their scale stand for.

    The result of a functional collective stays as it is: operators on it wait for it, and those on its tensor do not.
    """
    if isinstance(tensor, AsyncCollectiveTensor):
        return tensor
    to_original_precision = getattr(tensor, "to_original_precision", None)  # of torchao
    return to_original_precision() if to_original_precision else next(plain_tensors(tensor))


@cache
def _any_wrapper(types: tuple[type, ...]) -> bool:
    return any(issubclass(t, DTensor | AsyncCollectiveTensor) or hasattr(t, "__tensor_flatten__") for t in types)


@cache
def _all_plain(types: tuple[type, ...]) -> bool:
    return all(t in (torch.Tensor, torch.nn.Parameter) for t in types)


def _answers(listeners: Sequence[Callable[[Any], _Answer | None]], func: Any) -> tuple[_Answer, ...]:
    return tuple(handler for handler in (listener(func) for listener in listeners) if handler is not None)
