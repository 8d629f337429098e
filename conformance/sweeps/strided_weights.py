"""Operators on weights whose shards are strided, since FSDP shards along the dimension of tensor parallelism.

Views, reductions and others that must know how strided shards lie in the tensor; each is compared with full tensors as
in `operator_sweep`, with its gradient.
"""

from collections.abc import Hashable, Iterator, Sequence
from functools import partial

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from conformance.experiments.context import RankWorld
from conformance.sweeps.drawing import share_on
from conformance.sweeps.layouts import (
    Layout,
    difference,
    integers,
    is_member,
    shard_of,
    spelled,
    strided_columns,
    strided_rows,
)
from conformance.sweeps.operator_samples import Sample, sample
from conformance.sweeps.operator_sweep import try_size
from conformance.sweeps.trials import Trials

_WEIGHT = "8 8 2 distinct"
"""A tensor whose rows and columns up to eight ranks can share equally."""
_FLATTENED = sample("rows and columns flattened and back", lambda x: x.flatten(0, 1).view(x.shape), _WEIGHT)
_ACTIVATIONS: Sequence[Layout] = ((Shard(0), Shard(1)), (Replicate(), Shard(1)))
"""Layouts of batches of sequences, whose flattened tokens are strided shards."""


def samples() -> Iterator[Sample]:
    """Yield the operators."""
    for sizes in ((2, -1), (4, -1), (-1, 2), (2, 2, -1), (1, -1)):
        text = " x ".join("rest" if size == -1 else str(size) for size in sizes)
        yield sample(f"rows as {text}", lambda x, sizes=sizes: x.unflatten(0, sizes), _WEIGHT)
        yield sample(f"columns as {text}", lambda x, sizes=sizes: x.unflatten(1, sizes), _WEIGHT)
    yield sample("view of twice the rows", lambda x: x.view(2 * x.size(0), -1), _WEIGHT)
    yield sample("view of half the rows", lambda x: x.view(x.size(0) // 2, -1), _WEIGHT)
    yield sample("rows and columns as 4 x rest", lambda x: x.view(4, -1, x.size(2)), _WEIGHT)
    yield sample("rows regrouped and back", lambda x: x.unflatten(0, (2, -1)).flatten(0, 1), _WEIGHT)
    yield _FLATTENED
    yield sample("unsqueeze", lambda x: x.unsqueeze(0), _WEIGHT)
    yield sample("stack", lambda x: torch.stack([x, x]), _WEIGHT)
    yield sample("unbind the last", lambda x: x.unbind(-1), _WEIGHT)
    yield sample("split of columns", lambda x: x.split(4, 1), _WEIGHT)
    for dim in (0, 1, 2):
        yield sample(f"sum of dim {dim}", partial(torch.sum, dim=dim), _WEIGHT)
        yield sample(f"max of dim {dim}", partial(torch.max, dim=dim), _WEIGHT)
        yield sample(f"argmax of dim {dim}", partial(torch.argmax, dim=dim), _WEIGHT)


def _layouts(mesh: DeviceMesh) -> list[Layout]:
    """Return layouts of such weights, and of one whose tensor-parallel ranks have sums to add."""
    rows = strided_rows(mesh)
    return [rows, (rows[0], Replicate()), (rows[0], Partial()), strided_columns(mesh)]


def try_weights(rank: RankWorld, trials: Trials) -> None:
    """Try the operators, and the distribution of full tensors, in the layouts of the mesh of the trials."""
    every = _layouts(rank.mesh)
    for layout in every:
        if not any(at.is_partial() for at in layout):
            for source in (0, None):
                call = partial(_distribution_faults, layout, source)
                trials.attempt("distribute_tensor", f"source {source}", spelled(layout), call, may_refuse=False)
            call = partial(_faults_on_other_ranks, layout)
            trials.attempt("distribute_tensor", "other ranks", spelled(layout), call, may_refuse=False)
    pairs = [(each, layout) for each in samples() for layout in every] + [(_FLATTENED, at) for at in _ACTIVATIONS]
    for each, layout in share_on(rank, pairs, _kinds):
        trials.add(each.name)
        try_size(trials, each, "even", [(layout,)])


def _kinds(trial: tuple[Sample, Layout]) -> list[Hashable]:
    """Return the kinds of a trial, of each of which a share has one: its layout."""
    return [spelled(trial[1])]


def _distribution_faults(layout: Layout, source: int | None, mesh: DeviceMesh) -> dict[str, str]:
    full = integers(8, 8)
    result = distribute_tensor(full, mesh, layout, src_data_rank=source)
    text = difference(result.to_local(), shard_of(full, mesh, layout), bound=0.0)
    return {"shard": text} if text else {}


def _faults_on_other_ranks(layout: Layout, mesh: DeviceMesh) -> dict[str, str]:
    """Distribute a tensor to the first ranks of each row of a mesh, outside of which no rank has a shard."""
    members, full = DeviceMesh(mesh.device_type, mesh.mesh[:, :1]), integers(8, 8)
    result = distribute_tensor(full, members, layout, src_data_rank=None)
    expected = shard_of(full, members, layout) if is_member(members) else full[:0, 0]
    text = difference(result.to_local(), expected, bound=0.0)
    return {"shard": text} if text else {}
