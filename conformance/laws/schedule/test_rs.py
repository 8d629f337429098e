"""RS: all-gathers, reductions and releases of parameters, and their points in time."""

from conformance.assertions import compare
from conformance.assertions.fixtures import Run
from conformance.instruments.facts import Collective, RankFacts
from conformance.judge.law import law
from conformance.oracles import pipeline
from conformance.oracles.frozen import at_step
from conformance.oracles.schedule import (
    Event,
    fsdp_events,
    group_of,
    reduced_numels,
    shard_numels,
    unsharded_after_forward,
)
from conformance.oracles.tp_schedule import local_shapes
from conformance.plan.cells import Cell
from reference_trainer.config import TrainerConfig
from reference_trainer.parallel_dims import ParallelDims, resolve_mesh

RESHARD_AFTER_FORWARD = (
    "https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html#torch.distributed.fsdp.fully_shard"
)
_PHASES = ("data", "evaluate", "forward", "backward")
_OF_FSDP = ("dp_shard", "dp_replicate")
_NUMBERS = "int64"
"""Dtype of sums over data ranks that FSDP does not issue: of the numbers of tokens, of a batch or of an expert."""


@law("RS-1", where="implementation = fsdp2", gaps=["large-models"], reference=RESHARD_AFTER_FORWARD)
def test_collectives_follow_reshard_after_forward_and_prefetch(run: Run, cell: Cell) -> None:
    """Number, order, phase, size and dtype of FSDP's collectives MUST be those of the reshard mode and of prefetching,
    in every step; in forward each MUST be issued when its group is entered, or the group that prefetches it.

    A block that no forward pass computes is gathered only where it is prefetched, and reduced only where gradients of
    earlier passes wait.

    Also after forward only the groups that the mode keeps are unsharded (in a pipeline, where forwards and backwards
    alternate, PP-3 judges what is kept), and none is when the optimizer steps. A rank with several stages of a pipeline
    gathers all of them before its first action, and reduces each after its last backward.
    """
    config = cell.config
    dims = resolve_mesh(config.mesh, world_size=cell.world_size)
    record = run(cell)
    for facts in record.ranks:
        shapes = local_shapes(config.model, tp=dims.tp, tp_rank=facts.mesh_coordinate.get("tp", 0))
        for step in record.steps:
            own = at_step(config, step)
            _check_events(facts, _expected(facts, own, dims), step, config)
            kept = [name for name in shapes if unsharded_after_forward(group_of(name, config), own)]
            if dims.pp == 1:
                _check_after_forward(facts, kept, step)
            _check_sharded(facts, step)


def _expected(facts: RankFacts, config: TrainerConfig, dims: ParallelDims) -> list[Event]:
    shapes = local_shapes(config.model, tp=dims.tp, tp_rank=facts.mesh_coordinate.get("tp", 0))
    numels = shard_numels(shapes, config, shards=dims.dp_shard)
    if dims.pp == 1:
        return fsdp_events(config, dims, numels, reduced_numels(shapes, config, shards=dims.dp_shard))
    return pipeline.fsdp_events(config, dims, numels, pipeline.order(config, rank=facts.mesh_coordinate["pp"]))


def _check_events(facts: RankFacts, expected: list[Event], step: int, config: TrainerConfig) -> None:
    measured = [
        Event(e.phase, e.kind, e.group, e.numel, e.dtype, during=_group(e.during, config))  # type: ignore[arg-type]
        for e in facts.collectives
        if e.step == step and e.phase in _PHASES and e.group.startswith(_OF_FSDP) and _is_of_parameters(e, config)
    ]
    where = f"rank {facts.rank}, step {step}"
    detail = f"{where}: {measured}"
    compare.count(
        len(measured), name="collectives per step", expected=len(expected), detail=detail, unit="collectives of FSDP"
    )
    for index, (issued, event) in enumerate(zip(measured, expected, strict=True)):
        assert issued == event, f"{where}, collective {index}: measured {issued}, expected {event}"


def _is_of_parameters(collective: Collective, config: TrainerConfig) -> bool:
    """Return whether a collective is neither of numbers, nor of rows that go to experts, nor of attention in a ring."""
    if config.mesh.cp > 1 and not collective.is_of_fsdp:
        return False
    return collective.dtype != _NUMBERS and collective.kind != "all_to_all"


def _group(module: str, config: TrainerConfig) -> str:
    return group_of(f"{module}.weight", config) if module else ""


def _check_after_forward(facts: RankFacts, kept: list[str], step: int) -> None:
    where = f"rank {facts.rank}, step {step}"
    after_forward = facts.unsharded[f"{step}/after_forward"]
    assert after_forward == kept, f"{where}: {after_forward} are unsharded after forward, must be {kept}"


def _check_sharded(facts: RankFacts, step: int) -> None:
    where = f"rank {facts.rank}, step {step}"
    for when in ("at_optimizer", "after_step"):
        unsharded = facts.unsharded[f"{step}/{when}"]
        assert not unsharded, f"{where}, {when}: {unsharded} are unsharded"
