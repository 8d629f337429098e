"""MP-4: what is sent, in every phase."""

from collections.abc import Iterator

from conformance.judge.law import Run, law
from conformance.laws import compare
from conformance.oracles.traffic import Traffic, TrafficByKey, add_up, step_events
from conformance.plan.cells import Cell
from conformance.plan.workload import trainer_config
from reference_trainer.parallel_dims import resolve_mesh

TENSOR_PARALLEL = "https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html"


@law("MP-4", reference=TENSOR_PARALLEL)
def test_bytes_on_the_wire_equal_the_traffic_model(run: Run, cell: Cell) -> None:
    """Number and bytes of the collectives of each phase, group, kind and dtype MUST be those that the algorithms need.

    In every step on every rank. A collective too many costs bandwidth; one too few is most often a sum left out.
    """
    config = trainer_config(cell)
    dims = resolve_mesh(config.mesh, world_size=cell.world_size)
    measured_nbytes = expected_nbytes = 0
    misfits: list[str] = []
    for facts in run(cell).ranks:
        expected = add_up(step_events(config, dims, tp_rank=facts.mesh_coordinate.get("tp", 0)))
        for step in range(cell.steps):
            measured = add_up(event for event in facts.collectives if event.step == step)
            misfits += (f"rank {facts.rank}, step {step}, {misfit}" for misfit in _misfits(measured, expected))
            measured_nbytes += sum(traffic.nbytes for traffic in measured.values())
            expected_nbytes += sum(traffic.nbytes for traffic in expected.values())
    detail = "; ".join(misfits[:4])
    compare.count(
        measured_nbytes, name="traffic", expected=expected_nbytes, detail=detail, unit="bytes that ranks contribute"
    )
    compare.count(len(misfits), name="traffic that differs", expected=0, detail=detail, unit="entries of the model")


def _misfits(measured: TrafficByKey, expected: TrafficByKey) -> Iterator[str]:
    for key in sorted(measured.keys() | expected.keys()):
        found, wanted = measured.get(key, Traffic()), expected.get(key, Traffic())
        if found != wanted:
            phase, group, kind, dtype = key
            yield (
                f"{phase}: {kind} over {group} in {dtype}: measured {found.nbytes} bytes in {found.count} collectives, "
                f"expected {wanted.nbytes} bytes in {wanted.count}"
            )
