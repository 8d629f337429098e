"""Operators of a run: their calls by phase, and the operands of those that add numbers up.

Calls show recomputation, and the implementation that ran. Operands have dtype, shape, strides and alignment, by which a
library of kernels chooses how it adds: only computations with equal operands are sure to get equal bits
(https://docs.nvidia.com/cuda/cublas/#results-reproducibility; alignment and leading dimension are attributes of
cuBLASLt's heuristic search, cublasLtMatrixLayoutAttribute_t and cublasLtMatmulPreferenceAttributes_t).
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor

from conformance.instruments.dispatch_tap import DispatchTap, Handler
from conformance.numerics.lockstep import shared
from reference_trainer.observer import Observer, Phase

Result = TypeVar("Result")
_PHASES: tuple[Phase, ...] = ("evaluate", "forward", "backward", "clip", "optimizer")


class OperatorCount(Observer):
    """Listener of the dispatch tap that counts operators, except those that inductor has fused."""

    def __init__(self) -> None:
        self._counts: dict[str, Counter[str]] = {phase: Counter() for phase in _PHASES}
        self._current: Counter[str] | None = None

    def facts(self) -> dict[str, dict[str, int]]:
        """Return the number of calls in all steps by phase, of `_PHASES`, and operator's name."""
        return {phase: dict(sorted(counts.items())) for phase, counts in self._counts.items()}

    def phase(self, name: Phase, *, step: int) -> None:
        """Remember the phase."""
        self._current = self._counts.get(name)

    def listen(self, func: Any) -> Handler:
        """Return the handler that counts the calls of an operator, as a listener of a `DispatchTap`."""
        name = func._schema.name

        def count(_args: Sequence[Any]) -> None:
            if self._current is not None:
                self._current[name] += 1

        return count


ALIGNMENT_BYTES = 16
"""Bytes that a CUDA kernel loads at once at most, from an address that is a multiple of them."""
_SUMS = (
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::baddbmm",
    "aten::sum",
    "aten::mean",
    "aten::_softmax",
    "aten::_softmax_backward_data",
    "aten::_safe_softmax",
    "aten::_log_softmax",
    "aten::_log_softmax_backward_data",
    "aten::embedding_dense_backward",
    "aten::_fused_rms_norm",
    "aten::_fused_rms_norm_backward",
    "aten::nll_loss_forward",
)
_ATTENTION = "aten::_scaled_dot_product"
_OPERANDS_OF_ATTENTION = 5
"""Number of compared operands: gradient, queries, keys, values and result. Kernels choose the layout of the rest."""


class Operands(Observer):
    """Listener of the dispatch tap that notes the operands of operators that add up, in the first step that it sees."""

    def __init__(self) -> None:
        self.noted: set[str] = set()
        """Operators with their operands, such as `aten::mm float32[8, 4](4, 1) float32[4, 2](1, 4)+8`.

        Of each operand dtype, shape, strides in elements and, after `+`, the bytes by which its address is off a
        multiple of `ALIGNMENT_BYTES`.
        """
        self._step: int | None = None
        self._is_open = False

    def phase(self, name: Phase, *, step: int) -> None:
        """Listen in forward and backward of the first step."""
        if name == "forward" and self._step is None:
            self._step = step
        self._is_open = step == self._step and name in ("forward", "backward")

    def listen(self, func: Any) -> Handler | None:
        """Return the handler that notes the operands of an operator, as a listener of a `DispatchTap`."""
        name = func._schema.name
        is_attention = name.startswith(_ATTENTION)
        if name not in _SUMS and not is_attention:
            return None
        count = _OPERANDS_OF_ATTENTION if is_attention else None

        def note(args: Sequence[Any]) -> None:
            tensors = [argument for argument in args if isinstance(argument, Tensor)][:count]
            if self._is_open and tensors[0].is_floating_point():
                self.noted.add(" ".join([name, *map(_spelled, tensors)]))

        return note


def with_operands(compute: Callable[[], Result]) -> tuple[Result, set[str]]:
    """Return the result of a function, and the operands that it hands to operators, as `Operands.noted` has them."""
    operands = Operands()
    operands.phase("forward", step=0)
    with shared(DispatchTap([operands.listen])):
        result = compute()
    return result, operands.noted


def _spelled(tensor: Tensor) -> str:
    offset_bytes = tensor.data_ptr() % ALIGNMENT_BYTES
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype}{list(tensor.shape)}{tensor.stride()}{f'+{offset_bytes}' if offset_bytes else ''}"
