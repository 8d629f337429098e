"""Script that improves a policy of continuous actions (PPO) from episodes of unequal length, on FSDP2 with TP.

    torchrun --nproc-per-node 4 actor_critic.py
    conformance judge actor_critic.py:train

Policy and value have a trunk in common and a loss each. Steps after the end of an episode do not count. Some
parameters are sharded by tensor parallelism and some are not, so that clipping is the script's own.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import Adam, Optimizer

from conformance.subjects import LoopConfig, own_loop

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

STATES, ACTIONS, WIDTH, LONGEST = 6, 2, 16, 7
CLIPPED, VALUE_WEIGHT, ENTROPY_WEIGHT = 0.2, 0.5, 0.01
Episodes = dict[str, Tensor]


def episodes(generator: torch.Generator, count: int = 4) -> Episodes:
    """Return padded episodes with advantages and returns, which a rollout has computed."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(count, LONGEST, *shape, generator=generator)

    lengths = torch.randint(2, LONGEST + 1, (count, 1), generator=generator)
    actions = normal(ACTIONS)
    return {
        "states": normal(STATES),
        "actions": actions,
        "log_probabilities": -0.5 * actions.square().sum(-1) - 1.8 + 0.1 * normal(),
        "advantages": normal(),
        "returns": 2 * normal(),
        "is_step": torch.arange(LONGEST) < lengths,
    }


class Layer(nn.Module):
    """Norm and network with a way around them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return features of the same shape."""
        return x + cast("Tensor", self.down(self.up(self.norm(x)).tanh()))


class ActorCritic(nn.Module):
    """Trunk, means of actions with a common deviation, and values."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(STATES, WIDTH)
        self.trunk = nn.ModuleList(Layer() for _ in range(2))
        self.mean, self.value = nn.Linear(WIDTH, ACTIONS), nn.Linear(WIDTH, 1)
        self.log_deviation = nn.Parameter(torch.full((ACTIONS,), -0.2))

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return means and deviations of actions, and values."""
        x = self.stem(states)
        for layer in self.trunk:
            x = layer(x)
        mean = self.mean(x)
        return mean, self.log_deviation.expand_as(mean), self.value(x).squeeze(-1)


def ppo_loss(model: nn.Module, batch: Episodes) -> Tensor:
    """Return the losses of policy, value and entropy, summed over the steps of all episodes."""
    mean, log_deviation, value = model(batch["states"])
    standard = (batch["actions"] - mean) * (-log_deviation).exp()
    log_probability = (-0.5 * standard.square() - log_deviation - 0.9189385).sum(-1)
    ratio = (log_probability - batch["log_probabilities"]).exp()
    gain = torch.minimum(ratio * batch["advantages"], ratio.clamp(1 - CLIPPED, 1 + CLIPPED) * batch["advantages"])
    value_loss = F.huber_loss(value, batch["returns"], reduction="none")
    each: Tensor = -gain + VALUE_WEIGHT * value_loss - ENTROPY_WEIGHT * log_deviation.sum(-1)
    return (each * batch["is_step"]).sum()


def count_steps(batch: Episodes) -> float:
    """Return the number of steps of all episodes."""
    return float(batch["is_step"].sum())


def make_optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return Adam, one parameter at a time, since parameters are of two meshes."""
    return Adam(parameters, lr=3e-3, eps=1e-5, foreach=False)


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale gradients on any meshes by one factor, and return the norm of all before."""
    shards: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        gradient = cast("DTensor", parameter.grad)
        mesh = gradient.device_mesh
        sharded = [dim for dim, placement in enumerate(gradient.placements) if not placement.is_replicate()]
        shards[tuple(mesh.get_group(dim) for dim in sharded)].append(gradient.to_local())
    square = torch.zeros(())
    for groups, tensors in shards.items():
        squares = torch.stack([tensor.square().sum() for tensor in tensors]).sum()
        for group in groups:
            dist.all_reduce(squares, group=group)
        square += squares
    norm = square.sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for tensors in shards.values():
        for tensor in tensors:
            tensor.mul_(factor)
    return norm


def shard(model: ActorCritic, mesh: DeviceMesh) -> DeviceMesh:
    """Shard the trunk's networks over features and all over data; return the mesh of data."""
    if "tp" in (mesh.mesh_dim_names or ()):
        plan = {"trunk.*.up": ColwiseParallel(), "trunk.*.down": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
        mesh = mesh["dp_shard"]
    for layer in model.trunk:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return mesh


def train_steps(
    model: nn.Module, mesh: DeviceMesh, steps: Iterable[list[Episodes]], max_norm: float
) -> Iterator[tuple[float, Tensor]]:
    """Train; yields the loss of each step that counts, and the norm."""
    assert isinstance(model, ActorCritic)
    data_ranks = shard(model, mesh).size()
    copies = mesh.size() // data_ranks
    optimizer = make_optimizer(model.parameters())
    for micro_batches in steps:
        totals = torch.tensor([0.0, sum(map(count_steps, micro_batches))])
        counted = totals[1:].clone()
        dist.all_reduce(counted)
        counted /= copies
        for batch in micro_batches:
            cast("FSDPModule", model).set_requires_gradient_sync(batch is micro_batches[-1])
            loss = ppo_loss(model, batch)
            (loss * data_ranks / counted.squeeze()).backward()  # type: ignore[no-untyped-call]
            totals[0] += loss.detach()
        norm = clip_gradients(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(totals)
        yield float(totals[0] / totals[1]), norm


@own_loop(
    model=ActorCritic,
    loss=ppo_loss,
    batch=episodes,
    count=count_steps,
    optimizer=make_optimizer,
    meshes=["dp2", "dp2-tp2"],
)
def train(config: LoopConfig) -> Iterator[tuple[float, Tensor]]:
    """Train as the script does."""
    return train_steps(config.model(), config.device_mesh(), config.steps, config.max_norm)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    ranks = dist.get_world_size()
    shape, names = ((2, ranks // 2), ("dp_shard", "tp")) if ranks > 2 else ((ranks,), ("dp_shard",))
    everyone = init_device_mesh("cpu", shape, mesh_dim_names=names)
    source = torch.Generator().manual_seed(1 + everyone.get_local_rank("dp_shard"))
    data = [[episodes(source) for _ in range(2)]] * 8
    for number, (mean_loss, norm) in enumerate(train_steps(ActorCritic(), everyone, data, 1.0)):
        print(f"step {number}: loss {mean_loss:.4f}, norm {float(norm):.3f}")
    dist.destroy_process_group()
