"""Subjects that are right and unusual: parts that do not compute, are frozen, are left to no FSDP, or are shared."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import Shard
from torch.nn.functional import cross_entropy
from torch.optim import AdamW, Optimizer

from conformance.subjects import ParallelConfig, subject
from conformance.subjects.protocol import Batch
from tests.support import subject_models
from tests.support.plain_script import Block
from tests.support.subject_experts import clip_by_mesh
from tests.support.subject_models import WIDTH, batch, loss

CLASSES = 8


class Model(nn.Module):
    """Two blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


declare = partial(subject, loss=loss, batch=batch, meshes=["dp2", "hsdp2x2"], precisions=["fp32", "bf16"])


def shard(model: Any, mesh: DeviceMesh, config: ParallelConfig, **options: Any) -> Any:
    options = {"mp_policy": config.mixed_precision, **options}
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


# Layers that no pass computes, or only some


variant = partial(subject_models.variant, declare(model=Model), shard=shard)


class Spare(Model):
    """A block, sharded on its own, that never computes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.append(Block())

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[:2]:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


spare = declare(model=Spare)(shard)


class Alternating(Model):
    """A block for even steps and one for odd ones, as layers that are dropped; the batch says which."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks[int(x[0, 0] > 0)](x))  # type: ignore[no-any-return]


def batch_of_step(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    inputs, labels = batch(generator)
    step = generator.initial_seed() // 10_000
    inputs[:, 0] = 1.0 if step % 2 else -1.0
    return inputs, labels


alternating = declare(model=Alternating, batch=batch_of_step)(shard)


class Pretrained(Model):
    """A head that only evaluation uses, in the group of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.probe = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x) if self.training else self.probe(x)  # type: ignore[no-any-return]


probe_of_evaluation = declare(model=Pretrained)(shard)


# Frozen parts


class Adapted(Model):
    """Frozen weights, and adapters of low rank that are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.a = nn.ParameterList(nn.Parameter(torch.randn(4, WIDTH) / 4) for _ in self.blocks)
        self.b = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, 4) / 4) for _ in self.blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block, a, b in zip(self.blocks, self.a, self.b, strict=True):
            x = block(x) + x @ a.t() @ b.t()
        return self.head(x)  # type: ignore[no-any-return]


adapters = declare(model=Adapted)(shard)


@declare(model=Adapted)
def frozen_and_ignored(model: Any, mesh: DeviceMesh, config: ParallelConfig) -> None:
    shard(model, mesh, config, ignored_params={*model.head.parameters()})


@declare(model=Model, precisions=["fp32"], clip=clip_by_mesh)
def trained_and_ignored(model: Any, mesh: DeviceMesh, config: ParallelConfig) -> None:
    """Leave the bias of the head whole on each rank, and average its gradient by hand."""

    def average(parameter: Tensor) -> None:
        dist.all_reduce(parameter.grad)
        parameter.grad.div_(dist.get_world_size())  # type: ignore[union-attr]

    model.head.bias.register_post_accumulate_grad_hook(average)
    shard(model, mesh, config, ignored_params={model.head.bias})


@declare(model=Model, precisions=["fp32"], clip=clip_by_mesh)
def trained_ignored_and_not_reduced(model: Any, mesh: DeviceMesh, config: ParallelConfig) -> None:
    """Forget to average the gradient of a bias that FSDP2 ignores: a fault."""
    shard(model, mesh, config, ignored_params={model.head.bias})


class FrozenStem(Model):
    """A frozen layer between trained ones, through which gradients go."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)


frozen_block = declare(model=FrozenStem)(shard)


class Discriminated(Model):
    """A second network that the loss does not touch."""

    def __init__(self) -> None:
        super().__init__()
        self.discriminator = nn.Sequential(nn.Linear(CLASSES, WIDTH), nn.Linear(WIDTH, 1))


@declare(model=Discriminated)
def discriminator(model: Any, mesh: DeviceMesh, config: ParallelConfig) -> None:
    fully_shard(model.discriminator, mesh=mesh, mp_policy=config.mixed_precision)
    shard(model, mesh, config)


# Buffers whose values look uninitialised


class Sentinels(Model):
    """Masks and tables of the largest numbers, some computed from parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.full((3, 5), 255, dtype=torch.uint8))
        self.register_buffer("table", torch.full((7,), 127, dtype=torch.int8))
        self.register_buffer("flags", torch.ones(4, dtype=torch.bool))
        self.register_buffer("best", torch.tensor(float("nan")))
        self.register_buffer("unseen", torch.where(self.head.bias > 0, 1 << 31, 2**63 - 1))
        self.register_buffer("logs", (self.head.weight.detach() - 10).log())


def reset(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.LayerNorm):
            module.reset_parameters()
    device = model.head.bias.device
    model.mask.fill_(255)
    model.table.fill_(127)
    model.flags.fill_(True)
    model.best.fill_(float("nan"))
    bias = model.head.bias.full_tensor().detach()
    model.unseen.copy_(torch.where(bias > 0, 1 << 31, 2**63 - 1))
    model.logs = (model.head.weight.full_tensor().detach() - 10).log().to(device)


sentinels = declare(model=Sentinels, initialize=reset)(shard)


class Scratch(Model):
    """Intermediate results of a rank's own samples, in a buffer that is not saved."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.mean.copy_(x.detach().float().mean(0))
        return super().forward(x)


scratch = declare(model=Scratch)(shard)


class Running(Model):
    """Statistics of a rank's own samples, as of batch normalisation, that no pass reads: a fault."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.detach().float().mean(0).to(self.mean.dtype), 0.1)
        return super().forward(x)


running_statistics = declare(model=Running)(shard)


class Counting(Model):
    """Number of forward passes."""

    passes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        return super().forward(x)


counting = declare(model=Counting)(shard)


# Shapes, layouts and dtypes


class Odd(Model):
    """Parameters of one row, of fewer rows than ranks; and one weight that computes twice."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.row = nn.Parameter(torch.ones(1, WIDTH))
        self.three = nn.Parameter(torch.randn(3, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale * self.row + self.three.sum(0)
        x = self.blocks[0](self.blocks[0](x))
        return self.head(self.blocks[1](x)) + self.head(x)  # type: ignore[no-any-return]


odd_shapes = declare(model=Odd)(shard)


columns = variant(shard_placement_fn=lambda p: Shard(1) if p.ndim == 2 else Shard(0))


class Shared(Model):
    """One block that is two."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = self.blocks[0]


@declare(model=Shared)
def shared_block(model: Any, mesh: DeviceMesh, config: ParallelConfig) -> None:
    fully_shard(model.blocks[0], mesh=mesh, mp_policy=config.mixed_precision)
    fully_shard(model, mesh=mesh, mp_policy=config.mixed_precision)


# Ways to shard, to compute and to train


def recompute_blocks(model: Any) -> None:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(block)


def compile_blocks(model: Any, **options: Any) -> None:
    for block in model.blocks:
        block.compile(backend="aot_eager", **options)


recomputed = variant(before=recompute_blocks)
compiled = variant(before=compile_blocks)
compiled_in_place_in_one_graph = variant(before=partial(compile_blocks, fullgraph=True))
never_resharded = variant(reshard_after_forward=False)


@declare(model=Model)
def head_in_fp32(model: Any, mesh: DeviceMesh, config: ParallelConfig) -> None:
    fully_shard(model.head, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32))
    shard(model, mesh, config)


class WithBlockInFp32(Model):
    """A block whose input the model itself casts to fp32."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks[1](self.blocks[0](x).float()).type_as(x))  # type: ignore[no-any-return]


@declare(model=WithBlockInFp32)
def precision_of_a_block_forgotten(model: Any, mesh: DeviceMesh, config: ParallelConfig) -> None:
    """Forget the policy of a block beside a head that is in fp32 on purpose: a fault."""
    fully_shard(model.head, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32))
    fully_shard(model.blocks[1], mesh=mesh)
    fully_shard(model.blocks[0], mesh=mesh, mp_policy=config.mixed_precision)
    fully_shard(model, mesh=mesh, mp_policy=config.mixed_precision)


@declare(model=Model)
def partly_resharded(model: Any, mesh: DeviceMesh, config: ParallelConfig) -> None:
    """Shard over all ranks, and between forward and backward over two of them."""
    ranks = init_device_mesh(mesh.device_type, (mesh.size(),), mesh_dim_names=("dp_shard",))
    for block in model.blocks:
        fully_shard(block, mesh=ranks, reshard_after_forward=2, mp_policy=config.mixed_precision)
    fully_shard(model, mesh=ranks, mp_policy=config.mixed_precision)


def gather_ahead(model: Any) -> None:
    """Gather all groups before the first computes, without waiting."""

    def gather(_module: nn.Module, _inputs: Any) -> None:
        for block in model.blocks:
            block.unshard(async_op=True)

    model.register_forward_pre_hook(gather)


gathered_by_unshard = variant(after=gather_ahead)


def loss_of_two_passes(model: Any, batch: Batch) -> Tensor:
    logits, mirrored = (model(each).float() for each in (batch[0], -batch[0]))
    kept = (batch[1] != -100).to(logits.dtype)
    agreement = ((logits - mirrored).square().mean(-1) * kept).sum()
    total: Tensor = cross_entropy(logits, batch[1], reduction="sum") + 0.1 * agreement
    return total


two_passes = declare(model=Model, loss=loss_of_two_passes)(shard)


def prefetch(model: Any) -> None:
    model.set_modules_to_forward_prefetch([*model.blocks])
    model.blocks[1].set_modules_to_backward_prefetch([model.blocks[0]])


prefetched = variant(after=prefetch)


class Encoder(Model):
    """Model whose loss calls another method than forward."""

    def encode(self, x: Tensor) -> Tensor:
        return super().forward(x)


def loss_of_encoding(model: Any, batch: Batch) -> Tensor:
    both = model.encode(batch[0]) + model.encode(-batch[0])
    return cross_entropy(both.float(), batch[1], reduction="sum")


another_method = subject_models.variant(
    declare(model=Encoder, loss=loss_of_encoding),
    shard=shard,
    after=lambda model: register_fsdp_forward_method(model, "encode"),
)


def two_groups(parameters: Any) -> Optimizer:
    held = list(parameters)
    without: dict[str, Any] = {"params": [p for p in held if p.ndim == 1], "weight_decay": 0.0}
    return AdamW([{"params": [p for p in held if p.ndim > 1]}, without], lr=1e-3, weight_decay=0.1)


@declare(model=Model, optimizer=two_groups)
def groups_and_decay(model: Any, mesh: DeviceMesh, config: ParallelConfig) -> tuple[nn.Module, Optimizer]:
    shard(model, mesh, config)
    return model, two_groups(model.parameters())


def copy_gradients(model: Any) -> None:
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clone())


gradient_hooks = variant(before=copy_gradients)


@declare(model=Model)
def own_gathers(model: Any, mesh: DeviceMesh, config: ParallelConfig) -> None:
    """Gather a statistic over the same ranks in each forward pass."""

    def gather(_module: nn.Module, inputs: tuple[Tensor]) -> None:
        mean = inputs[0].detach().mean(0)
        group = mesh.get_group(mesh.ndim - 1)
        dist.all_gather_into_tensor(mean.new_empty(mesh.size(mesh.ndim - 1) * WIDTH), mean, group=group)

    model.blocks[0].register_forward_pre_hook(gather)
    shard(model, mesh, config)


# Losses


class Towers(nn.Module):
    """A tower for images, which few samples have, and one for text."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, is_image: Tensor) -> Tensor:
        x = torch.where(is_image.unsqueeze(-1), self.blocks[1](x), x)
        return self.head(self.blocks[0](x))  # type: ignore[no-any-return]


def mixed_batch(generator: torch.Generator) -> dict[str, Tensor]:
    inputs, labels = batch(generator)
    rank = generator.initial_seed() // 100 % 100
    is_image = torch.full((6,), rank % 2 == 0) & (torch.rand(6, generator=generator) < 0.5)
    return {"x": inputs, "is_image": is_image, "labels": labels}


def mixed_loss(model: Any, batch: Batch) -> Tensor:
    return cross_entropy(model(batch["x"], batch["is_image"]).float(), batch["labels"], reduction="sum")


towers = declare(model=Towers, batch=mixed_batch, loss=mixed_loss)(shard)


class SkippingTowers(Towers):
    """Towers of which that for images computes only where a rank has some, and else a sample that counts nothing."""

    def forward(self, x: Tensor, is_image: Tensor) -> Tensor:
        if is_image.any():
            x = x.index_copy(0, is_image.nonzero().squeeze(1), self.blocks[1](x[is_image]))
        else:
            x = x + 0.0 * self.blocks[1](x[:1]).sum()
        return self.head(self.blocks[0](x))  # type: ignore[no-any-return]


class FrozenTowers(Towers):
    """A frozen tower for images that a rank without images does not call at all."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)

    def forward(self, x: Tensor, is_image: Tensor) -> Tensor:
        if is_image.any():
            x = x.index_copy(0, is_image.nonzero().squeeze(1), self.blocks[1](x[is_image]).type_as(x))
        return self.head(self.blocks[0](x))  # type: ignore[no-any-return]


skipping_towers = declare(model=SkippingTowers, batch=mixed_batch, loss=mixed_loss)(shard)


@declare(model=FrozenTowers, batch=mixed_batch, loss=mixed_loss, precisions=["fp32"])
def frozen_tower_of_some_ranks(model: Any, mesh: DeviceMesh, config: ParallelConfig) -> None:
    """Leave the frozen tower whole on each rank, so that no rank waits for others in it."""
    fully_shard(model.blocks[0], mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params={*model.blocks[1].parameters()})


def batch_without_labels(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Rank 1 has no label that counts."""
    inputs, labels = batch(generator)
    return (inputs, torch.full_like(labels, -100)) if generator.initial_seed() // 100 % 2 else (inputs, labels)


no_labels = declare(model=Model, batch=batch_without_labels)(shard)


# Auxiliary losses


class Injected(torch.autograd.Function):
    """Identity that gives an auxiliary loss a gradient of 1, and not that of its output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, auxiliary: Tensor) -> Tensor:
        ctx.save_for_backward(auxiliary)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, torch.ones_like(ctx.saved_tensors[0])


class Balanced(Model):
    """Logits, and a hundredth of the mean of their squares over the samples of a micro-batch."""

    def forward(self, x: Tensor) -> Any:
        logits = super().forward(x)
        return logits, 0.01 * logits.float().square().mean()


class Injecting(Balanced):
    """The mean of squares is no output, and acts in backward alone."""

    def forward(self, x: Tensor) -> Tensor:
        logits, auxiliary = super().forward(x)
        return Injected.apply(logits, auxiliary)  # type: ignore[no-any-return,no-untyped-call]


def loss_with_auxiliary(model: nn.Module, batch: Batch) -> Tensor:
    logits, auxiliary = model(batch[0])
    count = (batch[1] != -100).sum()
    total: Tensor = cross_entropy(logits.float(), batch[1], reduction="sum") + auxiliary * count
    return total


auxiliary_in_backward = declare(model=Injecting)(shard)
auxiliary_in_loss = declare(model=Balanced, loss=loss_with_auxiliary)(shard)
