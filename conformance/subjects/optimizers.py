"""Several optimizers as one: a step of training is a step of each, as of Muon for matrices and AdamW for the rest."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from conformance.subjects.protocol import SubjectMistake

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer | Sequence[Optimizer]]
"""Function of parameters that returns the optimizer, or all optimizers, of a step of training."""


class SeveralOptimizers(Optimizer):
    """Optimizers that train one model together: parameters and state are theirs, and a step is one of each."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        """Take optimizers in the order in which they step; `Optimizer.__init__` would make new groups."""
        self.optimizers = optimizers
        self.defaults: dict[str, Any] = {}
        self.param_groups = [group for each in optimizers for group in each.param_groups]

    @property
    def state(self) -> Mapping[Tensor, Any]:  # type: ignore[override]
        """State of each parameter."""
        return {parameter: state for each in self.optimizers for parameter, state in each.state.items()}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step each optimizer; a closure is not called."""
        for each in self.optimizers:
            each.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of all parameters."""
        for each in self.optimizers:
            each.zero_grad(set_to_none)

    def register_step_pre_hook(self, hook: Any) -> Any:
        """Register a hook that is called before the first optimizer steps."""
        return self.optimizers[0].register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> Any:
        """Register a hook that is called after the last optimizer has stepped."""
        return self.optimizers[-1].register_step_post_hook(hook)


def joined(optimizers: Sequence[Optimizer]) -> Optimizer:
    """Return optimizers as one."""
    return optimizers[0] if len(optimizers) == 1 else SeveralOptimizers(optimizers)


def members(optimizer: Optimizer) -> Sequence[Optimizer]:
    """Return the optimizers that `joined` has made one of."""
    return optimizer.optimizers if isinstance(optimizer, SeveralOptimizers) else [optimizer]


def made(make: MakeOptimizer, parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return the optimizers that a function makes as one. Raises SubjectMistake for other results."""
    result = make(parameters)
    optimizers = [result] if isinstance(result, Optimizer) else [*result]
    if not optimizers or not all(isinstance(each, Optimizer) for each in optimizers):
        raise SubjectMistake("optimizer= must return a torch.optim.Optimizer, or a list of those that step together")
    return joined(optimizers)


def parameters_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """Yield the parameters that an optimizer holds."""
    for group in optimizer.param_groups:
        yield from group["params"]


def learning_rates(optimizer: Optimizer) -> list[float]:
    """Return the present learning rate of each group of an optimizer's parameters; NaN for one that has none."""
    return [float(group.get("lr", math.nan)) for group in optimizer.param_groups]
