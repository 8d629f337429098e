"""Language model that fills in masked tokens at every rate of masking (masked diffusion), with norms set by the rate.

    conformance judge masked_diffusion.py:train

A trainer of its own with tensor parallelism: parameters lie on two meshes, which are clipped by one norm.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

from conformance.subjects import LoopConfig, own_loop

VOCAB, DIM, HEAD, TOKENS, LAYERS = 31, 16, 4, 10, 2
MASK = VOCAB - 1
Texts = dict[str, Tensor]


class Layer(nn.Module):
    """Attention to all tokens and a network, between which the rate scales, shifts and gates."""

    def __init__(self) -> None:
        super().__init__()
        self.modulation = nn.Linear(DIM, 6 * DIM)
        self.query, self.key, self.value = (nn.Linear(DIM, DIM) for _ in range(3))
        self.out, self.up, self.down = nn.Linear(DIM, DIM), nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor, rate: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`, (texts, tokens, DIM), with features of the rate, (texts, DIM)."""
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(F.silu(rate))[:, None].chunk(6, -1)
        y = F.layer_norm(x, (DIM,)) * (1 + scale1) + shift1
        q, k, v = (w(y).unflatten(-1, (-1, HEAD)).transpose(1, 2) for w in (self.query, self.key, self.value))
        x = x + gate1 * self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        y = F.layer_norm(x, (DIM,)) * (1 + scale2) + shift2
        return cast("Tensor", x + gate2 * self.down(F.gelu(self.up(y))))


class Denoiser(nn.Module):
    """Embeddings of tokens, places and the rate, layers and head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(VOCAB, DIM), nn.Embedding(TOKENS, DIM)
        self.rate = nn.Sequential(nn.Linear(4, DIM), nn.SiLU(), nn.Linear(DIM, DIM))
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB)

    def forward(self, tokens: Tensor, rate: Tensor) -> Tensor:
        """Return logits (texts, TOKENS, VOCAB)."""
        angles = rate[:, None] * torch.tensor([3.0, 11.0])
        features = self.rate(torch.cat([angles.sin(), angles.cos()], 1).to(self.places.weight.dtype))
        x = self.embedding(tokens) + self.places(torch.arange(TOKENS))
        for layer in self.layers:
            x = layer(x, features)
        return cast("Tensor", self.head(self.norm(x)))


def texts(generator: torch.Generator) -> Texts:
    """Return texts, their rates of masking, and which tokens are masked."""
    rate = 0.2 + 0.8 * torch.rand(4, generator=generator)
    is_masked = torch.rand(4, TOKENS, generator=generator) < rate[:, None]
    return {"tokens": torch.randint(MASK, (4, TOKENS), generator=generator), "rate": rate, "is_masked": is_masked}


def bound(model: nn.Module, batch: Texts) -> Tensor:
    """Return the cross entropy of masked tokens over the rate of their text, summed."""
    logits = model(batch["tokens"].masked_fill(batch["is_masked"], MASK), batch["rate"])
    entropy = F.cross_entropy(logits.float().transpose(1, 2), batch["tokens"], reduction="none")
    return (entropy * batch["is_masked"] / batch["rate"][:, None]).sum()


def make_optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return AdamW without foreach, for parameters of two meshes."""
    return AdamW(parameters, lr=2e-3, betas=(0.9, 0.98), weight_decay=0.05, foreach=False)


def make_schedule(optimizer: Optimizer) -> LRScheduler:
    """Return half a cosine."""
    return CosineAnnealingLR(optimizer, T_max=8, eta_min=1e-4)


class Trainer:
    """Sharded model, optimizer and schedule."""

    def __init__(self, model: Denoiser, mesh: DeviceMesh, *, policy: Any, max_norm: float) -> None:
        self.max_norm, self.data_mesh = max_norm, mesh
        if "tp" in (mesh.mesh_dim_names or ()):
            self.data_mesh = mesh["dp_shard"]
            plan = {name: ColwiseParallel() for name in ("query", "key", "value", "up")}
            for layer in model.layers:
                parallelize_module(layer, mesh["tp"], {**plan, "out": RowwiseParallel(), "down": RowwiseParallel()})
        for layer in model.layers:
            fully_shard(layer, mesh=self.data_mesh, mp_policy=policy)
        self.model: FSDPModule = fully_shard(model, mesh=self.data_mesh, mp_policy=policy)
        self.parameters = list(model.parameters())
        self.optimizer = make_optimizer(self.parameters)
        self.schedule = make_schedule(self.optimizer)

    @property
    def content(self) -> dict[str, Any]:
        """All that a checkpoint holds."""
        model, optimizer = get_state_dict(cast("nn.Module", self.model), self.optimizer)
        return {"model": model, "optimizer": optimizer, "schedule": self.schedule.state_dict()}

    def load(self, directory: Path) -> None:
        """Load a checkpoint."""
        content = self.content
        state_dict_loader.load(content, checkpoint_id=directory)
        model, optimizer = content["model"], content["optimizer"]
        set_state_dict(
            cast("nn.Module", self.model), self.optimizer, model_state_dict=model, optim_state_dict=optimizer
        )
        self.schedule.load_state_dict(content["schedule"])

    def clip(self) -> Tensor:
        """Scale gradients of both meshes by one norm; returns the norm before."""
        by_mesh: dict[int, list[nn.Parameter]] = {}
        for parameter in self.parameters:
            by_mesh.setdefault(parameter.device_mesh.ndim if isinstance(parameter, DTensor) else 0, []).append(
                parameter
            )
        norms = []
        for each in by_mesh.values():
            norm = get_total_norm([p.grad for p in each if p.grad is not None])
            norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        total = torch.stack(norms).norm()
        for each in by_mesh.values():
            clip_grads_with_norm_(each, self.max_norm, total, foreach=False)
        return cast("Tensor", total)

    def step(self, micro_batches: Sequence[Texts]) -> tuple[Tensor, Tensor]:
        """Train a step; returns loss and norm."""
        totals = torch.tensor([float(sum(batch["tokens"].numel() for batch in micro_batches)), 0.0])
        dist.all_reduce(totals[:1], group=self.data_mesh.get_group())
        for index, batch in enumerate(micro_batches):
            self.model.set_requires_gradient_sync(index == len(micro_batches) - 1)
            loss = bound(cast("nn.Module", self.model), batch)
            torch.autograd.backward(loss * self.data_mesh.size() / totals[0])
            totals[1] += loss.detach()
        norm = self.clip()
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        dist.all_reduce(totals[1:], group=self.data_mesh.get_group())
        return totals[1] / totals[0], norm


@own_loop(
    model=Denoiser,
    loss=bound,
    batch=texts,
    count=lambda batch: batch["tokens"].numel(),
    optimizer=make_optimizer,
    scheduler=make_schedule,
    meshes=["dp2", "dp2-tp2"],
    precisions=["fp32", "bf16"],
    resumes=True,
)
def train(config: LoopConfig) -> Iterator[tuple[Tensor, Tensor]]:
    """Train, from a checkpoint if there is one."""
    model = cast("Denoiser", config.model())
    trainer = Trainer(model, config.device_mesh(), policy=config.mixed_precision, max_norm=config.max_norm)
    if config.load_from:
        trainer.load(config.load_from)
    for micro_batches in config.steps:
        yield trainer.step(micro_batches)
    if config.save_to:
        state_dict_saver.save(trainer.content, checkpoint_id=config.save_to)
