"""RS: what is gathered, reduced and freed, and when."""

from conformance.engine import compare
from conformance.engine.cells import Cell, Mesh
from conformance.engine.law import Run, law
from conformance.instruments.recorder import RankFacts
from conformance.oracles.schedule import Event, fsdp_events, group_sizes, reshards_after_forward

RESHARD_AFTER_FORWARD = (
    "https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html#torch.distributed.fsdp.fully_shard"
)


@law("RS-1", reference=RESHARD_AFTER_FORWARD, since="2.9")
def test_schedule_follows_the_reshard_mode(run: Run, cell: Cell) -> None:
    """Number, order, phase, size and dtype of FSDP's collectives MUST be those of the reshard mode, in every step.

    Also after forward only the groups that the mode keeps are unsharded, and none is when the optimizer steps.
    """
    mesh = Mesh.parse(cell.mesh)
    for facts in run(cell).ranks:
        owners = {name: p.group for name, p in facts.parameters.items()}
        groups = group_sizes(_tensor_parallel_shapes(facts, mesh), owners, shards=mesh.dp_shard)
        expected = fsdp_events(cell, groups)
        for step in range(cell.steps):
            _check_events(facts, expected, step)
            _check_residency(cell, facts, step)


def _check_events(facts: RankFacts, expected: list[Event], step: int) -> None:
    measured = [
        Event(e.phase, e.kind, e.group, e.numel, e.dtype)  # type: ignore[arg-type]
        for e in facts.collectives
        if e.step == step and e.phase in ("forward", "backward") and e.group in ("dp_shard", "dp_replicate")
    ]
    where = f"rank {facts.rank}, step {step}"
    detail = f"{where}: {measured}"
    compare.count(
        len(measured), name="collectives per step", expected=len(expected), detail=detail, unit="collectives of FSDP"
    )
    for index, (m, e) in enumerate(zip(measured, expected, strict=True)):
        assert m == e, f"{where}, collective {index}: measured {m}, expected {e}"


def _tensor_parallel_shapes(facts: RankFacts, mesh: Mesh) -> dict[str, list[int]]:
    """The shapes that FSDP divides: where `tp` shards a dimension, this rank's chunk of it."""
    shapes = {}
    for name, parameter in facts.parameters.items():
        shapes[name] = list(parameter.shape)
        dim = parameter.shard_dims.get("tp")
        if dim is not None:
            chunk = -(-parameter.shape[dim] // mesh.tp)
            start = chunk * facts.mesh_coordinate["tp"]
            shapes[name][dim] = max(0, min(chunk, parameter.shape[dim] - start))
    return shapes


def _check_residency(cell: Cell, facts: RankFacts, step: int) -> None:
    keeps_last = not reshards_after_forward(cell.reshard, last=True)
    keeps_all = not reshards_after_forward(cell.reshard, last=False)
    kept = [name for name, p in facts.parameters.items() if keeps_all or (keeps_last and p.group in ("norm", "output"))]
    where = f"rank {facts.rank}, step {step}"
    assert facts.unsharded[f"{step}/after_forward"] == kept, f"{where}: not what {cell.reshard} keeps after forward"
    for moment in ("at_optimizer", "after_step"):
        unsharded = facts.unsharded[f"{step}/{moment}"]
        assert not unsharded, f"{where}, {moment}: {unsharded} are unsharded"
