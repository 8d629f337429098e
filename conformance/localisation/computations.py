"""First computation of a run that is out of its place: an action of a pipeline, or a recomputed forward pass.

Both are read from the run with taps: actions from its record, recomputation by activation checkpointing from its taps.
"""

from collections.abc import Mapping, Sequence

from conformance.instruments.facts import RankFacts
from conformance.judge.measurements import Measurement, margin_of
from conformance.localisation.ranks import Ranks
from conformance.localisation.traces import Trace
from conformance.oracles import pipeline
from conformance.oracles.outline import outline
from conformance.oracles.pipeline import Action
from conformance.plan.cells import Cell
from conformance.report.location import Location
from conformance.run.record import Record

_ATTENTION = "attention"


def first_wrong_action(cell: Cell, record: Record, ranks: Ranks) -> Location | None:
    """Return the first action of a pipeline that is not the schedule's, or that finds other activations than are due.

    None if all are right, and without a pipeline.
    """
    if cell.config.mesh.pp == 1:
        return None
    for step in record.steps:
        for facts in record.ranks:
            location = _wrong_action(cell, facts, step, ranks) or _wrong_activations(cell, facts, step, ranks)
            if location is not None:
                return location
    return None


def _wrong_action(cell: Cell, facts: RankFacts, step: int, ranks: Ranks) -> Location | None:
    config = cell.config
    actions = [Action(a.action, a.stage, a.micro_batch) for a in facts.stage_actions if a.step == step]
    expected = pipeline.order(config, rank=facts.mesh_coordinate["pp"])
    if actions == expected:
        return None
    pairs = enumerate(zip(actions, expected, strict=False))
    index = next((i for i, (a, b) in pairs if a != b), min(len(actions), len(expected)))
    issued, due = (among[index] if index < len(among) else None for among in (actions, expected))
    action = issued or due
    assert action is not None
    told = f"must be {_text(due)}" if issued and due else "superfluous" if issued else "missing"
    return ranks.location(
        [facts.rank],
        family="schedule",
        stage="schedule",
        name=_modules(cell, action.stage),
        quantity=_text(action),
        step=step,
        micro_batch=action.micro_batch,
        equals=f"action {index} of {len(expected)}: {told}",
    )


def _wrong_activations(cell: Cell, facts: RankFacts, step: int, ranks: Ranks) -> Location | None:
    config, before = cell.config, list[Action]()
    for taken in (a for a in facts.stage_actions if a.step == step):
        due = pipeline.held(before, taken.stage, config)
        action = Action(taken.action, taken.stage, taken.micro_batch)
        is_followed = config.activation_checkpointing == "none" and config.compile == "none"
        if is_followed and taken.held != due:
            return ranks.location(
                [facts.rank],
                family="memory",
                stage="memory",
                name=_modules(cell, taken.stage),
                quantity="activations",
                step=step,
                micro_batch=taken.micro_batch,
                equals=f"those of micro-batches {taken.held} are held at {_text(action)}, must be those of {due}",
            )
        before.append(action)
    return None


def _text(action: Action | None) -> str:
    return "nothing" if action is None else f"{action.kind} of micro-batch {action.micro_batch} on stage {action.stage}"


def _modules(cell: Cell, stage: int) -> str:
    """Return the path of the first module of a stage."""
    if stage == 0:
        return "tok_embeddings"
    layers = pipeline.layers_of(stage, cell.config)
    return f"layers.{next(iter(layers))}" if layers else "norm"


def first_wrong_recomputation(
    cell: Cell, traces: Sequence[Trace], ranks: Ranks, measured: Mapping[str, Measurement]
) -> Location | None:
    """Return the first module that is, or is not, recomputed against the mode of activation checkpointing.

    With selective checkpointing the modules of blocks are entered again, but no attention is computed again: there the
    law's count of operators, in `measured`, decides. What a compiled block computes again, no module shows.
    """
    mode = cell.activation_checkpointing
    blocks = [f"layers.{index}" for index in outline(cell.config.model).layers]
    for trace in traces:
        repeated = list(dict.fromkeys(tap.module for tap in trace.taps if tap.is_recomputed))
        inside = {block for block in blocks for name in repeated if f"{name}.".startswith(f"{block}.")}
        entered = [block for block in blocks if any(f"{tap.module}.".startswith(f"{block}.") for tap in trace.taps)]
        missing = [block for block in entered if block not in inside]
        name, told = "", ""
        if mode == "none" and repeated:
            name, told = repeated[0], "is recomputed, although activation checkpointing is none"
        elif mode == "full" and not cell.compile and missing:
            name, told = missing[0], "is not recomputed, although activation checkpointing is full"
            told += f"; {len(missing)} of {len(blocks)} blocks are not"
        elif mode == "selective" and _is_wrong(measured, _ATTENTION):
            attentions = [each for each in repeated if each.endswith(f".{_ATTENTION}")]
            name = attentions[0] if attentions else blocks[0]
            found = measured[_ATTENTION]
            told = f"{found.value:g} operators of attention are recomputed, expected {found.upper:g}"
        if name:
            about = {"family": "schedule", "stage": "schedule", "quantity": "recomputation in backward"}
            return ranks.location([*ranks.all], name=name, equals=told, **about)
    return None


def _is_wrong(measured: Mapping[str, Measurement], name: str) -> bool:
    return name in measured and margin_of(measured[name]) > 1.0
