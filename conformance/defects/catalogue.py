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
    # Imported here because they import torch, which the controller does without.
    from conformance.defects import faults
    from conformance.instruments.capture import shard_indices

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
        Defect(
            id="replica-desync",
            title="replicas start from different weights",
            source="https://github.com/pytorch/pytorch/issues/125431",
            mechanism="fully_shard never broadcasts; here the second replica's weights are scaled by 1.05",
            laws=("PAR-5", "INIT-2"),
            inject=partial(faults.replica_scale, 1.05),
            inject_twin=partial(faults.replica_scale, 1.0),
        ),
        Defect(
            id="init-duplicate-shards",
            title="every shard is initialised with the same numbers",
            source="https://github.com/pytorch/pytorch/issues/196562",
            mechanism="each rank draws its own shard from a generator with the same seed",
            laws=("INIT-2",),
            inject=partial(faults.shard_draw, faults.first_elements),
            inject_twin=partial(faults.shard_draw, shard_indices),
        ),
        Defect(
            id="sp-norm-grad-unreduced",
            title="the gradient of a replicated tensor-parallel parameter stays a partial sum",
            source="https://github.com/pytorch/pytorch/issues/121295",
            mechanism="FSDPParam takes the local tensor of a partial gradient instead of reducing it over tp",
            laws=("PAR-1", "PAR-5"),
            inject=partial(faults.tensor_parallel_gradient, reduce=False),
            inject_twin=partial(faults.tensor_parallel_gradient, reduce=True),
        ),
        Defect(
            id="stale-unsharded-weights",
            title="forward keeps using weights from before the optimizer's step",
            source="https://github.com/pytorch/pytorch/issues/144289",
            mechanism="an evaluation between backward and step leaves a group unsharded, the step updates only shards",
            laws=("PAR-1", "PAR-4", "RS-1"),
            inject=partial(faults.before_step, evaluate=True),
            inject_twin=partial(faults.before_step, evaluate=False),
        ),
    )
