"""Proof that a mesh takes effect: what it must change in a record, compared with that of one process."""

from conformance.laws.axes.differences import expect
from conformance.oracles.torch_versions import traits_of
from conformance.plan.mesh import Mesh
from conformance.run.record import Record


def mesh_takes_effect(record: Record, neighbour: Record) -> None:
    """Raise ConformanceFailure unless ranks are where the mesh says, and communicate over it and nothing else."""
    mesh = Mesh.parse(record.cell.mesh)
    sizes = {"dp_replicate": mesh.dp_replicate, "dp_shard": mesh.dp_shard, "tp": mesh.tp}
    for name, size in sizes.items():
        seen = {facts.mesh_coordinate.get(name, 0) for facts in record.ranks}
        expect(seen == set(range(size)), f"coordinates {sorted(seen)} in mesh dimension {name} of size {size}")
    wide = {name for name, size in sizes.items() if size > 1}
    alone = {"dp_shard"} if traits_of(record.header.torch).one_rank_communicates else set()
    for one, expected in ((record, wide | alone), (neighbour, alone)):
        groups = {e.group for facts in one.ranks for e in facts.collectives if e.phase in ("forward", "backward")}
        expect(groups == expected, f"forward and backward communicate over {sorted(groups)}, not {sorted(expected)}")
    for one, expected_shards in ((record, mesh.dp_shard * mesh.tp), (neighbour, 1)):
        shards = _most_shards(one)
        expect(shards == expected_shards, f"parameters have at most {shards} different shards, not {expected_shards}")


def _most_shards(record: Record) -> int:
    """Over all parameters, the largest number of different shards that ranks hold."""
    return max(len({facts.layouts[name] for facts in record.ranks}) for name in record.ranks[0].parameters)
