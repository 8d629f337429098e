"""Mixture of experts with an own loop, in the style of a recipe that prepares the last backward pass by hand.

    conformance judge benchmarks/mistakes/trainers/moe.py:Recipe

Gradients stay unreduced until the last micro-batch of a step; the router has an optimizer group of its own.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.optim import SGD, Optimizer

from conformance.subjects.cells import SubjectCell
from conformance.subjects.protocol import StepObserver

VOCAB, DIM, EXPERTS, TOP, LAYERS, SEQ, SAMPLES = 40, 16, 4, 2, 2, 9, 4
Batch = dict[str, Tensor]


class Router(nn.Module):
    """Weights of the experts for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, DIM) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        """Return weights (tokens, EXPERTS), of which TOP are not zero, of `x`, (tokens, DIM)."""
        scores = F.linear(x.float(), self.weight.float())
        kept = scores.topk(TOP, dim=-1).indices
        mask = torch.full_like(scores, float("-inf")).scatter(-1, kept, 0.0)
        return (scores + mask).softmax(-1).to(x.dtype)


class Experts(nn.Module):
    """Feed-forward networks whose weights are stacked."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(EXPERTS, DIM, 4 * DIM) * 0.2)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * DIM, DIM) * 0.2)

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted outputs (tokens, DIM) of `x`, (tokens, DIM)."""
        gate, up = torch.einsum("td,edf->etf", x, self.gate_up).chunk(2, dim=-1)
        y = torch.einsum("etf,efd->etd", F.silu(gate) * up, self.down)
        return torch.einsum("etd,te->td", y, weights)


class Layer(nn.Module):
    """Causal mean over tokens, and the mixture of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.norm = nn.Linear(DIM, DIM), nn.LayerNorm(DIM)
        self.router, self.experts = Router(), Experts()

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`, (samples, tokens, DIM)."""
        seen = torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
        x = x + self.mix(x.cumsum(1) / seen)
        tokens = self.norm(x).flatten(0, 1)
        return cast("Tensor", x + self.experts(tokens, self.router(tokens)).view_as(x))


class MixtureOfExperts(nn.Module):
    """Decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.lm_head = nn.Linear(DIM, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return logits (samples, tokens, VOCAB)."""
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return cast("Tensor", self.lm_head(x))


def fsdp_modules(model: nn.Module) -> Iterable[FSDPModule]:
    """Yield the modules that were sharded."""
    yield from (module for module in model.modules() if isinstance(module, FSDPModule))


def prepare_for_grad_accumulation(model: nn.Module) -> None:
    """Keep gradients unreduced on each rank."""
    for module in fsdp_modules(model):
        module.set_requires_gradient_sync(False, recurse=False)


def prepare_for_final_backward(model: nn.Module) -> None:
    """Reduce accumulated gradients in the next backward pass."""
    for module in fsdp_modules(model):
        module.set_requires_gradient_sync(True, recurse=False)


class MoERun:
    """One rank that trains."""

    def __init__(self, model: MixtureOfExperts, optimizer: Optimizer, *, max_norm: float) -> None:
        self.model, self.optimizer, self.max_norm = model, optimizer, max_norm
        self.log: list[float] = []

    @property
    def data_rank(self) -> int:
        """Index of this rank among those with different data."""
        return dist.get_rank()

    def step(self, step: int, micro_batches: Sequence[Batch], observer: StepObserver) -> float:
        """Train a step; returns the mean loss of a token."""
        num_label_tokens = self.total(sum(num_labels(batch) for batch in micro_batches))
        losses: list[Tensor] = []
        prepare_for_grad_accumulation(self.model)
        self.optimizer.zero_grad()
        for index, batch in enumerate(micro_batches):
            if index == len(micro_batches) - 1:
                prepare_for_final_backward(self.model)
            observer.phase("forward", step=step)
            loss = summed_loss(self.model, batch)
            observer.phase("backward", step=step)
            (loss * dist.get_world_size() / num_label_tokens).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        observer.gradients(self.model, step=step)
        observer.phase("clip", step=step)
        grad_norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        observer.clipped(self.model, norm=grad_norm, step=step)
        observer.phase("optimizer", step=step)
        self.optimizer.step()
        observer.phase("idle", step=step)
        self.log.append(self.total(float(torch.stack(losses).sum())) / num_label_tokens)
        return self.log[-1]

    def total(self, number: float) -> float:
        """Return the sum of a number over all ranks."""
        total = torch.tensor(number, dtype=torch.float64)
        dist.all_reduce(total)
        return float(total)


def num_labels(batch: Batch) -> int:
    """Return the number of labels that count."""
    return int((batch["labels"] != -100).sum())


def summed_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the summed cross entropy of a micro-batch."""
    logits = model(batch["input_ids"])
    return F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten(), reduction="sum")


class Recipe:
    """The trainer for `conformance judge`, see `conformance.subjects.protocol.Subject`."""

    name = "moe-recipe"
    shims: Sequence[str] = ()

    def versions(self) -> Mapping[str, str]:
        """Return the version of torch."""
        return {"torch": str(torch.__version__)}

    def unsupported(self, cell: SubjectCell) -> str | None:
        """Return the feature that a cell needs and the trainer lacks, or None."""
        lacking = {
            "tensor parallelism": "tp" in cell.shape,
            "tied weights": cell.tied,
            "meta device": cell.init == "meta",
            "offloading": cell.offload,
            "checkpoint": cell.resumed,
        }
        return next((f"no {feature}" for feature, is_needed in lacking.items() if is_needed), None)

    def model(self, *, tied: bool) -> nn.Module:
        """Return the model of one process."""
        return MixtureOfExperts()

    def batch(self, generator: torch.Generator) -> Batch:
        """Return a micro-batch; only answers count."""
        tokens = torch.randint(VOCAB, (SAMPLES, SEQ + 1), generator=generator)
        answers = torch.randint(2, SEQ, (SAMPLES, 1), generator=generator)
        labels = tokens[:, 1:].masked_fill(torch.arange(SEQ) < SEQ - answers, -100)
        return {"input_ids": tokens[:, :-1], "labels": labels}

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the loss of a micro-batch."""
        return summed_loss(model, batch)

    def count(self, batch: Batch) -> int:
        """Return the number of labels that count."""
        return num_labels(batch)

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """Return SGD with momentum."""
        return SGD(parameters, lr=0.05, momentum=0.9)

    def build(self, cell: SubjectCell, *, device: torch.device, max_norm: float) -> MoERun:
        """Shard experts and layers, and make the optimizer."""
        model = MixtureOfExperts()
        mesh = init_device_mesh(device.type, tuple(cell.shape.values()), mesh_dim_names=tuple(cell.shape))
        param_dtype = torch.bfloat16 if cell.precision == "bf16" else None
        options: dict[str, Any] = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(param_dtype, torch.float32)}
        for layer in model.layers:
            fully_shard(cast("Layer", layer).experts, **options)
            fully_shard(layer, **options)
        fully_shard(model, **options)
        routers = [parameter for name, parameter in model.named_parameters() if "router" in name]
        others = [parameter for name, parameter in model.named_parameters() if "router" not in name]
        optimizer = SGD([{"params": others}, {"params": routers}], lr=0.05, momentum=0.9)
        return MoERun(model, optimizer, max_norm=max_norm)
