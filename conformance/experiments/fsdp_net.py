"""Small net on which FSDP2 API is tried that the reference trainer does not use.

Weights and inputs are small integers and the number of ranks is a power of two, so that sums and means are exact in
fp32 in any order: a gradient equals that of one process in every bit, or it is wrong. In bf16 and fp16 products are
exact, too: bf16 has all integers up to 256, and sums over ranks are in fp32 or fp16, which has those up to 2048.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from conformance.experiments.context import RankWorld
from conformance.instruments.sharding import full
from reference_trainer.mesh import dp_rank, fsdp_mesh
from reference_trainer.mixed_precision import mixed_precision_policy

SAMPLES, WIDTH, INNER = 4, 8, 16

Wrong = dict[str, int]
"""Number of wrong elements or parameters, by kind of the fault."""


class Net(nn.Module):
    """Net of two layers and a parameter of one element, and a third layer that forward uses if asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.spare = nn.Linear(WIDTH, WIDTH)
        self.shift = nn.Parameter(torch.zeros(1))
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.data = torch.randint(-2, 3, parameter.shape, generator=generator).float()

    def forward(self, x: Tensor, *, with_spare: bool = False) -> Tensor:
        """Compute outputs of shape (samples, width)."""
        out: Tensor = self.second(self.first(x).relu()) + self.shift
        return out + self.spare(x) if with_spare else out

    def doubled(self, x: Tensor) -> Tensor:
        """Compute with the parameters in a method that is not `forward`."""
        out: Tensor = 2 * (self.second(self.first(x).relu()) + self.shift)
        return out


class DataParallel:
    """Coordinate and samples of a rank, and the results of one process on the samples of all ranks."""

    def __init__(self, mesh: DeviceMesh, device: torch.device, rank: int, policy: MixedPrecisionPolicy) -> None:
        self.mesh, self.device, self.rank, self.policy = mesh, device, rank, policy
        self.size, self.shards = mesh.size(), mesh.size(mesh.ndim - 1)
        generator = torch.Generator().manual_seed(1)
        shape = (self.size, SAMPLES, WIDTH)
        self.samples = torch.randint(-2, 3, shape, generator=generator).float().to(device)

    @property
    def own(self) -> Tensor:
        """Samples of this rank, of shape (samples, width)."""
        return self.samples[self.rank]

    def net(self, **options: Any) -> Net:
        """Return a new net that is sharded with options of `fully_shard`."""
        return self.shard(Net().to(self.device), **options)

    def shard(self, net: Net, **options: Any) -> Net:
        """Shard both layers, and the root with the spare layer."""
        for module in (net.first, net.second, net):
            fully_shard(module, mesh=self.mesh, mp_policy=self.policy, **options)
        return net

    def expected(self, single: Net | None = None, *, micro_batches: int = 1) -> dict[str, Tensor | None]:
        """Return the gradients of the mean over ranks of the summed outputs, computed by one process."""
        single = (single or Net()).to(self.device)
        for index in range(micro_batches):
            single(self.samples.flatten(0, 1) + index).sum().backward()
        return {name: None if p.grad is None else p.grad / self.size for name, p in single.named_parameters()}

    def wrong(self, net: Net, expected: dict[str, Tensor | None] | None = None, *, factor: float = 1.0) -> Wrong:
        """Count the elements of the sharded net's gradients that are not `factor` times the expected gradients."""
        wrong = {}
        for name, wanted in (expected or self.expected()).items():
            grad = net.get_parameter(name).grad
            if grad is None or wanted is None:
                wrong[f"gradient of {name}"] = 0 if grad is wanted else 1
            else:
                wrong[f"gradient of {name}"] = int((full(grad.to(self.device)) != factor * wanted).sum())
        return wrong

    def backward(self, net: Net, *, micro_batch: int = 0) -> Net:
        """Run forward and backward on own samples, which each micro-batch has increased by one."""
        net(self.own + micro_batch).sum().backward()
        return net

    def meshes(self) -> dict[str, "DataParallel"]:
        """Return this, and the same ranks as replicas of one shard and as shards of one replica, by name."""
        return {"own": self, "N x 1": self._on(self.size, 1), "1 x N": self._on(1, self.size)}

    def _on(self, *shape: int) -> "DataParallel":
        return DataParallel(
            init_device_mesh(self.device.type, shape, mesh_dim_names=("dp_replicate", "dp_shard")),
            self.device,
            self.rank,
            self.policy,
        )


def try_all(rank: RankWorld, uses: Mapping[str, Callable[[DataParallel], Wrong]]) -> dict[str, Wrong]:
    """Return the faults of each use, by its name, in the precision of the cell."""
    policy = replace(mixed_precision_policy(rank.config.precision), cast_forward_inputs=True)
    world = DataParallel(fsdp_mesh(rank.mesh), rank.device, dp_rank(rank.mesh), policy)
    return {name: use(world) for name, use in uses.items()}


def fsdp_module(module: nn.Module) -> FSDPModule:
    """Return the module as an FSDPModule, which `fully_shard` has made of it."""
    return cast("FSDPModule", module)


def fsdp_modules(net: nn.Module) -> list[FSDPModule]:
    """Return all modules that `fully_shard` was applied to."""
    return [module for module in net.modules() if isinstance(module, FSDPModule)]


def double(net: nn.Module) -> None:
    """Double all parameters and drop their gradients, as a step that shows which weights a later one has gathered."""
    net.zero_grad()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(2)


def sharded_parameters(module: nn.Module) -> int:
    """Count the parameters that are sharded now."""
    return sum(isinstance(parameter, DTensor) for parameter in module.parameters())
