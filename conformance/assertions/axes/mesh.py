"""Proof that a mesh takes effect: the changes that it must make to the record of one process."""

from collections import Counter

from conformance.assertions.axes.differences import expect
from conformance.oracles.torch_versions import traits_of
from conformance.plan.mesh import Mesh
from conformance.run.record import Record


def mesh_takes_effect(record: Record, neighbour: Record) -> None:
    """Raise ConformanceFailure unless ranks have the mesh's coordinates, and communicate over its dimensions only."""
    mesh = Mesh.parse(record.cell.mesh)
    sizes = {"pp": mesh.pp, "dp_replicate": mesh.dp_replicate, "dp_shard": mesh.dp_shard, "tp": mesh.tp}
    for name, size in sizes.items():
        seen = {facts.mesh_coordinate.get(name, 0) for facts in record.ranks}
        expect(seen == set(range(size)), f"coordinates {sorted(seen)} in mesh dimension {name} of size {size}")
    pairs = {(facts.rank, transfer.peer) for facts in record.ranks for transfer in facts.transfers}
    expect(bool(pairs) == (mesh.pp > 1), f"{len(pairs)} pairs of ranks exchange tensors")
    wide = {name for name, size in sizes.items() if size > 1 and name != "pp"}
    alone = {"dp_shard"} if traits_of(record.header.torch).one_rank_reduces else set()
    for run, expected in ((record, wide | alone), (neighbour, alone)):
        groups = {e.group for facts in run.ranks for e in facts.collectives if e.phase in ("forward", "backward")}
        expect(groups == expected, f"forward and backward communicate over {sorted(groups)}, not {sorted(expected)}")
    for run, expected_shards in ((record, mesh.dp_shard * mesh.tp), (neighbour, 1)):
        shards = _most_shards(run)
        expect(shards == expected_shards, f"parameters have at most {shards} different shards, not {expected_shards}")


def _most_shards(record: Record) -> int:
    """Return the largest number of different shards of a parameter that ranks hold."""
    shards = {(name, layout) for facts in record.ranks for name, layout in facts.layouts.items()}
    return max(Counter(name for name, _ in shards).values())
