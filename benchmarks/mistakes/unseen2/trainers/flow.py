"""Normalising flow of coupling layers, trained by schedule-free AdamW.

conformance judge flow.py:FlowTraining
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.optim import Optimizer

from conformance.subjects.cells import SubjectCell
from conformance.subjects.protocol import StepObserver

SIZE, CONTEXT, HIDDEN, LAYERS = 6, 3, 16, 4
Points = tuple[Tensor, Tensor]


class Coupling(nn.Module):
    """Affine function of some coordinates, by a network of the others."""

    mask: Tensor
    order: Tensor

    def __init__(self, index: int) -> None:
        super().__init__()
        self.register_buffer("mask", torch.arange(SIZE) % 2 == index % 2)
        self.register_buffer("order", torch.arange(SIZE).roll(index))
        self.network = nn.Sequential(
            nn.Linear(SIZE + CONTEXT, HIDDEN),
            nn.ELU(),
            nn.Linear(HIDDEN, HIDDEN),
            nn.ELU(),
            nn.Linear(HIDDEN, 2 * SIZE),
        )
        self.sharpness = nn.Parameter(torch.ones(1))
        self.log_scale, self.shift = nn.Parameter(torch.zeros(SIZE)), nn.Parameter(torch.zeros(SIZE))

    def forward(self, x: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        """Return points (samples, SIZE), and the logarithm of the determinant (samples,)."""
        x = (x * self.log_scale.exp() + self.shift)[:, self.order]
        log_s, t = self.network(torch.cat([x * self.mask, context], -1)).chunk(2, -1)
        log_s = torch.tanh(log_s) * self.sharpness * ~self.mask
        return x * log_s.exp() + t * ~self.mask, log_s.sum(-1) + self.log_scale.sum()


class Flow(nn.Module):
    """Layers from points to a normal distribution."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Coupling(index) for index in range(LAYERS))

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        """Return the logarithm of the density at each point, (samples,)."""
        total = torch.zeros(len(x), dtype=x.dtype)
        for layer in self.layers:
            x, log_determinant = layer(x, context)
            total = total + log_determinant
        return total - 0.5 * (x.square() + math.log(2 * math.pi)).sum(-1)


class ScheduleFree(Optimizer):
    """AdamW that averages its iterates in place of a schedule; parameters are where gradients are taken."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 5e-3) -> None:
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.99), "eps": 1e-8, "decay": 0.01, "step": 0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Take a step."""
        for group in self.param_groups:
            group["step"] += 1
            first, second = group["betas"]
            share = 1 / group["step"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(z=p.detach().clone(), square=torch.zeros_like(p))
                state["square"].mul_(second).addcmul_(p.grad, p.grad, value=1 - second)
                denominator = (state["square"] / (1 - second ** group["step"])).sqrt().add_(group["eps"])
                update = (p.grad / denominator).add_(p, alpha=group["decay"])
                p.lerp_(state["z"], share)
                p.add_(update, alpha=group["lr"] * (first * (1 - share) - 1))
                state["z"].sub_(update, alpha=group["lr"])


def negative_log_likelihood(model: nn.Module, batch: Points) -> Tensor:
    """Return the negative logarithm of the density, summed over points."""
    return cast("Tensor", -model(*batch).sum())


class FlowRun:
    """One rank that trains."""

    def __init__(self, model: Flow, optimizer: Optimizer, *, max_norm: float) -> None:
        self.model, self.optimizer, self.max_norm = model, optimizer, max_norm

    @property
    def data_rank(self) -> int:
        """Index of this rank among those with different data."""
        return dist.get_rank()

    def step(self, step: int, micro_batches: Sequence[Points], observer: StepObserver) -> float:
        """Train a step, whose micro-batches are reduced one by one."""
        totals = torch.tensor([float(sum(len(x) for x, _ in micro_batches)), 0.0], dtype=torch.float64)
        dist.all_reduce(totals[:1])
        for batch in micro_batches:
            observer.phase("forward", step=step)
            loss = negative_log_likelihood(self.model, batch)
            observer.phase("backward", step=step)
            torch.autograd.backward(loss / totals[0] * dist.get_world_size())
            totals[1] += loss.detach()
        observer.gradients(self.model, step=step)
        observer.phase("clip", step=step)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm, foreach=False)
        observer.clipped(self.model, norm=norm, step=step)
        observer.phase("optimizer", step=step)
        self.optimizer.step()
        for parameter in self.model.parameters():
            parameter.grad = None
        observer.phase("idle", step=step)
        dist.all_reduce(totals[1:])
        return float(totals[1] / totals[0])


class FlowTraining:
    """The trainer for `conformance judge`."""

    name = "flow"
    shims: Sequence[str] = ()

    def versions(self) -> Mapping[str, str]:
        """Return the version of torch."""
        return {"torch": str(torch.__version__)}

    def unsupported(self, cell: SubjectCell) -> str | None:
        """Return why a cell cannot be run, or None."""
        if cell.init == "meta" or cell.tied or cell.resumed or cell.offload or "tp" in cell.shape:
            return "not written"
        return None

    def model(self, *, tied: bool) -> nn.Module:
        """Return the model."""
        return Flow()

    def batch(self, generator: torch.Generator) -> Points:
        """Return points on noisy curves, and the context of each."""
        context = torch.randn(8, CONTEXT, generator=generator)
        noise = torch.randn(8, SIZE, generator=generator)
        return (context.sum(-1, keepdim=True) + torch.arange(SIZE)).sin() + 0.2 * noise, context

    def loss(self, model: nn.Module, batch: Points) -> Tensor:
        """Return the loss."""
        return negative_log_likelihood(model, batch)

    def count(self, batch: Points) -> int:
        """Return the number of points."""
        return len(batch[0])

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """Return the optimizer."""
        return ScheduleFree(parameters)

    def build(self, cell: SubjectCell, *, device: torch.device, max_norm: float) -> FlowRun:
        """Shard each layer."""
        model = Flow()
        mesh = init_device_mesh(device.type, tuple(cell.shape.values()), mesh_dim_names=tuple(cell.shape))
        param_dtype = torch.bfloat16 if cell.precision == "bf16" else None
        options: dict[str, Any] = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(param_dtype, torch.float32)}
        for layer in model.layers:
            fully_shard(layer, **options)
        fully_shard(model, **options)
        for earlier, later in zip(model.layers[:-1], model.layers[1:], strict=True):
            cast("FSDPModule", earlier).set_modules_to_forward_prefetch([cast("FSDPModule", later)])
        return FlowRun(model, self.make_optimizer(model.parameters()), max_norm=max_norm)
