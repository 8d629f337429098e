"""Profile `trainers`: the cells on which other people's trainers are judged, whose options any trainer may have."""

from conformance.plan.cells import Cell, axis_names
from conformance.plan.content import Profile

TRAINERS = "trainers"
"""Name of the profile, which no matrix has: `--subject` selects it."""
TRAINER_PROFILE = Profile(note="other people's trainers, on the cells that any trainer may have", deadline_s=60.0)
TRAINER_CELLS = tuple(
    Cell(**{"init": "full"} | options)
    for options in (
        {},
        {"accumulation": 2},
        {"accumulation": 2, "batches": "uneven"},
        {"init": "meta"},
        {"tied_embeddings": True},
        {"init": "meta", "tied_embeddings": True},
        {"saved_on": "same"},
        {"precision": "bf16-mp"},
        {"precision": "bf16-mp", "accumulation": 2, "offload": "cpu"},
        {"mesh": "hsdp2x2"},
        {"mesh": "hsdp2x2", "accumulation": 2, "batches": "uneven"},
        {"mesh": "dp2-tp2"},
        {"mesh": "dp2-tp2", "accumulation": 2, "batches": "uneven"},
        {"mesh": "dp2-tp2", "saved_on": "same"},
        {"mesh": "dp2-tp2", "precision": "bf16-mp"},
    )
)
"""All cells of the profile, in the order in which they are run."""
FAULT_CELLS = tuple(cell for cell in TRAINER_CELLS if cell == Cell(mesh=cell.mesh, init="full"))
"""The plain cell of each mesh, on which faults are injected to see whether the laws see them."""
_VALUES = {name: {getattr(cell, name) for cell in TRAINER_CELLS} for name in axis_names()}


def is_trainer_cell(cell: Cell) -> bool:
    """Return whether a trainer can be asked for a cell: each of its values occurs in the profile."""
    return all(getattr(cell, name) in values for name, values in _VALUES.items())
