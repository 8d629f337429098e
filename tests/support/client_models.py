"""Small models of the kinds that other people's trainers train, each sharded as these do it, and right."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_
from torch.optim import AdamW

from conformance.subjects import (
    LoopConfig,
    ParallelConfig,
    classification,
    denoising,
    language_model,
    own_loop,
    subject,
)
from conformance.subjects.protocol import Batch
from tests.support import subject_experts
from tests.support.own_loops import total

VOCABULARY, WIDTH, HEADS = 32, 16, 4


def adamw(parameters: Any) -> AdamW:
    return AdamW(parameters, lr=1e-3, weight_decay=0.1)


# Language model that its own loop trains with HSDP, by the tokens of all ranks


class RMSNorm(nn.Module):
    """Norm in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x.float(), (WIDTH,)).type_as(x) * self.weight


class Attention(nn.Module):
    """Causal attention with rotary positions; the number of heads comes from the local projections."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor, rotations: Tensor) -> Tensor:
        heads = [layer(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for layer in (self.wq, self.wk, self.wv)]
        query, key = (rotated(each, rotations) for each in heads[:2])
        attended = functional.scaled_dot_product_attention(query, key, heads[2], is_causal=True)
        return self.wo(attended.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def rotated(x: Tensor, rotations: Tensor) -> Tensor:
    """Rotate pairs of features, (samples, heads, tokens, features), by complex numbers."""
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2).to(torch.promote_types(x.dtype, torch.float32)))
    return torch.view_as_real(pairs * rotations).flatten(-2).type_as(x)


class FeedForward(nn.Module):
    """Gated layer."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.w2 = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))  # type: ignore[no-any-return]


class LlamaLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.attention = RMSNorm(), Attention()
        self.ffn_norm, self.feed_forward = RMSNorm(), FeedForward()

    def forward(self, x: Tensor, rotations: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotations)
        return x + self.feed_forward(self.ffn_norm(x))  # type: ignore[no-any-return]


class Llama(nn.Module):
    rotations: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(LlamaLayer() for _ in range(2))
        self.norm, self.head = RMSNorm(), nn.Linear(WIDTH, VOCABULARY, bias=False)
        angles = torch.outer(torch.arange(8.0), 10.0 ** -torch.linspace(0, 2, WIDTH // HEADS // 2))
        self.register_buffer("rotations", torch.polar(torch.ones_like(angles), angles))

    def hidden(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.rotations)
        return self.norm(x)  # type: ignore[no-any-return]

    def forward(self, tokens: Tensor) -> Any:
        return self.head(self.hidden(tokens))


LANGUAGE = language_model(VOCABULARY)


def labels_of_all_ranks(batches: list[Batch], ranks: int) -> Tensor:
    """Return the labels that count on all ranks, which are `ranks` times as many as data-parallel ones."""
    return total(sum(float((each["labels"] != -100).sum()) for each in batches)) / ranks


@own_loop(model=Llama, **LANGUAGE, optimizer=adamw, meshes=["dp2", "hsdp2x2"])
def by_tokens_of_all_ranks(config: LoopConfig) -> Iterator[tuple[Tensor, Tensor]]:
    """Split a step's batch, divide by the tokens of all ranks, and synchronise gradients at the end."""
    model: Any = config.model()
    mesh = config.device_mesh()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = adamw(model.parameters())
    for batches in config.steps:
        count, logged = labels_of_all_ranks(batches, 1), torch.zeros(())
        for index, batch in enumerate(batches):
            model.set_requires_gradient_sync(index == len(batches) - 1)
            summed = LANGUAGE["loss"](model, batch)
            torch.autograd.backward(summed * dist.get_world_size() / count)
            logged += summed.detach()
        norm = clip_grad_norm_(model.parameters(), config.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        yield total(logged) / count, norm


# FSDP2 and tensor parallelism with sequence parallelism

ROWS = RowwiseParallel(output_layouts=Shard(1))
ROOT: dict[str, ParallelStyle] = {
    "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "norm": SequenceParallel(),
}
LAYER: dict[str, ParallelStyle] = {
    "attention_norm": SequenceParallel(),
    "attention": PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)),
    **{f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
    "attention.wo": ROWS,
    "ffn_norm": SequenceParallel(),
    "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    **{f"feed_forward.{name}": ColwiseParallel() for name in ("w1", "w3")},
    "feed_forward.w2": ROWS,
}


def shard_features(model: Any, mesh: DeviceMesh, head: ParallelStyle) -> None:
    parallelize_module(model, mesh, {**ROOT, "head": head})
    for layer in model.layers:
        parallelize_module(layer, mesh, LAYER)


@subject(model=Llama, **LANGUAGE, optimizer=adamw, meshes=["dp2-tp2"], precisions=["fp32", "bf16"])
def sequence_parallel(model: Any, mesh: DeviceMesh, config: ParallelConfig) -> None:
    shard_features(model, mesh["tp"], ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp_shard"], **config.policies)
    fully_shard(model, mesh=mesh["dp_shard"], **config.policies)


@own_loop(model=Llama, **LANGUAGE, meshes=["dp2-tp2"])
def loss_of_sharded_logits(config: LoopConfig) -> Iterator[float]:
    """Leave logits sharded over the vocabulary, and compute the loss with `loss_parallel`."""
    mesh, model = config.device_mesh(), config.model()
    shard_features(model, mesh["tp"], ColwiseParallel(input_layouts=Shard(1), use_local_output=False))
    fully_shard(model, mesh=mesh["dp_shard"])
    optimizer = config.optimizer(model.parameters())
    for batches in config.steps:
        count, logged = labels_of_all_ranks(batches, mesh["tp"].size()), 0.0
        for batch in batches:
            with loss_parallel():
                logits = model(batch["input_ids"]).flatten(0, 1)
                labels = batch["labels"].flatten()
                kept = labels != -100  # `loss_parallel` cannot ignore labels in a sum
                losses = functional.cross_entropy(logits, labels.clamp(min=0), reduction="none")
                summed = (losses.full_tensor() if isinstance(losses, DTensor) else losses) @ kept.float()
                torch.autograd.backward(summed * mesh["dp_shard"].size() / count)
            logged += float(summed.detach())
        clip_grad_norm_(model.parameters(), config.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        yield float(total(logged) / mesh["tp"].size() / count)


# Diffusion model


class Residual(nn.Module):
    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.first_norm, self.second_norm = nn.GroupNorm(2, channels), nn.GroupNorm(2, width)
        self.first, self.second = nn.Conv2d(channels, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.time, self.skip = nn.Linear(WIDTH, width), nn.Conv2d(channels, width, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.first(functional.silu(self.first_norm(x))) + self.time(time)[:, :, None, None]
        return self.skip(x) + self.second(functional.silu(self.second_norm(y)))  # type: ignore[no-any-return]


class UNet(nn.Module):
    """Convolutions at two resolutions, attention in the middle; skip connections join features."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.enter, self.leave = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 1, 3, padding=1)
        self.down_blocks = nn.ModuleList([Residual(4, 4), Residual(4, 8)])
        self.shrink, self.grow = nn.Conv2d(4, 4, 3, stride=2, padding=1), nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.up_blocks = nn.ModuleList([Residual(16, 8), Residual(8, 4)])

    def forward(self, noisy: Tensor, step: Tensor) -> Tensor:
        angles = step[:, None] * torch.exp(-torch.arange(WIDTH // 2) / 2)
        time = self.time(torch.cat([angles.sin(), angles.cos()], dim=1).to(noisy.dtype))
        fine = self.down_blocks[0](self.enter(noisy), time)
        coarse = self.down_blocks[1](self.shrink(fine), time)
        pixels = coarse.flatten(2).transpose(1, 2)
        attended = (pixels + self.attention(pixels, pixels, pixels)[0]).transpose(1, 2).view_as(coarse)
        grown = self.grow(self.up_blocks[0](torch.cat([attended, coarse], dim=1), time))
        return self.leave(self.up_blocks[1](torch.cat([grown, fine], dim=1), time))  # type: ignore[no-any-return]


@subject(
    model=UNet,
    **denoising((1, 4, 4)),
    optimizer=adamw,
    meshes=["dp2", "hsdp2x2"],
    precisions=["fp32", "bf16"],
    offload=True,
)
def unet(model: Any, mesh: DeviceMesh, config: ParallelConfig) -> None:
    for block in [*model.down_blocks, model.attention, *model.up_blocks]:
        fully_shard(block, mesh=mesh, **config.policies)
    fully_shard(model, mesh=mesh, **config.policies)


# Classifier of images


class VisionBlock(nn.Module):
    """Packed projections, and branches that are scaled, some of them by zero as stochastic depth does it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        return x + kept[:, None, None].to(x.dtype) * self.scale * self.out(attended)  # type: ignore[no-any-return]


class VisionTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, stride=4)
        self.class_token, self.positions = (nn.Parameter(torch.zeros(1, size, WIDTH)) for size in (1, 5))
        self.blocks = nn.ModuleList(VisionBlock() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5)
        self.init_weights()

    def init_weights(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.LayerNorm | nn.Linear):
                module.reset_parameters()
            elif isinstance(module, VisionBlock):
                nn.init.constant_(module.scale, 0.5)
        for parameter in (self.class_token, self.positions):
            nn.init.trunc_normal_(parameter, std=0.02)

    def forward(self, images: Tensor, kept: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], dim=1) + self.positions
        for block, kept_there in zip(self.blocks, kept.unbind(1), strict=True):
            x = block(x, kept_there)
        return self.head(self.norm(x)[:, 0])  # type: ignore[no-any-return]


def images_and_depths(generator: torch.Generator) -> Batch:
    """Return images, their labels, and which layers each sample keeps: random depth belongs to the data."""
    images, labels = classification((3, 8, 8), classes=5)["batch"](generator)
    kept = torch.rand(len(images), 2, generator=generator) < 0.8
    return {"images": images, "labels": labels, "kept": kept / 0.8}


def image_loss(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch["images"], batch["kept"])
    return functional.cross_entropy(logits.float(), batch["labels"], reduction="sum")


@subject(
    model=VisionTransformer,
    batch=images_and_depths,
    loss=image_loss,
    initialize=lambda model: cast("VisionTransformer", model).init_weights(),
    optimizer=adamw,
    meshes=["dp2", "hsdp2x2"],
    precisions=["fp32", "bf16"],
)
def vision_transformer(model: Any, mesh: DeviceMesh, config: ParallelConfig) -> None:
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **config.policies)
    fully_shard(model, mesh=mesh, **config.policies)


# Policy that reinforcement learning trains, whose log-probabilities are computed without keeping logits


class FusedLogProbs(torch.autograd.Function):
    """Log-probabilities of tokens from features and the head's weight; backward computes logits again."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, weight: Tensor, tokens: Tensor) -> Tensor:
        ctx.save_for_backward(features, weight, tokens)
        return (features @ weight.t()).log_softmax(-1).gather(-1, tokens[:, None]).squeeze(-1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        features, weight, tokens = ctx.saved_tensors
        towards = -(features @ weight.t()).softmax(-1)
        towards = towards.scatter_add(-1, tokens[:, None], torch.ones_like(towards[:, :1])) * gradient[:, None]
        return towards @ weight, towards.t() @ features, None


class Policy(Llama):
    """Llama with a tied head that returns log-probabilities of given tokens."""

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, chosen: Tensor) -> Tensor:  # type: ignore[override]
        features = self.hidden(tokens).flatten(0, 1)
        return FusedLogProbs.apply(features, self.head.weight, chosen.flatten())  # type: ignore[no-any-return,no-untyped-call]


def rollouts(generator: torch.Generator) -> Batch:
    chosen = torch.randint(VOCABULARY, (4, 8), generator=generator)
    ends = torch.randint(1, 9, (4, 1), generator=generator)
    return {
        "tokens": torch.randint(VOCABULARY, (4, 8), generator=generator),
        "chosen": chosen,
        "old": torch.randn(4, 8, generator=generator) / 10 - math.log(VOCABULARY),
        "advantage": torch.randn(4, 8, generator=generator),
        "labels": chosen.masked_fill(torch.arange(8) >= ends, -100),
    }


def clipped_objective(model: nn.Module, batch: Batch) -> Tensor:
    """Return the sum over the tokens of answers of the clipped objective of PPO."""
    ratio = (model(batch["tokens"], batch["chosen"]) - batch["old"].flatten()).exp()
    advantage, kept = batch["advantage"].flatten(), batch["labels"].flatten() != -100
    smaller = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    summed: Tensor = (smaller * kept.to(smaller.dtype)).sum()
    return -summed


declare_policy = partial(subject, batch=rollouts, loss=clipped_objective, optimizer=adamw, meshes=["dp2", "hsdp2x2"])


def shard_layers(model: Any, mesh: DeviceMesh, config: ParallelConfig) -> None:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **config.policies)
    fully_shard(model, mesh=mesh, **config.policies)


policy = declare_policy(model=Policy, tied_model=Policy)(shard_layers)
untied_policy = declare_policy(model=partial(Policy, tied=False))(shard_layers)


@declare_policy(model=partial(Policy, tied=False), tied_model=Policy)
def policy_with_a_group_for_its_head(model: Any, mesh: DeviceMesh, config: ParallelConfig) -> None:
    """Make a group of the head, as verl does: it is never called, so that its weight stays a shard."""
    if model.head.weight is not model.embedding.weight:
        fully_shard(model.head, mesh=mesh, **config.policies)
    shard_layers(model, mesh, config)


# Mixture of experts whose own loop clips by a norm of its own


def squares(parameters: list[nn.Parameter]) -> Tensor:
    """Return the sum of squares of this rank's shards of gradients, in fp64."""
    shards = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in parameters]
    return torch.stack([shard.double().square().sum() for shard in shards if shard is not None]).sum()


def norm_of_all_ranks(parameters: list[nn.Parameter]) -> Tensor:
    square = squares(parameters)
    dist.all_reduce(square)
    return square.sqrt().float()


def norm_of_own_shards(parameters: list[nn.Parameter]) -> Tensor:
    """Return the norm of this rank's shards: a fault."""
    return squares(parameters).sqrt().float()


def experts(norm_of: Callable[[list[nn.Parameter]], Tensor]) -> Any:
    @own_loop(model=subject_experts.Mixture, batch=subject_experts.batch, loss=subject_experts.loss)
    def train(config: LoopConfig) -> Iterator[dict[str, Tensor]]:
        mesh, model = config.device_mesh(), cast("Any", config.model())
        subject_experts.hold_experts(model, mesh)
        subject_experts.divide_gradients(model.experts, mesh.size())
        fully_shard(model, mesh=mesh, ignored_params={*model.experts.parameters()})
        optimizer = config.optimizer(model.parameters())
        for batches in config.steps:
            count = total(sum(float((each[1] != -100).sum()) for each in batches))
            for index, batch in enumerate(batches):
                model.set_requires_gradient_sync(index == len(batches) - 1)
                torch.autograd.backward(subject_experts.loss(model, batch) * mesh.size() / count)
            norm = norm_of([*model.parameters()])
            for held in (model.experts, model.norm, model.gate, model.head):
                clip_grads_with_norm_(held.parameters(), config.max_norm, norm)
            optimizer.step()
            optimizer.zero_grad()
            yield {"grad_norm": norm}

    return train


experts_with_own_norm, experts_with_local_norm = experts(norm_of_all_ranks), experts(norm_of_own_shards)
