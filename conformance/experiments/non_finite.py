"""Non-finite numbers in the gradients of one rank."""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from conformance.instruments.sharding import local
from reference_trainer.model import Transformer
from reference_trainer.observer import Observer, Phase


class ClippingReached(Exception):
    """Clipping is over, and the step ends here: no later collective leaves a rank waiting for another."""


class NonFiniteInjector(Observer):
    """Observer that puts `value` into a gradient of an `active` rank, at the point in time that `when` names.

    `backward`: into all elements of the gradient that backward of the rank's first block is given. `scaled` and
    `reduced`: into the first element of the shard of a reduced gradient, before or after unscaling; the parameter is
    `name`, or any parameter whose shard is not empty.
    """

    def __init__(self, *, active: bool) -> None:
        self._active = active
        self._model: Transformer | None = None
        self.when: Literal["never", "backward", "scaled", "reduced"] = "never"
        self.value = 0.0
        self.name: str | None = None

    def initialized(self, model: Transformer) -> None:
        """Remember the model, and register a hook on its first block."""
        self._model = model
        next(iter(model.blocks.values())).register_forward_hook(self._hook_backward)

    def phase(self, name: Phase, *, step: int) -> None:
        """Change a gradient that is still scaled."""
        if name == "unscale" and self.when == "scaled" and self._model is not None:
            self._change_shard(self._model)

    def gradients(self, model: Transformer, *, step: int) -> None:
        """Change a gradient that is not clipped yet."""
        if self.when == "reduced":
            self._change_shard(model)

    def _change_shard(self, model: Transformer) -> None:
        if not self._active:
            return
        named = ((name, p.grad) for name, p in model.named_parameters() if p.grad is not None)
        shards = (local(grad) for name, grad in named if self.name in (None, name))
        next(shard for shard in shards if shard.numel()).view(-1)[0] = self.value

    def _hook_backward(self, _module: nn.Module, _inputs: Any, output: Tensor) -> None:
        if self._active and self.when == "backward":
            output.register_hook(self._non_finite)  # type: ignore[no-untyped-call]

    def _non_finite(self, grad: Tensor) -> Tensor:
        return torch.full_like(grad, self.value)
