"""PP: a pipeline computes, holds, gathers and reduces as its schedule and the reshard mode promise."""

from collections import Counter

import torch

from conformance.assertions import compare
from conformance.assertions.fixtures import Measure, Run
from conformance.assertions.sweeps import require_no_wrong_result
from conformance.instruments.facts import Collective, RankFacts
from conformance.judge.law import law
from conformance.oracles import pipeline, tolerance
from conformance.oracles.dtype_policy import dtype_policy
from conformance.oracles.pipeline import Action
from conformance.oracles.schedule import gather_input, shard_numels
from conformance.oracles.torch_versions import traits_of
from conformance.oracles.tp_schedule import local_shapes
from conformance.outcomes import ConformanceFailure
from conformance.plan.cells import Cell
from conformance.sweeps.pipelines import sweep
from reference_trainer.config import TrainerConfig
from reference_trainer.parallel_dims import ParallelDims, resolve_mesh

PIPELINING = "https://docs.pytorch.org/docs/stable/distributed.pipelining.html"
ONE_F_ONE_B = "https://arxiv.org/abs/2104.04473"
UNSHARD = "https://github.com/pytorch/pytorch/issues/164756"
CLIP = "https://docs.pytorch.org/docs/stable/generated/torch.nn.utils.clip_grad_norm_.html"


def _where(facts: RankFacts, step: int) -> str:
    return f"rank {facts.rank}, step {step}"


def _recorded(facts: RankFacts, step: int) -> list[Action]:
    """Return the actions of the stages of a rank in a step, in their order."""
    return [Action(a.action, a.stage, a.micro_batch) for a in facts.stage_actions if a.step == step]


@law("PP-1", where="pp > 1", reference=PIPELINING)
def test_stages_act_and_transfer_in_the_order_of_the_schedule(run: Run, cell: Cell) -> None:
    """Each stage MUST compute each micro-batch once forward and once backward, in the order of the schedule, and send
    and receive one tensor of activations or gradients for each, in the dtype of computation.

    Wrong if a micro-batch is dropped or computed twice, if a schedule runs as another, or if a tensor is sent twice.
    """
    config, record = cell.config, run(cell)
    dims = resolve_mesh(config.mesh, world_size=cell.world_size)
    for facts in record.ranks:
        rank = facts.mesh_coordinate["pp"]
        for step in record.steps:
            where, actions = _where(facts, step), _recorded(facts, step)
            wrong = pipeline.violations(actions, config, rank=rank)
            detail = f"{where}: {', '.join(wrong[:4])}"
            compare.count(len(wrong), name="invalid stage actions", expected=0, detail=detail, unit="actions")
            expected = pipeline.order(config, rank=rank)
            if actions != expected:
                first = next(
                    index for index, pair in enumerate(zip(actions, expected, strict=True)) if len({*pair}) > 1
                )
                raise ConformanceFailure(f"{where}, action {first}: {actions[first]}, must be {expected[first]}")
            _check_transfers(facts, step, actions, config, dims)


def _check_transfers(
    facts: RankFacts, step: int, actions: list[Action], config: TrainerConfig, dims: ParallelDims
) -> None:
    __tracebackhide__ = True
    tensor = (pipeline.activation_numel(config, dims), dtype_policy(config.precision).compute)
    transfers = [t for t in facts.transfers if t.step == step and t.dtype.startswith(("float", "bfloat"))]
    if traits_of(str(torch.__version__)).stages_exchange_a_number and step == facts.stage_actions[0].step:
        transfers = [t for t in transfers if t.numel > 1]
    sizes = {(t.numel, t.dtype) for t in transfers}
    if sizes - {tensor}:
        raise ConformanceFailure(f"{_where(facts, step)}: transfers of {sorted(sizes)}, must be of {tensor}")
    measured = Counter((t.direction, t.peer) for t in transfers)
    expected = pipeline.transfers(actions, config)
    if measured != expected:
        raise ConformanceFailure(f"{_where(facts, step)}: transfers {dict(measured)}, must be {dict(expected)}")


@law("PP-2", where="pp > 1", reference=ONE_F_ONE_B)
def test_stages_hold_the_activations_that_backward_still_needs(run: Run, cell: Cell) -> None:
    """A stage MUST hold the activations of exactly those micro-batches whose backward is still to come: with 1F1B at
    most as many as there are stages from it to the last, with GPipe all.

    Wrong if activations outlive their backward, or if a schedule that promises few runs all forwards first.
    """
    config, record = cell.config, run(cell)
    for facts in record.ranks:
        most = pipeline.most_held(config, rank=facts.mesh_coordinate["pp"])
        for step in record.steps:
            before, largest = list[Action](), 0
            for action in (a for a in facts.stage_actions if a.step == step):
                expected = pipeline.held(before, action.stage, config)
                if _leaves_traces(action.stage, config) and action.held != expected:
                    raise ConformanceFailure(
                        f"{_where(facts, step)}, stage {action.stage}, {action.action} of {action.micro_batch}: holds "
                        f"activations of {action.held}, must hold those of {expected}"
                    )
                before.append(Action(action.action, action.stage, action.micro_batch))
                largest = max(largest, len(pipeline.held(before, action.stage, config)))
            if most is not None:
                compare.count(
                    largest,
                    name="micro-batches held at once",
                    expected=most,
                    detail=_where(facts, step),
                    unit="micro-batches",
                )


def _leaves_traces(stage: int, config: TrainerConfig) -> bool:
    """Return whether a stage keeps an activation that the log follows: one layer alone may recompute all of them."""
    sees_inside = config.activation_checkpointing == "none" and config.compile == "none"
    return sees_inside or len(pipeline.layers_of(stage, config)) > 1


@law("PP-3", where="pp > 1 and dp_shard > 1", reference=UNSHARD)
def test_groups_are_gathered_as_often_as_the_reshard_mode_says(run: Run, cell: Cell) -> None:
    """A group that the mode keeps after forward MUST be gathered once per step, with any number of micro-batches; a
    group that it frees, once for each forward or backward that finds the group sharded.

    Wrong if a pipeline gathers an unsharded group, or keeps a group that the mode promises to free.
    """
    config, record = cell.config, run(cell)
    dims = resolve_mesh(config.mesh, world_size=cell.world_size)
    for facts in record.ranks:
        inputs = {name: gather_input(name, numel, config, dims) for name, numel in _shard_numels(facts, config).items()}
        for step in record.steps:
            count = pipeline.gathers(_recorded(facts, step), config)
            expected = Counter[tuple[int, str]]()
            for group, times in count.items():
                expected[inputs[group]] += times
            gathers = _fsdp_collectives(facts, step, "all_gather", "dp_shard", *{dtype for _, dtype in inputs.values()})
            measured = Counter((event.numel, event.dtype) for event in gathers)
            detail = f"{_where(facts, step)}: elements by number {dict(measured)}, must be {dict(expected)}"
            compare.count(
                measured.total(),
                name="all-gathers per step",
                expected=expected.total(),
                detail=detail,
                unit="all-gathers",
            )
            if measured != expected:
                raise ConformanceFailure(detail)


@law("PP-4", where="pp > 1 and dp > 1", reference=PIPELINING)
def test_gradients_are_reduced_once_after_the_last_micro_batch(run: Run, cell: Cell) -> None:
    """The gradients of each group MUST be reduced once per step, after the last backward of its stage.

    Wrong if each micro-batch is reduced, which costs as many times the traffic, or if one is left out because its
    backward comes after the reduction.
    """
    config, record = cell.config, run(cell)
    reduce = dtype_policy(config.precision).reduce
    kinds = [("reduce_scatter", "dp_shard")] * (int(config.mesh.dp_shard) > 1)
    kinds += [("all_reduce", "dp_replicate")] * (config.mesh.dp_replicate > 1)
    for facts in record.ranks:
        numels = _shard_numels(facts, config)
        for step in record.steps:
            last = {a.stage: a.collectives for a in facts.stage_actions if a.step == step}
            for kind, over in kinds:
                width = int(config.mesh.dp_shard) if kind == "reduce_scatter" else 1
                expected = Counter(
                    numels[group] * width for stage in last for group in pipeline.groups_of(stage, config)
                )
                measured = Counter(e.numel for e in _fsdp_collectives(facts, step, kind, over, reduce))
                if measured != expected:
                    raise ConformanceFailure(
                        f"{_where(facts, step)}: {kind}, elements by number {dict(measured)}, must be {dict(expected)}"
                    )
            early = _early_reductions(facts, step, kinds, last, config)
            compare.count(early, name="early reductions", expected=0, detail=_where(facts, step), unit="collectives")


def _early_reductions(
    facts: RankFacts, step: int, kinds: list[tuple[str, str]], last: dict[int, int], config: TrainerConfig
) -> int:
    """Return the number of reductions that come before the last backward of their stage.

    `last` is the number of collectives before the last action of each stage. Layers have equally many elements, so that
    a reduction does not show its stage; but only the groups of finished stages can have been reduced.
    """
    at = [
        index
        for index, e in enumerate(facts.collectives)
        if (e.step, e.phase) == (step, "backward") and (e.kind, e.group) in kinds
    ]
    early, done = 0, 0
    for stage, begins in sorted(last.items(), key=lambda item: item[1]):
        early += max(0, sum(index < begins for index in at) - done)
        done += len(kinds) * len(pipeline.groups_of(stage, config))
    return early


@law("PP-5", where="pp > 1", reference=CLIP)
def test_every_stage_clips_by_the_norm_of_all(run: Run, cell: Cell) -> None:
    """Every rank MUST clip by the norm of the gradients of all stages.

    Wrong if a stage clips by its own norm, by which stages would learn at different rates.
    """
    config, record = cell.config, run(cell)
    order = config.optimizer.norm_order
    for step in record.steps_taken:
        gradients = record.select(f"step{step}/gradient/")
        expected = float(torch.cat([g.double().flatten() for g in gradients.values()]).norm(order))
        norms = [s.grad_norm for facts in record.ranks for s in facts.steps if s.step == step]
        compare.scalars(
            [norm if norm is not None else float("nan") for norm in norms],
            [expected] * len(norms),
            name=f"norm at step {step}",
            within=tolerance.norm(gradients, order=order, roundings=tolerance.norm_roundings(config)),
            each="rank",
        )


@law(
    "PP-6",
    where="id in (pp2-dp2-fp32-default-meta-cut-acc4, pp2-fp32-default-meta-cut-acc8-steps12, "
    "pp4-fp32-default-meta-cut-acc8-steps12)",
    reference=PIPELINING,
    since="2.13",
    substrates=("gloo",),  # as for DT-3
)
def test_schedules_with_any_options_equal_one_process(measure: Measure, cell: Cell) -> None:
    """Every schedule of torch.distributed.pipelining MUST, with any two options of schedule, stages and inputs, give in
    each of several steps and evaluations the outputs, losses, gradients and buffers of one process, in every bit; or
    refuse on all ranks.
    """
    require_no_wrong_result(measure(sweep, cell), unit="pipelines")


def _fsdp_collectives(facts: RankFacts, step: int, kind: str, over: str, *dtypes: str) -> list[Collective]:
    """Return collectives of a step's forward and backward, also those before the first action of a schedule.

    Raises ConformanceFailure for another dtype than those of the precision.
    """
    phases = ("data", "forward", "backward")
    found = [
        e
        for e in facts.collectives
        if e.step == step and e.kind == kind and e.group == over and e.phase in phases and e.dtype != "int64"
    ]
    others = {e.dtype for e in found} - {*dtypes}
    if others:
        must = " or ".join(sorted(dtypes))
        raise ConformanceFailure(f"{_where(facts, step)}: {kind} over {over} in {sorted(others)}, must be {must}")
    return found


def _shard_numels(facts: RankFacts, config: TrainerConfig) -> dict[str, int]:
    shapes = local_shapes(config.model, tp=config.mesh.tp, tp_rank=facts.mesh_coordinate.get("tp", 0))
    return shard_numels(shapes, config, shards=int(config.mesh.dp_shard))
