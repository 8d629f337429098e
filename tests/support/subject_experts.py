"""Subjects with a mixture of experts, with and without expert parallelism: each rank then holds some of the experts.

Tokens are exchanged by all-to-all, so that the gradients of an expert are sums over the tokens of all its ranks.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.functional import cross_entropy, gelu
from torch.nn.utils import get_total_norm

from conformance.subjects import ParallelConfig, subject
from conformance.subjects.protocol import Batch

WIDTH, HIDDEN, EXPERTS, CHOSEN, CLASSES = 16, 24, 4, 2, 8


class Exchange(torch.autograd.Function):
    """All-to-all of rows, whose gradients go the way back."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, received: Sequence[int], sent: Sequence[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.received, ctx.sent, ctx.group = received, sent, group
        result = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(result, rows.contiguous(), [*received], [*sent], group=group)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return exchanged(gradient, ctx.sent, ctx.received, ctx.group), None, None, None


def exchanged(rows: Tensor, received: Sequence[int], sent: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Return rows of the other ranks for those of this one, numbers of both by rank."""
    return Exchange.apply(rows, received, sent, group)  # type: ignore[no-any-return,no-untyped-call]


class Experts(nn.Module):
    """Weights of all experts, stacked; `group` has the ranks that hold equal numbers of them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / HIDDEN**0.5)
        self.group: dist.ProcessGroup | None = None

    def forward(self, rows: Tensor, experts: Tensor) -> Tensor:
        """Compute each row, of shape (rows, WIDTH), with the expert of its number."""
        if self.group is None:
            return self.compute(rows, experts)
        held = EXPERTS // self.group.size()
        order = experts.argsort(stable=True)
        sent = torch.bincount(experts // held, minlength=self.group.size())
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        numbers = exchanged(experts[order], received.tolist(), sent.tolist(), self.group) % held
        computed = self.compute(exchanged(rows[order], received.tolist(), sent.tolist(), self.group), numbers)
        returned = exchanged(computed, sent.tolist(), received.tolist(), self.group)
        return torch.zeros_like(rows).index_copy(0, order, returned)

    def compute(self, rows: Tensor, numbers: Tensor) -> Tensor:
        """Compute rows with the experts of this rank, by their numbers there."""
        up, down = (weight.to_local() if isinstance(weight, DTensor) else weight for weight in (self.up, self.down))
        computed = torch.zeros_like(rows)
        for number in range(len(up)):
            (places,) = torch.where(numbers == number)
            computed = computed.index_copy(0, places, gelu(rows[places] @ up[number]) @ down[number])
        return computed


class Mixture(nn.Module):
    """Residual layer of the experts that a gate chooses for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = Experts()
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of tokens of shape (tokens, WIDTH)."""
        normed = self.norm(x)
        weights, chosen = self.gate(normed).softmax(-1).topk(CHOSEN, dim=-1)
        rows = self.experts(normed.repeat_interleave(CHOSEN, dim=0), chosen.flatten())
        mixed = (rows.view(-1, CHOSEN, WIDTH) * weights.unsqueeze(-1)).sum(1)
        return self.head(x + mixed)  # type: ignore[no-any-return]


def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    labels = torch.randint(CLASSES, (12,), generator=generator)
    ignored = torch.rand(12, generator=generator) < 0.3
    return torch.randn(12, WIDTH, generator=generator), labels.masked_fill(ignored, -100)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return cross_entropy(model(batch[0]).float(), batch[1], reduction="sum")


def clip_by_mesh(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Clip parameters of several meshes by one norm; torch's own function takes those of one mesh."""
    held = [parameter for parameter in parameters if parameter.grad is not None]
    meshes: dict[object, list[Tensor]] = {}
    for parameter in held:
        gradient = parameter.grad
        assert gradient is not None
        meshes.setdefault(gradient.device_mesh if isinstance(gradient, DTensor) else None, []).append(gradient)
    norms = [get_total_norm(gradients) for gradients in meshes.values()]
    norm: Tensor = torch.stack([each.full_tensor() if isinstance(each, DTensor) else each for each in norms]).norm()
    for parameter in held:
        gradient = parameter.grad
        shard = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        shard.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))  # type: ignore[union-attr]
    return norm


def hold_experts(model: Mixture, mesh: DeviceMesh) -> None:
    """Let each rank of a mesh of one dimension hold an equal share of the experts."""
    experts = model.experts
    for name, weight in [*experts.named_parameters()]:
        setattr(experts, name, nn.Parameter(distribute_tensor(weight.detach(), mesh, [Shard(0)])))
    experts.group = mesh.get_group()


def divide_gradients(experts: Experts, ranks: int) -> None:
    """Divide gradients that are sums over the tokens of ranks, as the mean over ranks of all other gradients is."""
    for weight in experts.parameters():
        weight.register_hook(lambda gradient: gradient / ranks)  # type: ignore[no-untyped-call]


def divide_reductions(module: FSDPModule, ranks: int, *, shards: int) -> None:
    """Divide reduced gradients by a number of ranks.

    gloo cannot multiply before it adds up; shards of one rank would be divided twice, see
    `findings/divide_factor_of_one_shard.py`.
    """
    module.set_gradient_divide_factor(ranks)
    module.set_force_sum_reduction_for_comms(shards > 1)


mixture = subject(model=Mixture, loss=loss, batch=batch, meshes=["dp2", "hsdp2x2"], clip=clip_by_mesh)


@mixture
def without_expert_parallelism(model: Mixture, mesh: DeviceMesh, config: ParallelConfig) -> None:
    """Shard the weights of experts over the same ranks as all others."""
    fully_shard(model.experts, mesh=mesh)
    fully_shard(model, mesh=mesh)


@mixture
def experts_ignored(model: Mixture, mesh: DeviceMesh, config: ParallelConfig) -> None:
    """Leave experts, which the ranks of `dp_shard` hold, to no module of FSDP2."""
    hold_experts(model, mesh["dp_shard"])
    copies = mesh.size() // mesh["dp_shard"].size()
    if copies > 1:
        for name, weight in [*model.experts.named_parameters()]:
            placed = DTensor.from_local(weight.detach().to_local(), mesh, [Replicate(), Shard(0)])  # type: ignore[attr-defined]
            setattr(model.experts, name, nn.Parameter(placed))
        for weight in model.experts.parameters():
            weight.register_post_accumulate_grad_hook(lambda w: add_up(w, mesh["dp_replicate"].get_group()))  # type: ignore[no-untyped-call]
    divide_gradients(model.experts, mesh.size())
    fully_shard(model, mesh=mesh, ignored_params={*model.experts.parameters()})


def add_up(weight: nn.Parameter, group: dist.ProcessGroup) -> None:
    assert isinstance(weight.grad, DTensor)
    dist.all_reduce(weight.grad.to_local(), group=group)


@mixture
def experts_in_groups_of_their_own(model: Mixture, mesh: DeviceMesh, config: ParallelConfig) -> None:
    """Shard experts over the ranks that hold the same ones, and other weights over all ranks, as torchtitan does."""
    copies = mesh.size() // 2
    own = init_device_mesh(mesh.device_type, (copies, 2), mesh_dim_names=("efsdp", "ep"))
    hold_experts(model, own["ep"])
    divide_reductions(fully_shard(model.experts, mesh=own["efsdp"]), mesh.size(), shards=copies)
    fully_shard(model, mesh=own._flatten("dp"))


@mixture
def experts_with_copies(model: Mixture, mesh: DeviceMesh, config: ParallelConfig) -> None:
    """Let FSDP2 reduce the gradients of experts over ranks that hold copies, whose shards are of one rank."""
    own = init_device_mesh(mesh.device_type, (mesh.size() // 2, 1, 2), mesh_dim_names=("replicate", "one", "ep"))
    hold_experts(model, own["ep"])
    divide_reductions(fully_shard(model.experts, mesh=own["replicate", "one"]), mesh.size(), shards=1)
    fully_shard(model, mesh=mesh)


@mixture
def experts_not_divided(model: Mixture, mesh: DeviceMesh, config: ParallelConfig) -> None:
    """Forget that gradients of experts are sums over tokens of several ranks: a fault."""
    hold_experts(model, mesh["dp_shard"])
    fully_shard(model, mesh=mesh, ignored_params={*model.experts.parameters()})


@mixture
def experts_as_plain_tensors(model: Mixture, mesh: DeviceMesh, config: ParallelConfig) -> None:
    """Hold experts as tensors that do not say which these are: a mistake."""
    rank, held = dist.get_rank() % 2, EXPERTS // 2
    for name, weight in [*model.experts.named_parameters()]:
        setattr(model.experts, name, nn.Parameter(weight.detach()[rank * held : (rank + 1) * held].clone()))
    model.experts.group = mesh["dp_shard"].get_group()
    divide_gradients(model.experts, 2)
    fully_shard(model, mesh=mesh, ignored_params={*model.experts.parameters()})


@mixture
def gate_left_out(model: Mixture, mesh: DeviceMesh, config: ParallelConfig) -> None:
    """Forget the gate, which is as it was on each rank: a fault."""
    hold_experts(model, mesh["dp_shard"])
    divide_gradients(model.experts, mesh.size())
    for layer in (model.norm, model.head):
        fully_shard(layer, mesh=mesh)
