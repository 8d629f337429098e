"""Masks of dropout: the elements that each call keeps, in forward and in recomputation."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from conformance.instruments.dispatch_tap import Handler, OutcomeHandler
from reference_trainer.observer import Observer, Phase


class DropoutMasks(Observer):
    """Listener of the dispatch tap that keeps the masks that dropout samples, in the order of its calls.

    `tensors` holds them by the key `stepN/dropout/PHASE/PASS/CALL`: bool, of the shape of the activations, True for an
    element that is kept. PHASE is `forward`, or `backward` for recomputation, which starts with the last block. On the
    CPU dropout is `aten::bernoulli_` and a product, or `aten::native_dropout` in a graph that aot_eager runs, as it is
    on devices; hooks of modules would break graphs of torch.compile, and miss the last dropout of a block, before whose
    end recomputation stops. Masks that kernels of inductor draw are not seen.

    The masks of a device are held there until the step is over: a copy would let the host wait in the midst of it.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._phase: Phase = "build"
        self._step = -1
        self._passes: Counter[str] = Counter()
        """Number of forwards and of backwards that have begun in this step."""
        self._calls: Counter[str] = Counter()

    def phase(self, name: Phase, *, step: int) -> None:
        """Remember the phase; each call for forward or backward begins one of a micro-batch.

        When the step is over, its masks are copied to the host.
        """
        if name == "idle":
            self.tensors = {key: mask.cpu() for key, mask in self.tensors.items()}
        if step != self._step:
            self._step = step
            self._passes.clear()
        self._passes[name] += 1
        self._phase = name

    def listen(self, func: Any) -> Handler | None:
        """Return the handler that keeps sampled masks, as a listener of a `DispatchTap`."""
        return self._keep_sample if func._schema.name == "aten::bernoulli_" else None

    def listen_to_outcomes(self, func: Any) -> OutcomeHandler | None:
        """Return the handler that keeps the mask of an operator, as a listener of a `DispatchTap` to outcomes."""
        return self._keep_mask if func._schema.name == "aten::native_dropout" else None

    def _keep_sample(self, args: Sequence[Any]) -> None:
        self._keep(args[0].to(torch.bool))  # a copy: dropout then divides the sampled mask in place

    def _keep_mask(self, _args: Sequence[Any], _kwargs: Mapping[str, Any], result: Sequence[Tensor]) -> None:
        self._keep(result[1])

    def _keep(self, mask: Tensor) -> None:
        if self._phase not in ("forward", "backward"):
            return
        prefix = f"step{self._step}/dropout/{self._phase}/{self._passes[self._phase] - 1}"
        self.tensors[f"{prefix}/{self._calls[prefix]}"] = mask
        self._calls[prefix] += 1
