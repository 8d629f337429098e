"""First dtype of a run that is not the precision's, among those that `conformance.instruments.dtypes` has read."""

from conformance.localisation.ranks import Ranks
from conformance.oracles.dtype_policy import expected_dtypes
from conformance.oracles.pipeline import held_dtypes
from conformance.plan.cells import Cell
from conformance.report.location import Location, Stage
from conformance.run.record import Record

_STAGES: dict[str, tuple[Stage, str]] = {
    "initial_parameter": ("initial values", "parameter"),
    "initial_buffer": ("initial values", "buffer"),
    "unsharded_parameter": ("parameters", "parameter as its module computes with it"),
    "block_input": ("forward", "input"),
    "module_input": ("forward", "input"),
    "rope_table": ("forward", "RoPE table"),
    "matmul": ("forward", "operands of matrix products"),
    "attention": ("forward", "operands of attention"),
    "module_output": ("forward", "output"),
    "block_output": ("forward", "output"),
    "logits": ("forward", "logits"),
    "loss": ("loss", "operands of the log-softmax"),
    "gradient": ("reduction", "gradient after its reduction"),
    "optimizer_state": ("optimizer", "optimizer state"),
    "final_parameter": ("optimizer", "parameter after training"),
    "final_buffer": ("optimizer", "buffer after training"),
}
"""Stage and noun of the kinds of things, in the order of execution."""
_PHASES = ("forward", "backward")


def first_wrong_dtype(cell: Cell, record: Record, ranks: Ranks) -> Location | None:
    """Return the first thing of another dtype than the precision's, in the order of execution; None without any."""
    if cell.config.model.arithmetic != "float" or cell.config.compile == "inductor":
        return None
    wrong: dict[str, list[int]] = {}
    expected = expected_dtypes(cell.config, steps=record.steps)
    for facts in record.ranks:
        own = held_dtypes(facts.mesh_coordinate.get("pp", 0), expected, cell.config)
        for thing, dtypes in facts.dtypes.items():
            if thing in own and dtypes != own[thing] and not thing.startswith("attention/"):
                wrong.setdefault(thing, []).append(facts.rank)
    if not wrong:
        return None
    kinds = list(_STAGES)
    names = list(expected)
    first = min(wrong, key=lambda thing: (kinds.index(thing.partition("/")[0]), names.index(thing)))
    kind, _, name = first.partition("/")
    stage, noun = _STAGES[kind]
    phase = name.rpartition("/")[2] if name.rpartition("/")[2] in _PHASES else ""
    measured = record.ranks[wrong[first][0]].dtypes[first]
    return ranks.location(
        wrong[first],
        family="dtype",
        stage="backward" if phase == "backward" else stage,
        name=name.removesuffix(phase).rstrip("/").removeprefix("exp_avg/").removeprefix("exp_avg_sq/"),
        quantity=noun,
        equals=f"is {' and '.join(measured)}, expected {' and '.join(expected[first])}",
        elements=f"{len(wrong)} of {len(expected)} things have another dtype" if len(wrong) > 1 else "",
    )
