"""Blocks of one model on several meshes, such as experts, embeddings and adapters: each arrangement, and its data.

Weights, samples and coefficients are small integers in fp64, and all worlds are powers of two, so that gradients are
exact in any order: they equal those of one process in every bit, or they are wrong.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp  # for `DataParallelMeshDims`, which torch has from 2.13 on
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from conformance.experiments.fsdp_extension import placed_on

EXPERTS, ROWS, COLUMNS = 8, 8, 4
"""Shape of a block's weight: even over four ranks in each dimension; FSDP2 has uneven shards in the first alone."""
SHIFTS = 7
"""Length of the root's parameter, of which ranks have unequal shards."""


@dataclass(frozen=True)
class Meshes:
    """Meshes of one world: all ranks in one dimension, and in two of which each is a mesh, too."""

    flat: DeviceMesh
    two: DeviceMesh

    @property
    def outer(self) -> DeviceMesh:
        """First dimension: ranks of different nodes."""
        return self._dim(0)

    @property
    def inner(self) -> DeviceMesh:
        """Second dimension: ranks of one node."""
        return self._dim(1)

    def _dim(self, dim: int) -> DeviceMesh:
        assert self.two.mesh_dim_names is not None
        return self.two[self.two.mesh_dim_names[dim]]

    def coordinates(self) -> Sequence[tuple[int, int]]:
        """Return the coordinates of all ranks in the two dimensions, in order of the ranks."""
        sizes = self.two.shape
        return [(outer, inner) for outer in range(sizes[0]) for inner in range(sizes[1])]


class Block(nn.Module):
    """Weight of shape (experts, rows, columns) and bias of shape (experts,), of which a rank may hold a slice."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        shapes = {"weight": (EXPERTS, ROWS, COLUMNS), "bias": (EXPERTS,)}
        for name, shape in shapes.items():
            numbers = torch.randint(-4, 5, shape, generator=generator, dtype=torch.float64)
            self.register_parameter(name, nn.Parameter(numbers))

    def forward(self, sample: Tensor, coefficients: Tensor, bias_coefficients: Tensor) -> Tensor:
        """Return the rank's share of the loss for a sample of shape (columns,)."""
        parameters = (self.get_parameter(name) for name in ("weight", "bias"))
        weight, bias = (p.to_local() if isinstance(p, DTensor) else p for p in parameters)
        loss: Tensor = ((weight @ sample) * coefficients).sum() + (bias[:, None] * bias_coefficients).sum()
        return loss


@dataclass(frozen=True)
class Arrangement:
    """Way in which a block is sharded, with the data for which its ranks' mean gradient is that of one process."""

    name: str
    shard: Callable[[Block, Meshes], None]
    sample: Callable[[int, int, int], int]
    """Function from a rank and its outer and inner coordinate to the number of its sample."""
    sliced: int | None = None
    """Dimension of the weight along which the inner ranks hold slices in forward."""
    is_expert: bool = False
    """True if inner ranks hold different experts, which see the samples of different ranks."""
    is_managed: bool = True
    """False if FSDP leaves the block alone."""


def _fsdp(mesh_of: Callable[[Meshes], DeviceMesh], dim: int = 0) -> Callable[[Block, Meshes], None]:
    """Return a function that shards a block by FSDP, matrices along a dimension."""

    def shard(block: Block, meshes: Meshes) -> None:
        fully_shard(block, mesh=mesh_of(meshes), shard_placement_fn=lambda p: Shard(dim if p.ndim > 1 else 0))

    return shard


def _sliced(block: Block, meshes: Meshes, dim: int) -> None:
    """Give each inner rank a slice of the weight, and of the bias if it is one of experts."""
    for name, layout in (("weight", Shard(dim)), ("bias", Shard(0) if dim == 0 else Replicate())):
        full = getattr(block, name).detach()
        setattr(block, name, nn.Parameter(distribute_tensor(full, meshes.inner, [layout])))


def _experts(block: Block, meshes: Meshes) -> None:
    _sliced(block, meshes, 0)
    _fsdp(lambda each: each.outer, 1)(block, meshes)
    group = cast("FSDPModule", block)
    group.set_gradient_divide_factor(float(meshes.flat.size()))
    group.set_force_sum_reduction_for_comms(True)  # gloo has no reduction that multiplies


def _tensor_parallel(block: Block, meshes: Meshes) -> None:
    _sliced(block, meshes, 1)


def _both(dim: int, *, fsdp_dim: int) -> Callable[[Block, Meshes], None]:
    """Return a function that slices a block over the inner ranks, and shards the slices over the outer ones.

    Along one dimension the shards are strided.
    """

    def shard(block: Block, meshes: Meshes) -> None:
        _sliced(block, meshes, dim)
        _fsdp(lambda each: each.outer, fsdp_dim)(block, meshes)

    return shard


ARRANGEMENTS: tuple[Arrangement, ...] = (
    Arrangement("FSDP", _fsdp(lambda each: each.flat), lambda rank, _outer, _inner: rank),
    Arrangement("FSDP by rows", _fsdp(lambda each: each.flat, 1), lambda rank, _outer, _inner: rank),
    Arrangement("HSDP", _fsdp(lambda each: each.two), lambda rank, _outer, _inner: rank),
    Arrangement("FSDP within nodes", _fsdp(lambda each: each.inner), lambda _rank, _outer, inner: inner),
    Arrangement("experts", _experts, lambda rank, _outer, _inner: rank, sliced=0, is_expert=True),
    Arrangement("TP", _tensor_parallel, lambda _rank, _outer, _inner: 0, sliced=1, is_managed=False),
    Arrangement("FSDP of TP", _both(1, fsdp_dim=0), lambda _rank, outer, _inner: outer, sliced=1),
    Arrangement("strided rows", _both(1, fsdp_dim=1), lambda _rank, outer, _inner: outer, sliced=1),
    Arrangement("strided columns", _both(2, fsdp_dim=2), lambda _rank, outer, _inner: outer, sliced=2),
    Arrangement("plain", lambda _block, _meshes: None, lambda rank, _outer, _inner: rank, is_managed=False),
)
"""Arrangements, of which any two may meet in a model."""

Arrangements = tuple[Arrangement, ...]


def _named(
    *, shard: tuple[int, ...] = (), replicate: tuple[int, ...] = (), sliced: int | None = None, fsdp_dim: int = 0
) -> Callable[[Block, Meshes], None]:
    """Return a function that lays a block out on the mesh of two dimensions, of which FSDP shards those of a number.

    The inner ranks hold slices of the weight along a dimension, or replicas.
    """

    def arrange(block: Block, meshes: Meshes) -> None:
        for name in ("weight", "bias"):
            inner = Replicate() if sliced is None or name == "bias" else Shard(sliced)
            full = getattr(block, name).detach()
            setattr(block, name, nn.Parameter(distribute_tensor(full, meshes.two, [Replicate(), inner])))
        names = meshes.two.mesh_dim_names or ()
        fully_shard(
            block,
            mesh=meshes.two,
            shard_placement_fn=(lambda p: Shard(fsdp_dim if p.ndim > 1 else 0)) if shard else None,
            dp_mesh_dims=fsdp.DataParallelMeshDims(
                shard=_names_at(shard, names) or None, replicate=_names_at(replicate, names) or None
            ),
        )

    return arrange


def _names_at(dims: tuple[int, ...], names: Sequence[str]) -> tuple[str, ...] | str:
    """Return the names of the dimensions of a mesh; of one alone its name, as a call may spell it, too."""
    return names[dims[0]] if len(dims) == 1 else tuple(names[dim] for dim in dims)


def _two_meshes(block: Block, meshes: Meshes) -> None:
    """Shard the weight over the ranks of a node, and the bias over all, in one call."""
    fully_shard(
        block,
        mesh=meshes.flat,
        shard_placement_fn=lambda p: placed_on(meshes.inner, -p.ndim) if p.ndim > 1 else None,
    )


SPMD: Arrangements = (
    Arrangement("named rows", _named(shard=(0,), sliced=1), lambda _rank, outer, _inner: outer, sliced=1),
    Arrangement(
        "named strided rows", _named(shard=(0,), sliced=1, fsdp_dim=1), lambda _rank, outer, _inner: outer, sliced=1
    ),
    Arrangement(
        "named columns", _named(shard=(0,), sliced=2, fsdp_dim=2), lambda _rank, outer, _inner: outer, sliced=2
    ),
    Arrangement("named HSDP", _named(shard=(1,), replicate=(0,)), lambda rank, _outer, _inner: rank),
    Arrangement("named flat", _named(shard=(0, 1)), lambda rank, _outer, _inner: rank),
    Arrangement("two meshes", _two_meshes, lambda _rank, _outer, inner: inner),
    Arrangement("two meshes again", _two_meshes, lambda _rank, _outer, inner: inner),
    Arrangement("named replicas", _named(replicate=(0,), sliced=1), lambda _rank, outer, _inner: outer, sliced=1),
)
"""Arrangements of which one call spells more than one mesh.

Parameters are DTensors on the whole mesh, of which `dp_mesh_dims` names dimensions, or have meshes of their own.
"""


def combinations_of_blocks() -> list[Arrangements]:
    """Return any two arrangements, all together, and those of named dimensions."""
    return [*combinations(ARRANGEMENTS, 2), ARRANGEMENTS, SPMD]


FEW: Arrangements = tuple(each for each in ARRANGEMENTS if each.name in ("FSDP", "HSDP", "experts", "plain"))
"""Arrangements of a model that costs little."""


def name_of(arrangements: Arrangements) -> str:
    """Return the name of a model by its arrangements."""
    known = {ARRANGEMENTS: "all together", SPMD: "named dimensions"}
    return known.get(arrangements) or " and ".join(each.name for each in arrangements)


def block_name(name: str, arrangements: Arrangements) -> str:
    """Return the name of the arrangement whose parameter a name begins with, or `root`."""
    return arrangements[int(name.split(".")[1])].name if name.startswith("blocks.") else "root"


class Model(nn.Module):
    """Blocks, each arranged in its own way, below a root that FSDP shards over all ranks; its loss is their sum."""

    def __init__(self, arrangements: Arrangements, meshes: Meshes | None) -> None:
        super().__init__()
        self.arrangements, self.meshes = arrangements, meshes
        self.blocks = nn.ModuleList(Block(seed) for seed in range(len(arrangements)))
        self.shift = nn.Parameter(torch.arange(SHIFTS, dtype=torch.float64))
        if meshes is None:
            return
        unmanaged: set[nn.Parameter] = set()
        for arrangement, block in zip(arrangements, self.blocks, strict=True):
            arrangement.shard(cast("Block", block), meshes)
            unmanaged.update(() if arrangement.is_managed else block.parameters())
        fully_shard(self, mesh=meshes.flat, ignored_params=unmanaged)

    def forward(self, rank: int) -> Tensor:
        """Return the loss of a rank on its samples."""
        assert self.meshes is not None
        outer, inner = self.meshes.coordinates()[rank]
        loss = self.shift.sum()
        for arrangement, block in zip(self.arrangements, self.blocks, strict=True):
            sample, coefficients = samples()[arrangement.sample(rank, outer, inner)], coefficients_of()
            if arrangement.sliced == 2:
                sample = sample.tensor_split(self.meshes.inner.size())[inner]
            elif arrangement.sliced is not None:
                coefficients = coefficients.tensor_split(self.meshes.inner.size(), dim=arrangement.sliced)[inner]
            # A rank with some of the rows has the bias of all of them.
            bias_coefficients = coefficients if arrangement.sliced == 0 else coefficients_of()
            loss = loss + block(sample, coefficients, bias_coefficients)
        return loss

    def backward(self, *, reduces: bool = True) -> None:
        """Compute the gradients of the mean over ranks; those of plain blocks are reduced by hand, as in a trainer."""
        assert self.meshes is not None
        self(dist.get_rank()).backward()
        if not reduces:
            return
        for arrangement, block in zip(self.arrangements, self.blocks, strict=True):
            for parameter in block.parameters():
                if arrangement.name == "plain" and parameter.grad is not None:
                    dist.all_reduce(parameter.grad, group=self.meshes.flat.get_group())
                    parameter.grad /= self.meshes.flat.size()

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradient of each parameter by its name."""
        return {name: p.grad for name, p in self.named_parameters() if p.grad is not None}


def samples() -> Tensor:
    """Return a sample for each of up to eight ranks, of shape (8, columns)."""
    return torch.randint(-3, 4, (8, COLUMNS), generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def coefficients_of() -> Tensor:
    """Return the derivative of the loss by each output, of shape (experts, rows)."""
    return torch.randint(1, 5, (EXPERTS, ROWS), generator=torch.Generator().manual_seed(8), dtype=torch.float64)


def expected_gradients(arrangements: Arrangements, meshes: Meshes) -> dict[str, Tensor]:
    """Return the full gradients of the mean over ranks of a model's loss, as one process computes them."""
    gradients = {"shift": torch.ones(SHIFTS, dtype=torch.float64)}
    for number, arrangement in enumerate(arrangements):
        weight, bias = (torch.zeros(shape, dtype=torch.float64) for shape in ((EXPERTS, ROWS, COLUMNS), (EXPERTS,)))
        for rank, (outer, inner) in enumerate(meshes.coordinates()):
            sample = samples()[arrangement.sample(rank, outer, inner)]
            seen = coefficients_of()
            if arrangement.is_expert:
                held = torch.arange(EXPERTS).tensor_split(meshes.inner.size())[inner]
                seen = torch.zeros_like(seen).index_copy(0, held, seen[held])
            weight += seen[:, :, None] * sample
            bias += seen.sum(1)
        gradients[f"blocks.{number}.weight"] = weight / meshes.flat.size()
        gradients[f"blocks.{number}.bias"] = bias / meshes.flat.size()
    return gradients


def by_mesh(parameters: Iterator[nn.Parameter] | Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Return the parameters in lists, one for each mesh of a gradient, and one for plain tensors."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None, []).append(
            parameter
        )
    return list(groups.values())
