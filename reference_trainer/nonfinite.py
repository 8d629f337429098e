"""End of a run with NaN or infinity, and the search for the module that produced it first."""

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.nn.utils import get_total_norm

from reference_trainer.model import Transformer
from reference_trainer.observer import Observer
from reference_trainer.train import StepMetrics

_MODULE_DEPTH = 3  # layers.3.attention


class NonFiniteError(Exception):
    """Number of a run that is not finite. The message names the step and the module; every rank raises this error."""


class NonFiniteWatch(Observer):
    """Monitor of the largest absolute values of parameters and gradients, by module, of the last step.

    Clipping and the optimizer spread one NaN over the model, so the values are those before both. They are this rank's,
    and stay on their device: ranks communicate only about a step that was not finite. Methods that raise NonFiniteError
    must be called on all ranks.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._parameters: dict[str, Tensor] = {}
        self._gradients: dict[str, Tensor] = {}

    def gradients(self, model: Transformer, *, step: int) -> None:
        """Keep the values of the step, which has been through backward and has not been clipped."""
        self._parameters = _largest_by_module(model, lambda parameter: parameter)
        self._gradients = _largest_by_module(model, lambda parameter: parameter.grad)

    def require_finite(self, metrics: StepMetrics) -> None:
        """Raise NonFiniteError if the loss or the gradient norm is not finite.

        A step that was skipped may have any gradient norm: the loss scale is found that way. A loss must be finite at
        any scale.
        """
        if not math.isfinite(metrics.loss) or not (metrics.skipped or math.isfinite(metrics.grad_norm)):
            problem = f"the loss is {metrics.loss:.4g}, the gradient norm {metrics.grad_norm:.4g}"
            raise self.error(problem, step=metrics.step)

    def require_finite_parameters(self, model: Transformer, *, step: int) -> None:
        """Raise NonFiniteError if the optimizer has made a parameter infinite or NaN in the step that it just did."""
        values = self._over_ranks(_largest_by_module(model, lambda parameter: parameter))
        if modules := _not_finite(values):
            problem = f"the optimizer made parameters of {modules[0]} not finite"
            raise NonFiniteError(f"step {step}: {problem} ({_count(modules, values)})")

    def error(self, problem: str, *, step: int) -> NonFiniteError:
        """Return the error for a step that was not finite: the problem, and the module in which it began."""
        return NonFiniteError(f"step {step}: {problem}; {self._origin()}")

    def _origin(self) -> str:
        """Search parameters first, in the order of forward, then gradients, in the order of backward."""
        parameters, gradients = self._over_ranks(self._parameters), self._over_ranks(self._gradients)
        if modules := _not_finite(parameters):
            return f"parameters of {modules[0]} were not finite before the step ({_count(modules, parameters)})"
        if modules := _not_finite(gradients):
            return (
                f"parameters were finite, gradients of {modules[-1]} are not, first in the order of backward "
                f"({_count(modules, gradients)})"
            )
        largest = max(gradients, key=lambda name: gradients[name])
        return f"parameters and gradients are finite, the largest gradient is {gradients[largest]:.3g}, of {largest}"

    def _over_ranks(self, local: dict[str, Tensor]) -> dict[str, float]:
        """Return the largest values of all ranks, a collective call; infinity stands for NaN, which MAX could lose."""
        values = torch.stack([value.to(self._device) for value in local.values()])
        values = values.where(~values.isnan(), math.inf)
        dist.all_reduce(values, dist.ReduceOp.MAX)
        return dict(zip(local, values.tolist(), strict=True))


def _not_finite(values: dict[str, float]) -> list[str]:
    return [name for name, value in values.items() if not math.isfinite(value)]


def _count(modules: list[str], among: dict[str, float]) -> str:
    return f"{len(modules)} of {len(among)} modules"


@torch.no_grad()
def _largest_by_module(model: Transformer, tensor_of: Callable[[Parameter], Tensor | None]) -> dict[str, Tensor]:
    """Largest absolute value of this rank's shards by module, an fp32 scalar: NaN if there is one, 0 without shards.

    Modules have the same names and order, that of forward, on every rank.
    """
    shards: dict[str, list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        module = ".".join(name.split(".")[:-1][:_MODULE_DEPTH])
        module_shards = shards.setdefault(module, [])
        tensor = tensor_of(parameter)
        if tensor is not None:
            module_shards.append(tensor.to_local() if isinstance(tensor, DTensor) else tensor)
    not_empty = {module: [shard for shard in tensors if shard.numel()] for module, tensors in shards.items()}
    return {module: get_total_norm(tensors, math.inf).float() for module, tensors in not_empty.items()}
