"""Trainers with tensor parallelism whose traffic is judged: right ones of many kinds, and others that send too much."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.distributed._functional_collectives import all_gather_tensor, reduce_scatter_tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy, silu
from torch.utils.checkpoint import checkpoint

from conformance.subjects import ParallelConfig, subject
from tests.support.subject_experts import clip_by_mesh

WIDTH, LENGTH, CLASSES = 16, 4, 8
SEQUENCE = Shard(1)


class Gated(nn.Module):
    """Two projections of one input."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(silu(self.left(x)) * self.right(x))  # type: ignore[no-any-return]


class Model(nn.Module):
    """Layers on samples of several positions, without residual paths: only the next layer reads a layer's result."""

    def __init__(
        self,
        *,
        checkpointed: bool = False,
        first_position: bool = False,
        saved_on_cpu: bool = False,
    ) -> None:
        super().__init__()
        self.checkpointed, self.first_position, self.saved_on_cpu = checkpointed, first_position, saved_on_cpu
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.entry = Gated()
        self.middle = nn.Identity()
        self.norm = nn.LayerNorm(WIDTH)
        self.gated = Gated()
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        with save_on_cpu() if self.saved_on_cpu else nullcontext():
            x = self.norm(self.middle(self.entry(x + self.positions)))
            x = checkpoint(self.gated, x, use_reentrant=False) if self.checkpointed else self.gated(x)
        x = x[:, :1].expand(x.shape) if self.first_position else x
        return self.head(x)  # type: ignore[no-any-return]


def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    labels = torch.randint(CLASSES, (4, LENGTH), generator=generator)
    return torch.randn(4, LENGTH, WIDTH, generator=generator), labels


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    logits = model(batch[0])
    return cross_entropy(logits.flatten(0, 1).float(), batch[1].flatten(), reduction="sum")


declare = partial(subject, model=Model, loss=loss, batch=batch, clip=clip_by_mesh, meshes=["dp2-tp2"])

COLUMNS = {"left": ColwiseParallel(), "right": ColwiseParallel()}


def gated(path: str, *, gives: Placement, down: ParallelStyle | None = None) -> dict[str, ParallelStyle]:
    """Return the plan of a gated layer that gets replicated inputs."""
    projections: dict[str, ParallelStyle] = {f"{path}.{name}": style for name, style in COLUMNS.items()}
    return {**projections, f"{path}.down": down or RowwiseParallel(output_layouts=gives)}


def gathered(gives: Placement) -> PrepareModuleInput:
    """Return the style of a layer whose input is sharded and gathered once."""
    return PrepareModuleInput(input_layouts=(gives,), desired_input_layouts=(Replicate(),))


HEAD = ColwiseParallel(output_layouts=Replicate())
PLAN: dict[str, ParallelStyle] = {
    **gated("entry", gives=SEQUENCE),
    "norm": SequenceParallel(),
    "gated": gathered(SEQUENCE),
    **gated("gated", gives=Replicate()),
    "head": HEAD,
}


def shard(model: Any, mesh: DeviceMesh, plan: dict[str, ParallelStyle]) -> nn.Module:
    parallelize_module(model, mesh["tp"], plan)
    fully_shard(model.gated, mesh=mesh["dp_shard"])
    fully_shard(model, mesh=mesh["dp_shard"])
    return model  # type: ignore[no-any-return]


def with_plan(plan: dict[str, ParallelStyle], **options: Any) -> Any:
    """Return a trainer with a plan."""

    def parallelize(model: Any, mesh: DeviceMesh, config: ParallelConfig) -> nn.Module:
        return shard(model, mesh, plan)

    return declare(**options)(parallelize)


REPLICATED = {**gated("entry", gives=Replicate()), **gated("gated", gives=Replicate()), "head": HEAD}
WHOLE_TO_OWN = PrepareModuleInput(
    input_layouts=(Replicate(),), desired_input_layouts=(SEQUENCE,), use_local_output=True
)

right = with_plan(PLAN)
replicated = with_plan(REPLICATED)
first_position = with_plan(REPLICATED, model=partial(Model, first_position=True))
checkpointed = with_plan(PLAN, model=partial(Model, checkpointed=True))
saved_on_cpu = with_plan(PLAN, model=partial(Model, saved_on_cpu=True))

gathered_one_by_one = with_plan(
    {
        **{path: style for path, style in PLAN.items() if path != "gated"},
        **{f"gated.{name}": ColwiseParallel(input_layouts=SEQUENCE) for name in COLUMNS},
    }
)
summed_for_a_share = with_plan({**PLAN, **gated("entry", gives=Replicate()), "norm": WHOLE_TO_OWN})
back_and_forth = with_plan(
    {
        **PLAN,
        "entry": PrepareModuleOutput(output_layouts=(SEQUENCE,), desired_output_layouts=(Replicate(),)),
        "norm": WHOLE_TO_OWN,
    }
)
OWN_TO_WHOLE = PrepareModuleInput(
    input_layouts=(SEQUENCE,), desired_input_layouts=(Replicate(),), use_local_output=True
)
forth_and_back = with_plan({**REPLICATED, "middle": WHOLE_TO_OWN, "norm": OWN_TO_WHOLE})
no_such_module = with_plan({"layers.*.up": ColwiseParallel()})


class GatheredForUse(torch.autograd.Function):
    """Product of gathered positions and a weight, which saves the own positions and gathers them again in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return torch.nn.functional.linear(_all_positions(x, group), weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        own = reduce_scatter_tensor(gradients[0] @ weight, "sum", 1, ctx.group)
        gradient, gathered_x = gradients[0].flatten(0, 1), _all_positions(x, ctx.group).flatten(0, 1)
        return own, gradient.T @ gathered_x, gradient.sum(0), None


def _all_positions(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return all_gather_tensor(x.contiguous(), 1, group)


class GatheringLinear(nn.Linear):
    """Layer that gathers the positions of its input by itself, as each projection of Megatron-LM does."""

    group: dist.ProcessGroup

    def forward(self, x: Tensor) -> Tensor:
        local = [each.to_local() if isinstance(each, DTensor) else each for each in (x, self.weight, self.bias)]
        return GatheredForUse.apply(*local, self.group)  # type: ignore[no-any-return, no-untyped-call]


@declare()
def gathered_for_each_use(model: Any, mesh: DeviceMesh, config: ParallelConfig) -> nn.Module:
    for projection in (model.gated.left, model.gated.right):
        projection.__class__ = GatheringLinear
        projection.group = mesh["tp"].get_group()
        for name, parameter in [*projection.named_parameters()]:
            rows = distribute_tensor(parameter.detach(), mesh["tp"], [Shard(0)])
            projection.register_parameter(name, nn.Parameter(rows))
    kept = {path: style for path, style in PLAN.items() if path not in ("gated", "gated.left", "gated.right")}
    return shard(model, mesh, kept)
