"""INIT: after `to_empty` every tensor is initialised, and to what the mesh has no say in."""

from conformance.engine import compare
from conformance.engine.cells import Cell
from conformance.engine.law import Run, law
from conformance.engine.workload import trainer_config
from conformance.oracles.reference import initial_model

TO_EMPTY = "https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html#torch.nn.Module.to_empty"


@law("INIT-1", reference=TO_EMPTY)
def test_no_poison_survives_initialisation(run: Run, cell: Cell) -> None:
    """Every element of every parameter and buffer, persistent or not, MUST be initialised after `to_empty`.

    The memory was filled with NaN first, so a forgotten tensor cannot pass for a clean page.
    """
    model = initial_model(trainer_config(cell))
    names = {name for name, _ in [*model.named_parameters(), *model.named_buffers()]}
    for facts in run(cell).ranks:
        assert facts.poisoned.keys() == names, f"rank {facts.rank} poisoned other tensors than the model has"
        survivors = {name: number for name, number in facts.surviving_poison.items() if number}
        compare.count(
            sum(survivors.values()),
            name="elements left uninitialised",
            expected=0,
            detail=f"rank {facts.rank}: {survivors}",
            unit=f"of {sum(facts.poisoned.values())} elements",
        )
    compare.count(
        sum(sum(facts.poisoned.values()) > 0 for facts in run(cell).ranks),
        name="ranks with poison",
        expected=cell.world_size,
        unit="ranks",
    )


@law("INIT-2", reference=TO_EMPTY)
def test_initial_weights_do_not_depend_on_the_mesh(run: Run, cell: Cell) -> None:
    """Every initial tensor MUST equal the one-process initialisation in every bit, on every mesh.

    Both put together from the ranks' shards and as `DTensor.full_tensor` gathers it.

    Wrong if shards draw the same numbers, a layout is permuted, or a padded row is lost.
    """
    record, model = run(cell), initial_model(trainer_config(cell))
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    compare.bits(record.select("initial/parameter/"), parameters, name="initial parameters")
    compare.bits(record.select("initial/gathered/"), parameters, name="initial parameters, gathered")
    compare.bits(record.select("initial/buffer/"), dict(model.named_buffers()), name="initial buffers")
