"""Dimensions of one mesh that `fully_shard` is told by name: which shard a weight, and which replicate it.

Weights, samples and coefficients are small integers in fp64, and all meshes have powers of two of ranks, so that
gradients equal those of one process in every bit, or they are wrong.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, cycle, permutations, product
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed import fsdp  # for `DataParallelMeshDims`, which torch has from 2.13 on
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from conformance.experiments.fsdp_net import DataParallel, Wrong
from conformance.instruments.sharding import full

ROWS, COLUMNS = 8, 16
"""Shape of the weight, which is even over eight ranks in each dimension."""
DIMENSIONS = 3
_MESHES = count()

Role = Literal["shard", "replicate", "slice"]
"""Way in which ranks along a dimension of the mesh hold a weight: FSDP shards or replicates it, or each has a slice."""
_ROLES: tuple[Role, ...] = ("shard", "replicate", "slice")


@dataclass(frozen=True)
class Layout:
    """Role of each dimension of a mesh, and the dimensions of the weight that are sliced and sharded."""

    roles: tuple[Role, ...]
    sliced: int
    sharded: int

    def dims(self, role: Role) -> list[int]:
        """Return the dimensions of the mesh that have a role."""
        return [dim for dim, own in enumerate(self.roles) if own == role]

    def placements(self) -> list[Placement]:
        """Return the placements of the weight before FSDP shards it."""
        return [Shard(self.sliced) if role == "slice" else Replicate() for role in self.roles]


def _roles(*, are_apart: bool) -> Iterator[tuple[Role, ...]]:
    """Yield each assignment of roles with at most one dimension of slices, and dimensions of shards apart or not."""
    for roles in product(_ROLES, repeat=DIMENSIONS):
        if roles.count("slice") < 2 and are_apart == (roles[0] == roles[2] == "shard" != roles[1]):
            yield roles


def name_dimensions(world: DataParallel, *, are_apart: bool) -> Wrong:
    """Train with each assignment of roles on meshes of the world's ranks, in as many dimensions as can have two ranks.

    Dimensions of the weight, and whether DTensor computes the slices, change from one training to the next. What torch
    refuses counts one.
    """
    wrong: Wrong = {}
    halvings = min(round(math.log2(world.size)), DIMENSIONS)
    shape = [world.size // 2 ** (halvings - 1), *[2] * (halvings - 1), *[1] * (DIMENSIONS - halvings)]
    options = cycle(product((0, 1), (0, 1), (False, True)))
    for sizes in sorted(set(permutations(shape))):
        # Names that no other mesh has: caches of DTensor return an equal mesh, which `fully_shard` refuses.
        names = tuple(f"named{next(_MESHES)}" for _ in sizes)
        mesh = init_device_mesh(world.device.type, sizes, mesh_dim_names=names)
        for roles, (sliced, sharded, is_distributed) in zip(_roles(are_apart=are_apart), options, strict=False):
            training = _Training(mesh, Layout(roles, sliced, sharded), world.device)
            try:
                found = training.wrong(is_distributed=is_distributed)
            except RuntimeError:
                found = {"refused": 1}
            text = f"{sizes} {' '.join(roles)}, slices of {sliced}, shards of {sharded}, DTensor: {is_distributed}"
            wrong |= {f"{text}, {what}": n for what, n in found.items()}
    return wrong


class _Product(nn.Module):
    """Products of a weight with samples, weighed with coefficients."""

    def __init__(self, weight: DTensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, samples: Tensor, coefficients: Tensor) -> Tensor:
        """Return the loss of samples of shape (n, columns) with coefficients of shape (n, rows), or of slices."""
        weight: Any = self.weight
        if not isinstance(samples, DTensor):
            weight = weight.to_local()
        loss: Tensor = ((samples @ weight.T) * coefficients).sum()
        return loss


class _Training:
    """Weight with a layout, and the samples of its ranks."""

    def __init__(self, mesh: DeviceMesh, layout: Layout, device: torch.device) -> None:
        self.mesh, self.layout = mesh, layout
        self.weight = _integers(0, ROWS, COLUMNS).to(device)
        self.others = [dim for dim, role in enumerate(layout.roles) if role != "slice"]
        """Dimensions along which ranks have different samples."""
        size = math.prod(mesh.size(dim) for dim in self.others)
        self.samples, self.coefficients = _integers(1, size, COLUMNS).to(device), _integers(2, size, ROWS).to(device)

    def wrong(self, *, is_distributed: bool) -> Wrong:
        """Return how the sharded weight and its gradient differ from the full ones; slices are computed by DTensor."""
        net = self._sharded()
        sharding = [dim for dim, role in enumerate(self.layout.roles) if role != "replicate"]
        wanted = self.weight.numel() // math.prod(self.mesh.size(dim) for dim in sharding)
        parameter: Any = net.weight
        wrong = {
            "held": int(parameter.to_local().numel() != wanted),
            "weight": int((full(parameter.detach()) != self.weight).sum()),
        }
        net(*(self._distributed() if is_distributed else self._own())).backward()
        expected = self.coefficients.T @ self.samples / len(self.samples)
        return wrong | {"gradient": int((full(parameter.grad) != expected).sum())}

    def _sharded(self) -> _Product:
        net = _Product(distribute_tensor(self.weight, self.mesh, self.layout.placements()))
        names = self.mesh.mesh_dim_names or ()
        shards, replicas = (tuple(names[dim] for dim in self.layout.dims(role)) for role in ("shard", "replicate"))
        fully_shard(
            net,
            mesh=self.mesh,
            dp_mesh_dims=fsdp.DataParallelMeshDims(shard=shards or None, replicate=replicas or None),
            shard_placement_fn=(lambda _: Shard(self.layout.sharded)) if shards else None,
        )
        return net

    def _own(self) -> tuple[Tensor, Tensor]:
        """Return sample and coefficients of this rank, of which ranks with slices need slices."""
        index = 0
        for dim in self.others:
            index = index * self.mesh.size(dim) + self.mesh.get_local_rank(dim)
        given = [self.samples[index : index + 1], self.coefficients[index : index + 1]]
        for dim in self.layout.dims("slice"):
            which = 0 if self.layout.sliced == 1 else 1
            given[which] = given[which].tensor_split(self.mesh.size(dim), 1)[self.mesh.get_local_rank(dim)]
        return given[0], given[1]

    def _distributed(self) -> tuple[Tensor, Tensor]:
        """Return all samples and coefficients, of which each rank holds its own."""
        placements = [Shard(0) if dim in self.others else Replicate() for dim in range(DIMENSIONS)]
        samples = distribute_tensor(self.samples, self.mesh, placements)
        return samples, distribute_tensor(self.coefficients, self.mesh, placements)


def _integers(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=generator, dtype=torch.float64)
