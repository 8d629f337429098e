"""MP: dtypes are what was asked for, read where they are used."""

from conformance.engine import compare
from conformance.engine.cells import Cell
from conformance.engine.law import Run, law

MIXED_PRECISION = (
    "https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html#torch.distributed.fsdp.MixedPrecisionPolicy"
)

_COMPUTED = (
    "unsharded_parameter",
    "module_input",
    "module_output",
    "logits",
    *(f"{operator}_{phase}" for operator in ("matmul", "attention") for phase in ("forward", "backward")),
)
_KEPT = ("sharded_parameter", "gradient", "optimizer_state", "rope_table")


@law("MP-1", reference=MIXED_PRECISION)
def test_dtypes_are_those_of_the_policy(run: Run, cell: Cell) -> None:
    """Masters, gradients, optimizer state and buffers MUST be fp32, and computation and all-gathers in the policy's
    param_dtype, reductions of gradients in its reduce_dtype.

    Wrong if bf16 did not run, if the reduce dtype was dropped, or if a cast reaches a buffer or the masters.
    """
    compute = {"fp32": "float32", "bf16-mp": "bfloat16"}[cell.precision]
    expected = {**{key: [compute] for key in _COMPUTED}, **{key: ["float32"] for key in _KEPT}}
    wire = {"all_gather": compute, "reduce_scatter": "float32", "all_reduce": "float32"}
    for facts in run(cell).ranks:
        wrong = {key: facts.dtypes.get(key, []) for key in expected if facts.dtypes.get(key) != expected[key]}
        compare.count(
            len(wrong),
            name="wrong dtypes",
            expected=0,
            detail=f"rank {facts.rank}: {wrong}",
            unit=f"of {len(expected)}",
        )
        in_model = [entry for entry in facts.collectives if entry.phase in ("forward", "backward")]
        misfits = [
            entry
            for entry in in_model
            if entry.dtype != (compute if entry.group == "tp" else wire.get(entry.kind, "none"))
        ]
        compare.count(
            len(misfits),
            name="wrong wire dtypes",
            expected=0,
            detail=f"rank {facts.rank}: {misfits[:3]}",
            unit=f"of {len(in_model)} collectives",
        )
