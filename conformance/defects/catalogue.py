"""All defects by id. `--defect ID` injects one, `--defect ID.twin` its benign twin."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from conformance.defects.injection import Defect

TWIN = ".twin"


def ids() -> tuple[str, ...]:
    """What `--defect` accepts."""
    return tuple(name for defect in defects() for name in (defect.id, defect.id + TWIN))


def injected(name: str | None) -> AbstractContextManager[Any]:
    """The context in which the defect (or twin) of that id is in force; None changes nothing.

    Raises KeyError for an unknown id.
    """
    if name is None:
        return nullcontext()
    by_id = {defect.id: defect for defect in defects()}
    defect = by_id[name.removesuffix(TWIN)]
    return defect.inject_twin() if name.endswith(TWIN) else defect.inject()


def defects() -> tuple[Defect, ...]:
    """The catalogue, in the order in which it is listed."""
    # Imported here because they import torch, which the controller does without.
    from conformance.defects import (
        checkpoint_faults,
        clipping_faults,
        fsdp_faults,
        initialisation_faults,
        layout_faults,
        loss_faults,
        memory_faults,
        offload_faults,
        optimizer_faults,
        precision_faults,
        prefetch_faults,
        reduction_faults,
        repetition_faults,
        rounding_faults,
        tp_faults,
        traffic_faults,
    )

    return (
        *initialisation_faults.DEFECTS,
        *loss_faults.DEFECTS,
        *optimizer_faults.DEFECTS,
        *clipping_faults.DEFECTS,
        *offload_faults.DEFECTS,
        *reduction_faults.DEFECTS,
        *fsdp_faults.DEFECTS,
        *tp_faults.DEFECTS,
        *layout_faults.DEFECTS,
        *precision_faults.DEFECTS,
        *rounding_faults.DEFECTS,
        *repetition_faults.DEFECTS,
        *traffic_faults.DEFECTS,
        *checkpoint_faults.DEFECTS,
        *memory_faults.DEFECTS,
        *prefetch_faults.DEFECTS,
    )
