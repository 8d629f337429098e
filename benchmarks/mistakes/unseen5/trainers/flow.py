"""Script that learns to make images by a flow (rectified flow), and keeps an average of its weights (EMA).

    torchrun --nproc-per-node 2 flow.py
    conformance judge flow.py:train

The average is sharded as the weights are, is no part of the model, and is saved and loaded with it. Noise and times
belong to the batch.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.optim import Adam, Optimizer

from conformance.subjects import LoopConfig, own_loop

SIZE, CHANNELS, WIDTH, CLASSES, DECAY = 8, 3, 16, 5, 0.9
Images = dict[str, Tensor]


def images(generator: torch.Generator, count: int = 4) -> Images:
    """Return images with their classes, and the noise and the time of each."""
    return {
        "images": torch.randn(count, CHANNELS, SIZE, SIZE, generator=generator).cumsum(-1) / 2,
        "noise": torch.randn(count, CHANNELS, SIZE, SIZE, generator=generator),
        "times": torch.randn(count, generator=generator).sigmoid(),
        "classes": torch.randint(CLASSES, (count,), generator=generator),
    }


class Residual(nn.Module):
    """Two convolutions whose norm is shifted and scaled by the condition."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, WIDTH, affine=False)
        self.modulation = nn.Linear(WIDTH, 3 * WIDTH)
        self.first, self.second = (nn.Conv2d(WIDTH, WIDTH, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """Return maps of the same shape."""
        shift, scale, gate = self.modulation(condition)[..., None, None].chunk(3, dim=1)
        inner = F.silu(self.first(self.norm(x) * (1 + scale) + shift))
        changed: Tensor = x + gate * self.second(inner)
        return changed


class Velocity(nn.Module):
    """Network of the velocity at which noise becomes an image."""

    def __init__(self) -> None:
        super().__init__()
        self.classes = nn.Embedding(CLASSES, WIDTH)
        self.times = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.stem = nn.Conv2d(CHANNELS, WIDTH, 3, padding=1)
        self.blocks = nn.ModuleList(Residual() for _ in range(3))
        self.head = nn.Conv2d(WIDTH, CHANNELS, 3, padding=1)

    def forward(self, x: Tensor, times: Tensor, classes: Tensor) -> Tensor:
        """Return velocities, of the shape of the images."""
        angles = times[:, None] * torch.arange(1, WIDTH // 2 + 1, device=times.device, dtype=times.dtype)
        condition = F.silu(self.times(torch.cat([angles.cos(), angles.sin()], 1)) + self.classes(classes))
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, condition)
        velocity: Tensor = self.head(F.silu(x))
        return velocity


def flow_loss(model: nn.Module, batch: Images) -> Tensor:
    """Return the squared error of velocities, the mean over a sample's pixels, summed over samples."""
    times = batch["times"][:, None, None, None]
    mixed = (1 - times) * batch["noise"] + times * batch["images"]
    error: Tensor = model(mixed, batch["times"], batch["classes"]) - (batch["images"] - batch["noise"])
    return error.square().mean((1, 2, 3)).sum()


def make_optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return Adam as diffusion models have it."""
    return Adam(parameters, lr=2e-3, betas=(0.9, 0.99))


class Trainer:
    """Model, optimizer and the average of the weights."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy, max_norm: float) -> None:
        assert isinstance(model, Velocity)
        self.model, self.max_norm = model, max_norm
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        self.sharded: FSDPModule = fully_shard(model, mesh=mesh, mp_policy=policy)
        self.optimizer = make_optimizer(model.parameters())
        self.average = {name: p.detach().clone() for name, p in model.named_parameters()}

    @torch.no_grad()
    def update_average(self) -> None:
        """Move the average towards the weights, shard by shard."""
        for name, parameter in self.model.named_parameters():
            self.average[name].lerp_(parameter, 1 - DECAY)

    def step(self, micro_batches: list[Images]) -> dict[str, Any]:
        """Return the mean loss over the samples of all ranks, and the norm."""
        samples = torch.tensor(float(sum(len(batch["times"]) for batch in micro_batches)))
        dist.all_reduce(samples)
        total = torch.zeros(())
        self.optimizer.zero_grad()
        for batch in micro_batches:
            is_last = batch is micro_batches[-1]
            self.sharded.set_is_last_backward(is_last)
            self.sharded.set_requires_gradient_sync(is_last)
            loss = flow_loss(self.model, batch)
            (loss * (dist.get_world_size() / samples)).backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.optimizer.step()
        self.update_average()
        dist.all_reduce(total)
        return {"loss": total / samples, "grad_norm": norm}

    def state(self) -> dict[str, Any]:
        """Return the state of model, optimizer and average, sharded."""
        weights, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": weights, "optimizer": optimizer, "average": self.average}

    def save(self, directory: Path) -> None:
        """Save all state; all ranks call this."""
        state_dict_saver.save(self.state(), checkpoint_id=directory)

    def load(self, directory: Path) -> None:
        """Load the files of `save`."""
        state = self.state()
        state_dict_loader.load(state, checkpoint_id=directory)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


@own_loop(
    model=Velocity,
    loss=flow_loss,
    batch=images,
    optimizer=make_optimizer,
    meshes=["dp2", "hsdp2x2"],
    precisions=["fp32", "bf16"],
    resumes=True,
)
def train(config: LoopConfig) -> Iterator[dict[str, Any]]:
    """Train as the script does."""
    trainer = Trainer(config.model(), config.device_mesh(), config.mixed_precision, config.max_norm)
    if config.load_from:
        trainer.load(config.load_from)
    for micro_batches in config.steps:
        yield trainer.step(micro_batches)
    if config.save_to:
        trainer.save(config.save_to)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    source = torch.Generator().manual_seed(1 + dist.get_rank())
    data = [images(source) for _ in range(2)]
    script = Trainer(Velocity(), init_device_mesh("cpu", (dist.get_world_size(),)), MixedPrecisionPolicy(), 1.0)
    for number in range(8):
        print(f"step {number}: loss {float(script.step(data)['loss']):.4f}")
    dist.destroy_process_group()
