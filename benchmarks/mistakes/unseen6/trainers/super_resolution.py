"""Script that learns to enlarge images against a critic (SRGAN): a hinge loss, and pixels, with an optimizer for each.

torchrun --nproc-per-node 2 super_resolution.py
conformance judge super_resolution.py:train
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import Adam, Optimizer

from conformance.subjects import LoopConfig, own_loop

CHANNELS, SMALL, WIDTH = 3, 4, 12
Pairs = dict[str, Tensor]


def pairs(generator: torch.Generator, count: int = 4) -> Pairs:
    """Return small images, and the large ones of which they are made."""
    large = torch.randn(count, CHANNELS, 2 * SMALL, 2 * SMALL, generator=generator).cumsum(-1) / 3
    return {"small": F.avg_pool2d(large, 2), "large": large}


class Residual(nn.Module):
    """Two convolutions with a learnt slope between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(WIDTH, WIDTH, 3, padding=1) for _ in range(2))
        self.slope = nn.PReLU(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return maps of the same shape."""
        changed: Tensor = x + 0.3 * self.second(self.slope(self.first(x)))
        return changed


class Enlarger(nn.Module):
    """Generator: residual blocks at low resolution, whose channels become pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(CHANNELS, WIDTH, 3, padding=1)
        self.blocks = nn.ModuleList(Residual() for _ in range(2))
        self.up = nn.Conv2d(WIDTH, 4 * CHANNELS, 3, padding=1)

    def forward(self, small: Tensor) -> Tensor:
        """Return large images."""
        x = self.stem(small)
        for block in self.blocks:
            x = block(x)
        detail = F.pixel_shuffle(self.up(x), 2)
        return detail + F.interpolate(small, scale_factor=2.0)


class Critic(nn.Module):
    """Discriminator of patches."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(CHANNELS, WIDTH, 4, 2, 1), nn.Conv2d(WIDTH, 2 * WIDTH, 4, 2, 1)])
        self.score = nn.Conv2d(2 * WIDTH, 1, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Return a score for each image."""
        x = images
        for layer in self.layers:
            x = F.leaky_relu(layer(x), 0.2)
        scores: Tensor = self.score(x)
        return scores.mean((1, 2, 3))


class Game(nn.Module):
    """Both networks."""

    def __init__(self) -> None:
        super().__init__()
        self.critic, self.enlarger = Critic(), Enlarger()


def critic_loss(game: Any, batch: Pairs) -> Tensor:
    """Return the hinge loss of the critic, summed over images."""
    with torch.no_grad():
        made = game.enlarger(batch["small"])
    return F.relu(1 - game.critic(batch["large"])).sum() + F.relu(1 + game.critic(made)).sum()


def enlarger_loss(game: Any, batch: Pairs) -> Tensor:
    """Return the loss of the generator: pixels and the critic's score, summed over images."""
    made = game.enlarger(batch["small"])
    pixels = (made - batch["large"]).abs().mean((1, 2, 3))
    loss: Tensor = pixels.sum() - 0.1 * game.critic(made).sum()
    return loss


def critic_optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return Adam without momentum."""
    return Adam(parameters, lr=2e-3, betas=(0.0, 0.9))


def enlarger_optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return Adam."""
    return Adam(parameters, lr=1e-3, betas=(0.5, 0.99))


class Play:
    """Both networks, sharded, with their optimizers."""

    def __init__(self, game: Game, mesh: DeviceMesh, max_norm: float) -> None:
        self.game, self.max_norm = game, max_norm
        for block in (*game.enlarger.blocks, game.enlarger, *game.critic.layers, game.critic):
            fully_shard(block, mesh=mesh)
        self.optimizers = {
            game.critic: critic_optimizer(game.critic.parameters()),
            game.enlarger: enlarger_optimizer(game.enlarger.parameters()),
        }

    def turn(self, network: Any, loss: Callable[[Any, Pairs], Tensor], batches: list[Pairs]) -> Tensor:
        """Train one network; returns the mean loss over the images of all ranks."""
        images = torch.tensor([0.0, sum(len(batch["small"]) for batch in batches)])
        everyone = images[1].clone()
        dist.all_reduce(everyone)
        self.optimizers[network].zero_grad()
        for index, batch in enumerate(batches):
            network.set_requires_gradient_sync(index == len(batches) - 1)
            value = loss(self.game, batch)
            (value * dist.get_world_size() / everyone).backward()  # type: ignore[no-untyped-call]
            images[0] += value.detach()
        nn.utils.clip_grad_norm_(network.parameters(), self.max_norm)
        self.optimizers[network].step()
        dist.all_reduce(images)
        return images[0] / images[1]

    def step(self, batches: list[Pairs]) -> Iterator[Tensor]:
        """Take both turns, and yield the loss of each."""
        yield self.turn(self.game.critic, critic_loss, batches)
        yield self.turn(self.game.enlarger, enlarger_loss, batches)


@own_loop(
    model=Game,
    batch=pairs,
    loss={"critic": critic_loss, "enlarger": enlarger_loss},
    optimizer={"critic": critic_optimizer, "enlarger": enlarger_optimizer},
    meshes=["dp2", "hsdp2x2"],
)
def train(config: LoopConfig) -> Iterator[Tensor]:
    """Train as the script does."""
    model = config.model()
    assert isinstance(model, Game)
    play = Play(model, config.device_mesh(), config.max_norm)
    for micro_batches in config.steps:
        yield from play.step(micro_batches)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    source = torch.Generator().manual_seed(1 + dist.get_rank())
    script = Play(Game(), init_device_mesh("cpu", (dist.get_world_size(),)), 1.0)
    for _ in range(4):
        print([float(loss) for loss in script.step([pairs(source) for _ in range(2)])])
    dist.destroy_process_group()
