"""What a mesh must change in a record, beside that of one process: a proof of `axes.py`."""

from conformance.laws.axes.differences import expect
from conformance.oracles.torch_versions import lifetimes_of
from conformance.plan.cells import Mesh
from conformance.run.record import Record


def mesh_takes_effect(record: Record, neighbour: Record) -> None:
    """Raises ConformanceFailure unless ranks are where the mesh says, and communicate over it and nothing else."""
    mesh = Mesh.parse(record.cell.mesh)
    sizes = {"dp_replicate": mesh.dp_replicate, "dp_shard": mesh.dp_shard, "tp": mesh.tp}
    for name, size in sizes.items():
        seen = {facts.mesh_coordinate.get(name, 0) for facts in record.ranks}
        expect(seen == set(range(size)), f"coordinates {sorted(seen)} in mesh dimension {name} of size {size}")
    wide = {name for name, size in sizes.items() if size > 1}
    alone = {"dp_shard"} if lifetimes_of(record.header.torch).one_rank_communicates else set()
    for one, expected in ((record, wide | alone), (neighbour, alone)):
        groups = {e.group for facts in one.ranks for e in facts.collectives if e.phase in ("forward", "backward")}
        expect(groups == expected, f"forward and backward communicate over {sorted(groups)}, not {sorted(expected)}")
    for one, expected_parts in ((record, mesh.dp_shard * mesh.tp), (neighbour, 1)):
        parts = _most_parts(one)
        expect(parts == expected_parts, f"parameters are in at most {parts} different parts, not {expected_parts}")


def _most_parts(record: Record) -> int:
    """Over all parameters, the largest number of different parts that ranks hold."""
    return max(len({facts.layouts[name] for facts in record.ranks}) for name in record.ranks[0].parameters)
