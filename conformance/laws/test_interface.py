"""API, MP: FSDP2's interface where the reference trainer does not use it."""

from conformance.judge.law import Measure, law
from conformance.laws import compare
from conformance.plan.cells import Cell

FULLY_SHARD = "https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html"


@law("API-1", reference=FULLY_SHARD, since="2.13")
def test_options_change_no_gradient(measure: Measure, cell: Cell) -> None:
    """However parameters are sharded (`shard_placement_fn`), whichever are frozen, ignored or not used, after an
    evaluation and after a change through the state dict, gradients MUST be those of one process, in every bit.
    """
    _require_nothing_wrong(measure("fsdp_api:use_options", cell))


@law("API-2", reference=FULLY_SHARD, since="2.13")
def test_methods_do_what_they_are_for(measure: Measure, cell: Cell) -> None:
    """Methods of FSDPModule MUST do what they are documented to, and nothing else: gradients are divided by the factor
    that is set, hooks see what is reduced, parameters are whole when they were asked for and as long, and another
    method than forward can compute with them.
    """
    _require_nothing_wrong(measure("fsdp_api:use_methods", cell))


@law("MP-6", reference=FULLY_SHARD, since="2.13")
def test_inputs_and_outputs_are_cast(measure: Measure, cell: Cell) -> None:
    """With `cast_forward_inputs`, floating-point inputs of a module MUST be cast to `param_dtype`, wherever they are
    inside of its arguments, and with `output_dtype` its outputs to that; integers and, without, all else MUST be left
    alone, and gradients have the dtypes of what they are gradients of.
    """
    for rank, found in enumerate(measure("fsdp_api:cast_what_is_given", cell)):
        for policy, dtypes in found.items():
            expected = _expected_dtypes(*policy.split("/"))
            wrong = {what: dtype for what, dtype in dtypes.items() if dtype != expected.pop(what)}
            wrong |= dict.fromkeys(expected, "missing")
            detail = f"rank {rank}, cast_forward_inputs/output_dtype {policy}: {wrong}"
            compare.count(len(wrong), name="wrong dtypes", expected=0, detail=detail, unit=f"of {len(dtypes)}")


def _expected_dtypes(casts: str, output: str) -> dict[str, str]:
    given = "float32" if casts == "True" else "bfloat16"
    inside = "bfloat16" if casts == "True" else "float32"
    return {
        "argument": "bfloat16",
        "keyword": inside,
        "inside": inside,
        "integer": "int64",
        "output": "bfloat16" if output == "None" else output,
        "output inside": inside if output == "None" else output,
        "output integer": "int64",
        "gradient of argument": given,
        "gradient of weight": "float32",
    }


def _require_nothing_wrong(ranks: list[dict[str, dict[str, int]]]) -> None:
    for use in ranks[0]:
        wrong = {f"rank {rank}: {what}": n for rank, found in enumerate(ranks) for what, n in found[use].items() if n}
        compare.count(sum(wrong.values()), name=use, expected=0, detail=str(wrong), unit="wrong elements")
