"""All defects by id. `--defect ID` injects one, `--defect ID.twin` its benign twin."""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
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
    from conformance.defects import faults  # imports torch, which listing on the controller can do without

    return (
        Defect(
            id="grads-summed",
            title="gradients are summed over the data-parallel ranks instead of averaged",
            source="https://github.com/pytorch/pytorch/issues/155903",
            mechanism="the divide factors of the gradient reduction are SUM without a division",
            laws=("PAR-1",),
            inject=partial(faults.divide_factors, divide=False),
            inject_twin=partial(faults.divide_factors, divide=True),
        ),
        Defect(
            id="clip-norm-local",
            title="the gradient norm is that of the local shards",
            source="https://github.com/pytorch/pytorch/issues/170862",
            mechanism="clipping by hand takes the norm over this rank's shards and forgets to reduce it",
            laws=("PAR-1",),
            inject=partial(faults.clipping, faults.local_norm),
            inject_twin=partial(faults.clipping, faults.reduced_norm),
        ),
        Defect(
            id="rope-buffer-uninit",
            title="a non-persistent buffer is left as to_empty handed it out",
            source="https://github.com/huggingface/transformers/issues/45902",
            mechanism="to_empty reallocates buffers; what no state dict restores stays uninitialised",
            laws=("INIT-1",),
            inject=partial(faults.rope_buffer, restore=True),
            inject_twin=partial(faults.rope_buffer, restore=False),
        ),
        Defect(
            id="reduce-dtype-dropped",
            title="gradients of bf16 computation are reduced in bf16",
            source="https://github.com/pytorch/pytorch/issues/118223",
            mechanism="the mixed-precision policy reduces in the parameters' compute dtype",
            laws=("MP-1", "PAR-2"),
            inject=faults.bf16_reduce,
            inject_twin=faults.fp32_reduce,
        ),
        Defect(
            id="reshard-skipped",
            title="parameters stay unsharded after forward whatever was asked for",
            source="https://github.com/pytorch/pytorch/issues/149029",
            mechanism="FSDPParamGroup.reshard returns early in forward",
            laws=("RS-1",),
            inject=partial(faults.reshard, skip_in_forward=True),
            inject_twin=partial(faults.reshard, skip_in_forward=False),
        ),
    )
