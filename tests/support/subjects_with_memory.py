"""Trainers whose memory is judged: right ones of many kinds, and others that are wrong in one thing each."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.functional import cross_entropy
from torch.optim import AdamW, Optimizer
from torch.utils.checkpoint import checkpoint

from conformance.subjects import ParallelConfig, subject
from conformance.subjects.decorated import clip_with_torch

WIDTH, VOCABULARY, LAYERS = 32, 256, 4


class Double(torch.autograd.Function):
    """Product with 2, which saves its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        scaled: Tensor = 2 * gradients[0] + 0 * x
        return scaled


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, table: Tensor | None = None) -> Tensor:
        if table is not None:
            x = (x * table).type_as(x)
        return x + self.down(torch.tanh(Double.apply(self.up(self.norm(x)))))  # type: ignore[no-any-return, no-untyped-call]


class Model(nn.Module):
    """Blocks between a large embedding and a head."""

    def __init__(
        self, *, tied: bool = False, checkpointed: bool = False, adapted: bool = False, tabled: bool = False
    ) -> None:
        super().__init__()
        if tabled:  # as of RoPE, which the model hands to each block
            self.register_buffer("table", torch.ones(4, WIDTH))
        self.checkpointed = checkpointed
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        if adapted:  # as of LoRA: all else is frozen
            self.requires_grad_(False)
            for block in self.blocks:
                block.norm.requires_grad_(True)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        tables = [*self.buffers(recurse=False)]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x, *tables)
        return self.head(x)  # type: ignore[no-any-return]


def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCABULARY, (2, 4), generator=generator)
    return tokens, tokens.roll(1, dims=1)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return cross_entropy(model(batch[0]).flatten(0, 1).float(), batch[1].flatten(), reduction="sum")


def shard(model: Any, mesh: DeviceMesh, config: ParallelConfig, **options: Any) -> nn.Module:
    options = {"mesh": mesh, **config.policies, **options}
    for block in model.blocks:
        fully_shard(block, **options)
    sharded: nn.Module = fully_shard(model, **options)
    return sharded


declare = partial(
    subject, model=Model, loss=loss, batch=batch, meshes=["dp2", "hsdp2x2"], precisions=["fp32", "bf16"], offload=True
)
right = declare(tied_model=partial(Model, tied=True))(shard)
checkpointed = declare(model=partial(Model, checkpointed=True))(shard)
tabled = declare(model=partial(Model, tabled=True))(shard)
adapted = declare(model=partial(Model, adapted=True))(shard)
always_resharded = declare()(partial(shard, reshard_after_forward=True))
never_resharded = declare()(partial(shard, reshard_after_forward=False))


def adamw(parameters: Iterable[nn.Parameter], *, foreach: bool) -> AdamW:
    return AdamW(parameters, lr=1e-3, foreach=foreach, amsgrad=True)


with_foreach = declare(optimizer=partial(adamw, foreach=True))(shard)


class Orthogonalised(Optimizer):
    """Steps along gradients whose singular values are near one, for which each matrix is gathered."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            gradient = parameter.grad
            if gradient is None:
                continue
            full = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            if full.ndim == 2:
                full = full / (full.norm() + 1e-7)
                for _ in range(5):
                    full = 1.5 * full - 0.5 * (full @ full.T @ full)
            if isinstance(gradient, DTensor):
                full = distribute_tensor(full, gradient.device_mesh, gradient.placements)
            parameter.sub_(0.01 * full)


orthogonalised = declare(optimizer=Orthogonalised, offload=False)(shard)


@declare()
def checkpointed_here(model: Any, mesh: DeviceMesh, config: ParallelConfig) -> nn.Module:
    """Checkpoint blocks in the parallel model alone."""
    model.checkpointed = True
    return shard(model, mesh, config)


@declare(meshes=["dp2"])
def compiled(model: Any, mesh: DeviceMesh, config: ParallelConfig) -> nn.Module:
    for block in model.blocks:
        block.compile(backend="aot_eager")
    return shard(model, mesh, config)


@declare()
def one_group(model: Any, mesh: DeviceMesh, config: ParallelConfig) -> nn.Module:
    return fully_shard(model, mesh=mesh, **config.policies)  # type: ignore[no-any-return]


@declare()
def many_groups(model: Any, mesh: DeviceMesh, config: ParallelConfig) -> nn.Module:
    """Groups inside of groups, and one each for embedding and head."""
    for module in (model.embedding, *(block.up for block in model.blocks), model.head):
        fully_shard(module, mesh=mesh, **config.policies)
    return shard(model, mesh, config)


@declare()
def ahead(model: Any, mesh: DeviceMesh, config: ParallelConfig) -> nn.Module:
    """Gather two blocks ahead."""
    sharded, blocks = shard(model, mesh, config), list(model.blocks)
    for index, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 3])
        block.set_modules_to_backward_prefetch(blocks[max(index - 2, 0) : index][::-1])
    return sharded


@declare(meshes=["dp2"])
def to_smaller_shards(model: Any, mesh: DeviceMesh, config: ParallelConfig) -> nn.Module:
    """Reshard to one rank of two, which keeps everything."""
    return shard(model, mesh, config, reshard_after_forward=1)


# Wrong


def hooked(hook: Callable[[FSDPModule, list[object]], Any]) -> Callable[..., nn.Module]:
    """Return `parallelize` that lets a function of each group and a list hook into the group."""

    def parallelize(model: Any, mesh: DeviceMesh, config: ParallelConfig) -> nn.Module:
        sharded, kept = shard(model, mesh, config), list[object]()
        for block in model.blocks:
            hook(block, kept)
        sharded.register_forward_pre_hook(lambda *_: kept.clear())
        return sharded

    return parallelize


def keep_weights(block: Any, kept: list[object]) -> None:
    block.down.register_forward_hook(lambda module, *_: kept.append([p.clone() for p in module.parameters()]))


weights_kept = declare()(hooked(keep_weights))
kept: list[object] = []


def clip_full(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Hold the full gradients while clipping."""
    held = list(parameters)
    kept[:] = [p.grad.full_tensor() for p in held if isinstance(p.grad, DTensor)]
    norm = clip_with_torch(held, max_norm)
    kept.clear()
    return norm


full_gradients = declare(clip=clip_full)(shard)


def loss_with_graph(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Keep the graph of the last micro-batch from being freed."""
    logits = model(batch[0])
    kept[:] = [logits, [block.clone() for block in logits.unbind()], torch.cat([logits] * 4)]
    return cross_entropy(logits.flatten(0, 1).float(), batch[1].flatten(), reduction="sum")


graph_kept = declare(loss=loss_with_graph)(shard)
