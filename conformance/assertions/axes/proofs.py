"""Proofs of axes: the changes that each value of an axis must make to the record of a neighbour.

A neighbour is the same cell with that axis at its default, which for the mesh is one process; in a pipeline, whose
default reshards nothing, `never` and other modes are compared with `always`. Differences are read from measurements,
never from the configuration: a value that the trainer ignores leaves equal records.
"""

from collections.abc import Callable, Iterator
from itertools import groupby

import msgspec

from conformance.assertions.axes.effects import (
    backward_prefetch_takes_effect,
    batches,
    collectives,
    expandable_segments_take_effect,
    expect,
    float8_takes_effect,
    forward_prefetch_takes_effect,
    held,
    layer_count,
    loss_scale_takes_effect,
    mesh_takes_effect,
    operators,
    optimizer_takes_effect,
    precision_takes_effect,
    same,
    tf32_takes_effect,
)
from conformance.instruments.facts import RankFacts
from conformance.plan.cells import RECORD_STREAMS, AxisValue, Cell, axis_names
from conformance.plan.mesh import Mesh
from conformance.run.record import Record
from reference_trainer.checkpoint import Manifest

Proof = Callable[[Record, Record], None]
"""Function that raises ConformanceFailure unless a record differs from its neighbour's record as the axis says."""

_BASE = Cell(mesh="dp1")
_OF_PIPELINES = _BASE.but(model="cut", accumulation=4)
"""Values of a pipeline without features: no pipeline goes without micro-batches."""
_OF_EXPERTS = _BASE.but(model="experts")
"""Values of a mesh with ranks for experts, which no other model has."""
_FSDP2: dict[str, AxisValue] = {"implementation": "fsdp2", "limit_all_gathers": True}
_WITHOUT_TP: dict[str, AxisValue] = {"sequence_parallel": True, "norms_in_tp": True, "loss_parallel": False}
_WITHOUT: dict[str, dict[str, AxisValue]] = {
    "mesh": {
        "gradient_sync": "each",
        "shard_placement": "rows",
        "gradient_divisor": "ranks",
        "reshard": "default",
        **_WITHOUT_TP,
        **_FSDP2,
    },
    "precision": {"loss_scale": "fits"},
    "steps": {"loss_scale": "fits", "frozen": "none"},
    "accumulation": {"passes": 1, "gradient_sync": "each", "evaluation": "none"},
    "gradient_sync": {"passes": 1},
    "init": {"weights": "safetensors", **_FSDP2},
    "saved_on": {"saving": "blocking"},
    "offload": {"pin_memory": False},
    "sequence_parallel": {"norms_in_tp": True},
    "implementation": {"limit_all_gathers": True},
    "compile": {"compiled": "blocks"},
}
_EXPENSIVE = ("aten::mm", "aten::addmm", "aten::bmm", "aten::_scaled_dot_product")
"""Prefixes of the operators whose results selective activation checkpointing keeps."""


def neighbours(cell: Cell) -> Iterator[tuple[str, Cell, Cell]]:
    """Yield the name of each axis that is not at its default, with the cell to look at and that cell's neighbour.

    Each mesh is proven once, on its cell without features.
    """
    has_expert_ranks = "ep" in f"{cell.mesh} {cell.saved_on}"
    base = _OF_PIPELINES if Mesh.parse(cell.mesh).pp > 1 else _OF_EXPERTS if has_expert_ranks else _BASE
    for axis in axis_names():
        if getattr(cell, axis) != getattr(base, axis) and not (axis == "mesh" and cell.features > base.features):
            # One process has no tensor parallelism, no replicas whose gradients are postponed, and no fewer ranks to
            # reshard to. Other values of init have no format of weights, runs that are not resumed have no way of
            # saving, other precisions and short runs have no loss scale that overflows, one micro-batch has none to
            # postpone to. FSDP1 does not run in one process, and has only one value of init.
            # Blocks that are left out would change what proofs count.
            all_blocks: dict[str, AxisValue] = {} if axis == "skipped" else {"skipped": "none"}
            shown = cell.but(**all_blocks, **_WITHOUT.get(axis, {}))
            keeps = base is _OF_PIPELINES and axis == "reshard" and cell.reshard != "always"
            yield axis, shown, shown.but(**{axis: "always" if keeps else getattr(base, axis)})


def prove(axis: str, record: Record, neighbour: Record) -> None:
    """Raise ConformanceFailure unless the axis shows its effect, ValueError for an axis that has no proof."""
    if axis not in PROOFS:
        raise ValueError(f"no proof that axis `{axis}` takes effect: add one to {__name__}.PROOFS")
    PROOFS[axis](record, neighbour)


def _reshard(record: Record, neighbour: Record) -> None:
    if Mesh.parse(record.cell.mesh).pp > 1:
        gathers, others = (_gathers(run) for run in (record, neighbour))
        mode, other = record.cell.reshard, neighbour.cell.reshard
        expect((gathers > others) == (mode == "always"), f"{gathers} all-gathers with {mode}, {others} with {other}")
        expect(gathers != others, f"{gathers} all-gathers with {mode} and with {other}")
        return
    gathers, default = (collectives(run, "backward", "all_gather", "dp_shard") for run in (record, neighbour))
    unsharded = {name for facts in record.ranks for name in facts.unsharded["0/after_forward"]}
    blocks = {name.split(".")[1] for name in unsharded if name.startswith("layers.")}
    everything = record.ranks[0].parameters.keys()
    match record.cell.reshard:
        case "always":
            expect(gathers > default and not unsharded, f"{gathers} all-gathers, unsharded: {sorted(unsharded)}")
        case "k2":
            over = {e.group for facts in record.ranks for e in facts.collectives if e.phase == "backward"}
            expect(not unsharded and "dp_shard/2" in over, f"backward communicates over {sorted(over)}")
        case "except-last" | "table":
            expected = {str(layer_count(record) - 1) if record.cell.reshard == "except-last" else "0"}
            expect(0 < gathers < default, f"{gathers} all-gathers in backward, {default} by default")
            expect(blocks == expected, f"blocks that stay unsharded: {sorted(blocks)}, not {sorted(expected)}")
        case "never" | "auto":
            expect(gathers == 0 and default > 0, f"{gathers} all-gathers in backward, {default} by default")
            expect(unsharded == everything, f"resharded after forward: {sorted(everything - unsharded)}")


def _gathers(record: Record) -> int:
    return sum(collectives(record, phase, "all_gather", "dp_shard") for phase in ("data", "forward", "backward"))


def _init(record: Record, neighbour: Record) -> None:
    if record.cell.init == "checkpoint":
        loaded = [len({facts.checkpoint for facts in run.ranks} - {None}) for run in (record, neighbour)]
        expect(loaded == [1, 0], f"weights come from {loaded[0]} checkpoints, the neighbour's from {loaded[1]}")
        expect(all(facts.checkpoint for facts in record.ranks), "a rank has not loaded the checkpoint")
        return
    elements, usual = (sum(run.ranks[0].poisoned.values()) for run in (record, neighbour))
    expect(elements > usual, f"{elements} elements were materialised before they were sharded, {usual} by meta")
    times = max(len(facts.materialized) for facts in record.ranks)
    layerwise = record.cell.init == "layerwise"
    expect((times > 1) == layerwise, f"the model was materialised in {times} steps")


def _weights(record: Record, neighbour: Record) -> None:
    for run in (record, neighbour):
        form = "safetensors" if run.cell.weights == "rank0" else run.cell.weights
        formats = {facts.checkpoint_format for facts in run.ranks}
        expect(formats == {form}, f"{run.cell.id} loaded {formats}, not {form}")
    sent, usual = (
        sum(e.phase == "build" for facts in run.ranks for e in facts.collectives) for run in (record, neighbour)
    )
    communicates = record.cell.weights in ("rank0", "dcp")
    expect((sent > usual) == communicates, f"{sent} collectives while building, {usual} with safetensors")


def _schedule(record: Record, neighbour: Record) -> None:
    rates, usual = ({step.lr for step in run.ranks[0].steps} for run in (record, neighbour))
    expect(len(rates) > 1 and len(usual) == 1, f"learning rates {sorted(rates)}, and {sorted(usual)} if it is constant")


def _saved_on(record: Record, neighbour: Record) -> None:
    first, usual = record.steps[0], neighbour.steps[0]
    resumed = first == record.cell.steps_before_save and first > 0
    expect(resumed and usual == 0, f"first step {first}, {usual} of an uninterrupted run")
    (manifest,) = (record.directory / "checkpoints").glob("step-*/manifest.json")
    saved = msgspec.json.decode(manifest.read_bytes(), type=Manifest).config.mesh
    expected = record.cell.saver.config.mesh
    expect(saved == expected, f"the checkpoint was saved on {saved}, not on {expected}")


def _saving(record: Record, neighbour: Record) -> None:
    ahead = [list((run.directory / "checkpoints").glob("trained-*")) for run in (record, neighbour)]
    expect(bool(ahead[0]) and not ahead[1], f"trained on before the checkpoint was written: {ahead}")


def _model(record: Record, neighbour: Record) -> None:
    uneven, usual = (_uneven_parameters(run) for run in (record, neighbour))
    match record.cell.model:
        case "even":
            expect(not uneven and bool(usual), f"unequal shards: {sorted(uneven)}, of tiny {sorted(usual)}")
        case "uneven":
            expect(uneven > usual, f"unequal shards: {sorted(uneven)}, of tiny {sorted(usual)}")
        case "uneven-tp":  # two shards of it are as equal as those of tiny: sizes alone tell of it there
            mesh = Mesh.parse(record.cell.mesh)
            differs = uneven > usual if mesh.dp_shard * mesh.tp > 2 else uneven == usual
            expect(differs, f"unequal shards: {sorted(uneven)}, of tiny {sorted(usual)}")
            sizes, usual_sizes = (
                [each.shape for each in run.ranks[0].parameters.values()] for run in (record, neighbour)
            )
            expect(sizes != usual_sizes, "parameters have the sizes of tiny")
        case "experts":
            routers, usual_routers = (
                sum(name.endswith(".router.weight") for name in run.ranks[0].parameters) for run in (record, neighbour)
            )
            expect(routers > usual_routers == 0, f"{routers} routers, of tiny {usual_routers}")
        case "integer":
            integral, usually = (_has_integer_gradients(run) for run in (record, neighbour))
            expect(integral and not usually, f"all gradients are integers: {integral}, of tiny {usually}")
        case "cut":  # a pipeline's default; the search for the smallest failing cell may leave the pipeline out
            layers, tiny_layers = (layer_count(run) for run in (record, neighbour))
            expect(layers > tiny_layers, f"{layers} layers, tiny has {tiny_layers}")
        case name:
            raise ValueError(f"no proof that model `{name}` takes effect: add one here")


def _uneven_parameters(record: Record) -> set[str]:
    """Return the parameters whose shards have different sizes."""
    names = record.ranks[0].parameters
    return {name for name in names if len({shards[f"layout/{name}"].numel() for shards in record.shards}) > 1}


def _has_integer_gradients(record: Record) -> bool:
    """Return whether all gradients of the first step are integers times a common power of two."""
    gradients = record.select("step0/gradient/").values()
    return all(bool((scaled == scaled.round()).all()) for scaled in (grad.double() * 2**20 for grad in gradients))


def _clip(record: Record, neighbour: Record) -> None:
    expect(same(record, neighbour, "step0/gradient/"), "gradients before clipping differ")
    for run in (record, neighbour):
        limit, norm = run.cell.clip, run.grad_norms[0]
        clipped = {(key.replace("clipped", "gradient"), digest) for key, digest in held(run, "step0/clipped/")}
        changed = clipped != held(run, "step0/gradient/")
        expect(changed == (0 < limit < norm), f"{run.cell.id} changes gradients of norm {norm:.4g}: {changed}")
    expect(not same(record, neighbour, "final/parameter/"), "parameters change alike")


def _norm_type(record: Record, neighbour: Record) -> None:
    expect(same(record, neighbour, "step0/gradient/"), "gradients before clipping differ")
    norm, usual = (run.grad_norms[0] for run in (record, neighbour))
    expect((norm > usual) == (record.cell.norm_type == "1"), f"norm {norm:.4g}, 2-norm {usual:.4g}")
    expect(norm != usual, f"norm {norm:.4g}, 2-norm {usual:.4g}")


def _foreach_clip(record: Record, neighbour: Record) -> None:
    used, usual = (any("_foreach_" in name for name in operators(run, "clip")) for run in (record, neighbour))
    expect(usual and not used, f"operators on lists of tensors in clipping: {used}, by default {usual}")


def _offload(record: Record, neighbour: Record) -> None:
    for run, expected in ((record, "cpu pinned" if record.cell.pin_memory else "cpu"), (neighbour, "none")):
        policies = {policy for facts in run.ranks for policy in facts.offloading.values()}
        expect(policies == {expected}, f"{run.cell.id} offloads to {sorted(policies)}, not {expected}")


def _pin_memory(record: Record, neighbour: Record) -> None:
    for run, expected in ((record, "cpu pinned"), (neighbour, "cpu")):
        things = ((thing, places) for facts in run.ranks for thing, places in facts.places.items())
        memories = {place for thing, places in things if thing.startswith("final_parameter/") for place in places}
        expect(memories == {expected}, f"{run.cell.id}: parameters are in {sorted(memories)}, not {expected}")


def _record_streams(record: Record, neighbour: Record) -> None:
    for run, expected in ((record, record.cell.record_streams), (neighbour, None)):
        values = {facts.variables[RECORD_STREAMS] for facts in run.ranks}
        expect(values == {expected}, f"{run.cell.id}: {RECORD_STREAMS} is {values} before the process group is made")


def _norms_in_tp(record: Record, neighbour: Record) -> None:
    reductions, usual = (collectives(run, "clip", "all_reduce", "dp_shard") for run in (record, neighbour))
    expect(
        reductions == 2 * usual and usual > 0, f"{reductions} reductions of norms over dp_shard, {usual} on one mesh"
    )


def _accumulation(record: Record, neighbour: Record) -> None:
    passes, usual = (sum(f.blocks.compiled + f.blocks.eager for f in run.ranks) for run in (record, neighbour))
    expect(
        passes == record.cell.accumulation * usual and usual > 0, f"{passes} forward passes of blocks, {usual} without"
    )
    expect(same(record, neighbour, "initial/parameter/"), "initial weights differ")


def _passes(record: Record, neighbour: Record) -> None:
    for run in (record, neighbour):
        expected = run.cell.accumulation // run.cell.passes
        counts = {
            (facts.rank, step): sum(phase == "backward" for phase, _ in groupby(_phases_of_model(facts, step)))
            for facts in run.ranks
            for step in run.steps
        }
        wrong = {at: count for at, count in counts.items() if count != expected}
        expect(not wrong, f"{run.cell.id}: backwards by rank and step {wrong}, not {expected}")


def _phases_of_model(facts: RankFacts, step: int) -> list[str]:
    """Return the phase of each collective of a step's forwards and backwards."""
    return [e.phase for e in facts.collectives if e.step == step and e.phase in ("forward", "backward")]


def _gradient_sync(record: Record, neighbour: Record) -> None:
    micro_batches = record.cell.accumulation
    expect(micro_batches > 1, "with one micro-batch, gradients cannot be reduced later than after each")
    scatters = [collectives(run, "backward", "reduce_scatter", "dp_shard") for run in (record, neighbour)]
    sums = [collectives(run, "backward", "all_reduce", "dp_replicate") for run in (record, neighbour)]
    postponed, kept = (scatters, sums) if record.cell.gradient_sync == "last" else (sums, scatters)
    expect(
        postponed[0] * micro_batches == postponed[1] and postponed[1] > 0,
        f"{postponed[0]} reductions, {postponed[1]} if each micro-batch is reduced",
    )
    factor = micro_batches if record.cell.gradient_sync == "last" else 1
    expect(kept[0] * factor == kept[1], f"{kept[0]} other reductions, {kept[1]} if each micro-batch is reduced")


def _evaluation(record: Record, neighbour: Record) -> None:
    passes = record.cell.accumulation - 1
    for run, factor in ((record, passes / record.cell.accumulation), (neighbour, 0.0)):
        evaluated, trained = (_products(run, phase) for phase in ("evaluate", "forward"))
        expect(
            evaluated == factor * trained and trained > 0,
            f"{run.cell.id}: {evaluated} products in evaluations, {trained} in forward passes",
        )


def _products(record: Record, phase: str) -> int:
    return sum(count for name, count in operators(record, phase).items() if name.startswith(_EXPENSIVE))


def _frozen(record: Record, neighbour: Record) -> None:
    first = f"step{record.steps[0]}/gradient/"
    with_gradients, usual = ({*run.select(first)} for run in (record, neighbour))
    without = usual - with_gradients
    block = {name for name in usual if name.startswith("layers.0.")}
    norms = {name for name in usual if "norm." in name}
    expected = {"embedding": {"tok_embeddings.weight"}, "norms": norms, "block": block, "thawed": block}
    wanted = expected[record.cell.frozen]
    expect(without == wanted, f"without gradients: {sorted(without)}, not {sorted(wanted)}")
    initial, final = (record.select(f"{when}/parameter/") for when in ("initial", "final"))
    changed = {name for name in wanted if not initial[name].equal(final[name])}
    trains = wanted if record.cell.frozen == "thawed" else set[str]()
    expect(changed == trains, f"frozen parameters change: {sorted(changed)}, not {sorted(trains)}")


def _skipped(record: Record, neighbour: Record) -> None:
    micro_batches = record.cell.accumulation
    numbers = [step * micro_batches + index for step in record.steps for index in range(micro_batches)]
    left_out = sum(number % 3 > 0 for number in numbers)
    left_out += sum(number % 4 == 3 for number in numbers) if record.cell.skipped == "blocks" else 0
    passes, usual = (sum(f.blocks.compiled + f.blocks.eager for f in run.ranks) for run in (record, neighbour))
    expect(
        usual - passes == left_out * len(record.ranks) > 0, f"{passes} forward passes of blocks, {usual} if all compute"
    )


def _shard_placement(record: Record, neighbour: Record) -> None:
    by_columns, usual = (
        {name for name, p in run.ranks[0].parameters.items() if p.shard_dims.get("dp_shard") == 1}
        for run in (record, neighbour)
    )
    expect(bool(by_columns) and not usual, f"sharded by columns: {sorted(by_columns)}, and {sorted(usual)} by default")
    vectors = {name for name, p in record.ranks[0].parameters.items() if len(p.shape) < 2}
    expect(not by_columns & vectors, f"vectors are sharded by columns: {sorted(by_columns & vectors)}")


def _gradient_divisor(record: Record, neighbour: Record) -> None:
    divisors, usual = (
        {each for f in run.ranks for each in f.gradient_divisors.values()} for run in (record, neighbour)
    )
    expect(divisors == {record.config.gradient_divisor}, f"groups divide gradients by {divisors}")
    mesh = neighbour.config.mesh
    ranks = {float(mesh.dp_replicate * int(mesh.dp_shard))} if mesh.ep > 1 else set()  # experts are told their number
    expect(usual == {None, *ranks}, f"groups divide gradients by {usual}, not by the number of ranks")


def _pipeline(record: Record, neighbour: Record) -> None:
    orders = [
        [[(a.action, a.stage, a.micro_batch) for a in facts.stage_actions] for facts in run.ranks]
        for run in (record, neighbour)
    ]
    expect(all(orders[0]), "a rank has no stage that does anything")
    expect(orders[0] != orders[1], "stages do the same in the same order with the schedule 1f1b")


def _sequence_parallel(record: Record, neighbour: Record) -> None:
    scatters, usual = (collectives(run, "forward", "reduce_scatter", "tp") for run in (record, neighbour))
    expect(
        scatters == 0 and usual > 0, f"{scatters} reduce-scatters over tp in forward, {usual} with sequence parallelism"
    )
    sums, usual = (collectives(run, "forward", "all_reduce", "tp") for run in (record, neighbour))
    expect(sums > usual, f"{sums} all-reduces over tp in forward, {usual} with sequence parallelism")


def _loss_parallel(record: Record, neighbour: Record) -> None:
    gathers, usual = (collectives(run, "forward", "all_gather", "tp") for run in (record, neighbour))
    last_stage_ranks = record.cell.world_size // Mesh.parse(record.cell.mesh).pp
    logits = last_stage_ranks * record.cell.steps * record.cell.accumulation
    expect(gathers == usual - logits, f"{gathers} all-gathers over tp in forward, {usual} with {logits} of logits")
    sums, usual = (collectives(run, "forward", "all_reduce", "tp") for run in (record, neighbour))
    expect(sums > usual, f"{sums} all-reduces over tp in forward, {usual} of full logits")


def _activation_checkpointing(record: Record, neighbour: Record) -> None:
    expect(same(record, neighbour, "initial/parameter/"), "initial weights differ")
    counts, usual = (operators(run, "backward") for run in (record, neighbour))
    repeated = counts - usual
    expensive = sorted(name for name in repeated if name.startswith(_EXPENSIVE))
    expect(bool(repeated), "backward recomputes nothing")
    wanted = record.cell.activation_checkpointing == "full"
    expect(bool(expensive) == wanted, f"backward repeats {expensive or 'no'} matrix products or attention")


def _compile(record: Record, neighbour: Record) -> None:
    for run in (record, neighbour):
        for facts in run.ranks:
            blocks = facts.blocks
            other = blocks.eager if run.cell.compile else blocks.compiled + blocks.graphs
            wanted = min(blocks.compiled, blocks.graphs) if run.cell.compile else blocks.eager
            expect(
                other == 0 and wanted > 0,
                f"{run.cell.id}, rank {facts.rank}: {blocks.compiled} forward passes of blocks ran in "
                f"{blocks.graphs} compiled graphs, {blocks.eager} in eager mode",
            )


def _compiled(record: Record, neighbour: Record) -> None:
    for run in (record, neighbour):
        for facts in run.ranks:
            breaks = facts.blocks.breaks
            expect(
                (breaks > 0) == (run.cell.compiled == "model"),
                f"{run.cell.id}, rank {facts.rank}: {breaks} breaks of graphs",
            )


def _tied_embeddings(record: Record, neighbour: Record) -> None:
    names, usual = (run.ranks[0].parameters.keys() for run in (record, neighbour))
    expect(usual - names == {"output.weight"}, f"parameters that tying removes: {sorted(usual - names)}")
    expect(names <= usual, f"parameters that tying adds: {sorted(names - usual)}")


def _dropout(record: Record, neighbour: Record) -> None:
    expect(same(record, neighbour, "initial/parameter/"), "initial weights differ")
    expect(batches(record) == batches(neighbour), "batches differ")
    expect(record.losses[0] != neighbour.losses[0], f"the first loss is {record.losses[0]!r} with dropout and without")


def _implementation(record: Record, neighbour: Record) -> None:
    """Compare the sharding: FSDP2 shards each parameter along a dimension, FSDP1 the flat vector of a group."""
    for run, expected in ((record, 0), (neighbour, len(neighbour.ranks[0].parameters))):
        sharded = sum("dp_shard" in parameter.shard_dims for parameter in run.ranks[0].parameters.values())
        expect(sharded == expected, f"{run.cell.id}: {sharded} parameters are sharded along dimensions, not {expected}")


def _limit_all_gathers(record: Record, neighbour: Record) -> None:
    """Compare named ranges: FSDP1 names each wait before an all-gather (`FullyShardedDataParallel.rate_limiter`)."""
    expect(same(record, neighbour, "final/parameter/"), "final weights differ")
    for phase in ("forward", "backward"):
        named, usual = (operators(run, phase)["profiler::_record_function_enter_new"] for run in (record, neighbour))
        expect(named < usual, f"{named} named ranges in {phase} without a limit, {usual} with one")


def _steps(record: Record, neighbour: Record) -> None:
    for run in (record, neighbour):
        counts = {len(facts.steps) for facts in run.ranks} | {len(facts.batches) for facts in run.ranks}
        expected = run.cell.steps - run.cell.steps_before_save
        expect(counts == {expected}, f"{run.cell.id}: {sorted(counts)} steps, not {expected}")
        expect(run.steps[-1] == run.cell.steps - 1, f"{run.cell.id}: the last step is number {run.steps[-1]}")


def _seed(record: Record, neighbour: Record) -> None:
    equal = {key for key, _ in held(record, "initial/parameter/") & held(neighbour, "initial/parameter/")}
    if record.cell.model == "integer":  # vectors of a few integers may be equal by chance
        equal = {key for key in equal if len(record.ranks[0].parameters[key.split("/")[2]].shape) > 1}
    expect(not equal, f"initial weights are the same with another seed: {sorted(equal)}")
    expect(not batches(record) & batches(neighbour), "batches are the same with another seed")


PROOFS: dict[str, Proof] = {
    "mesh": mesh_takes_effect,
    "precision": precision_takes_effect,
    "loss_scale": loss_scale_takes_effect,
    "tf32": tf32_takes_effect,
    "float8": float8_takes_effect,
    "reshard": _reshard,
    "init": _init,
    "weights": _weights,
    "model": _model,
    "optimizer": optimizer_takes_effect,
    "clip": _clip,
    "norm_type": _norm_type,
    "foreach_clip": _foreach_clip,
    "accumulation": _accumulation,
    "passes": _passes,
    "pipeline": _pipeline,
    "forward_prefetch": forward_prefetch_takes_effect,
    "backward_prefetch": backward_prefetch_takes_effect,
    "gradient_sync": _gradient_sync,
    "evaluation": _evaluation,
    "frozen": _frozen,
    "skipped": _skipped,
    "shard_placement": _shard_placement,
    "gradient_divisor": _gradient_divisor,
    "offload": _offload,
    "pin_memory": _pin_memory,
    "record_streams": _record_streams,
    "expandable_segments": expandable_segments_take_effect,
    "sequence_parallel": _sequence_parallel,
    "norms_in_tp": _norms_in_tp,
    "loss_parallel": _loss_parallel,
    "activation_checkpointing": _activation_checkpointing,
    "compile": _compile,
    "compiled": _compiled,
    "tied_embeddings": _tied_embeddings,
    "dropout": _dropout,
    "schedule": _schedule,
    "saved_on": _saved_on,
    "saving": _saving,
    "implementation": _implementation,
    "limit_all_gathers": _limit_all_gathers,
    "steps": _steps,
    "seed": _seed,
}
"""Proofs by name of the axis."""
