"""Laws of any trainer: relations that every correct parallelisation keeps, with bounds that are measured."""

from torch import Tensor

from conformance.assertions import compare
from conformance.judge.law import law
from conformance.oracles import tolerance
from conformance.oracles.reference import clip_factor, total_norm
from conformance.outcomes import ConformanceFailure, Unsupported
from conformance.subjects.evidence import GATHER, Evidence, clipping_bounds, members
from conformance.subjects.facts import SubjectFacts

FULLY_SHARD = "https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html"


@law("fsdp-is-on", of="any trainer", like="AXIS-1", where="world > 1", reference=FULLY_SHARD)
def test_fsdp_is_on(evidence: Evidence) -> None:
    """Every parameter MUST be a DTensor that is sharded over ranks with different data, by FSDP2 or as experts are, or
    one of the `ignored_params` of a module that FSDP2 shards; and parameters MUST be gathered in forward, or by FSDP2
    before it.

    Wrong if the wrapping has silently done nothing, or something else (DDP), or has left a layer out: all comparisons
    would hold.

    FSDP2 leaves a parameter alone below a module that it shards only where it is told to. Its gradient, if it gets one,
    is the trainer's to reduce, which `gradients` and `replicas` judge.
    """
    record = evidence.record
    data_ranks = {facts.rank: facts.data_rank for facts in record.ranks}
    everywhere = [
        (name, parameter)
        for facts in record.ranks
        for name, parameter in facts.parameters.items()
        if not parameter.is_ignored
    ]
    plain = [name for name, parameter in everywhere if not parameter.is_dtensor]
    unsharded = [
        name
        for name, parameter in everywhere
        if not any(len({data_ranks[rank] for rank in ranks}) > 1 for ranks in parameter.shard_ranks)
    ]
    without_gather = [f"rank {facts.rank}" for facts in record.ranks if not _gathers_in_forward(facts)]
    faults = {
        "parameters that are no DTensor": _unique(plain),
        "parameters that are not sharded over data-parallel ranks": _unique(unsharded),
        "ranks that gather nothing in forward": without_gather,
    }
    counts = {name: len(found) for name, found in faults.items()}
    compare.none(counts, details={name: _some(found) for name, found in faults.items()}, unit="seen")


def _gathers_in_forward(facts: SubjectFacts) -> bool:
    gathers = [entry for entry in facts.collectives if entry.kind == GATHER]
    return any(entry.phase == "forward" or (entry.phase == "idle" and entry.is_of_fsdp) for entry in gathers)


@law(
    "tensor-parallelism-is-on",
    of="any trainer",
    like="AXIS-1",
    where="tp > 1",
    reference="https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html",
)
def test_tensor_parallelism_is_on(evidence: Evidence) -> None:
    """Ranks that see the same data MUST communicate with each other in forward or backward.

    Wrong if the plan's names are those of no module, or the plan is for another model: every rank computes all that
    its neighbour computes, and all comparisons would hold.

    Ranks that share work add up or exchange parts of it, whatever the model: otherwise nobody has the whole result.
    """
    record = evidence.record
    for facts in record.ranks:
        alike = {each.rank for each in record.ranks if each.data_rank == facts.data_rank}
        issued = [entry for entry in facts.collectives if entry.phase in ("forward", "backward")]
        shared = [entry for entry in issued if len(alike & {*members(entry.group, record.world_size)}) > 1]
        detail = f"ranks {', '.join(map(str, sorted(alike)))} see the same data, and compute the same"
        name = "ranks that communicate with none that sees the same data"
        compare.count(int(not shared), name=name, expected=0, detail=detail, unit="ranks")


@law("partition", of="any trainer", like="PAR-7", where="world > 1", reference=FULLY_SHARD)
def test_shards_partition_parameters(evidence: Evidence) -> None:
    """The ranks MUST hold each element of each sharded parameter, all elements equally often.

    Wrong if a shard is lost, is held twice, or has another shape than its placements say.
    """
    record = evidence.record
    wrong = [name for name in record.ranks[0].layouts if not record.is_partitioned(name)]
    record.select("initial/parameter/")  # refuses shards whose shape is not that of their placements
    compare.count(len(wrong), name="parameters not partitioned", expected=0, detail=_some(wrong), unit="parameters")


@law("replicas", of="any trainer", like="PAR-5", where="world > 1", reference=FULLY_SHARD)
def test_copies_are_equal(evidence: Evidence) -> None:
    """Ranks that hold the same elements MUST hold the same bits: of parameters, buffers, gradients before and after
    clipping, from the start to the end.

    Wrong if a gradient is not reduced over replicas, or an update is lost on one rank; or if each rank keeps statistics
    of its own samples, as batch normalisation does: a checkpoint would hold those of one rank, one process has those of
    all samples. Buffers that the state dict leaves out are no state, and may differ once steps are taken.
    """
    scratch = {f"final/buffer/{name}" for name in evidence.reference.facts.unsaved_buffers}
    unequal = [(key, rank) for key, rank in evidence.record.unequal_copies if key not in scratch]
    detail = "; ".join(f"{key} on rank {rank}" for key, rank in unequal[:3])
    if unequal and all(key.startswith("final/buffer/") for key, _ in unequal):
        detail += ": updated by each rank from its own samples; reduce or broadcast it before it is saved or read"
    compare.count(len(unequal), name="unequal copies", expected=0, detail=detail, unit="tensors")


@law("initialised", of="any trainer", like="INIT-1", where="world > 1", reference=FULLY_SHARD)
def test_nothing_is_left_uninitialised(evidence: Evidence) -> None:
    """Every element of every parameter and buffer MUST be initialised when the model is built.

    Wrong if a buffer is forgotten after `to_empty`. Memory that torch hands out is NaN meanwhile, or the largest
    integer, as many elements of which a buffer may hold as in one process. It may be computed from weights, so that
    with others than those of one process any number but all may be meant.
    """
    left: dict[str, int] = {}
    for facts in evidence.record.ranks:
        for name, elements in facts.uninitialised.items():
            forgotten = elements - evidence.reference.facts.meant(name, init=evidence.cell.init)
            if forgotten > 0:
                left[name] = left.get(name, 0) + forgotten
    detail = _some([f"{name} ({elements})" for name, elements in left.items()])
    compare.count(sum(left.values()), name="uninitialised elements", expected=0, detail=detail, unit="elements")


@law("initial-weights", of="any trainer", like="INIT-2", where="init = full", reference=FULLY_SHARD)
def test_initial_weights_are_those_of_one_process(evidence: Evidence) -> None:
    """A model that is made with its weights MUST keep them, in every bit, when it is made parallel.

    Wrong if ranks have other weights than rank 0, or shards are in another order.
    """
    measured = evidence.record.select("initial/parameter/")
    expected = {name: tensor.float() for name, tensor in evidence.reference.below("initial/").items()}
    is_own = any(facts.is_own_model for facts in evidence.record.ranks)
    if is_own and not all(bool((measured[name] == tensor).all()) for name, tensor in expected.items()):
        raise Unsupported("the loop makes its model by a seed of its own: take config.model() to judge initial weights")
    compare.bits(measured, expected, name="initial weights")


@law("tied-weights", of="any trainer", like="PAR-7", where="tied_embeddings = true", reference=FULLY_SHARD)
def test_tied_weights_are_one_parameter(evidence: Evidence) -> None:
    """Weights that are one parameter in one process MUST be one parameter of the parallel model.

    Wrong if they are materialised, sharded or loaded one by one: embedding and head are trained apart.
    """
    untied = _unique([name for facts in evidence.record.ranks for name in facts.untied])
    compare.count(len(untied), name="weights that are not tied", expected=0, detail=_some(untied), unit="parameters")


@law("optimizer-holds-each-once", of="any trainer", like="OPT-1", where="world > 1", reference=FULLY_SHARD)
def test_optimizer_holds_each_parameter_once(evidence: Evidence) -> None:
    """The optimizer MUST hold each trainable parameter of the model exactly once, and nothing else that is trained: no
    other tensor, and no parameter that requires a gradient here and none in one process.

    Wrong if it was made before the model was sharded, or of parameters that are told apart by their memory's address.
    """
    frozen = evidence.reference.facts.frozen
    for facts in evidence.record.ranks:
        expected = [name for name, parameter in facts.parameters.items() if parameter.is_trained]
        missing = [name for name in expected if name not in facts.held]
        foreign = facts.held.count("?")
        repeated = sorted({name for name in facts.held if name != "?" and facts.held.count(name) > 1})
        unfrozen = [name for name in expected if name in facts.held and name in frozen]
        detail = (
            f"rank {facts.rank}: missing {_some(missing)}; more than once {_some(repeated)}; "
            f"{foreign} tensors that are no parameters of the model; frozen in one process {_some(unfrozen)}"
        )
        wrong = len(missing) + len(repeated) + foreign + len(unfrozen)
        compare.count(wrong, name="wrong in the optimizer", expected=0, detail=detail, unit="entries")


@law("every-gradient", of="any trainer", where="world > 1", reference=FULLY_SHARD)
def test_every_parameter_gets_a_gradient(evidence: Evidence) -> None:
    """Every parameter that one process gives a gradient in a step MUST get one in that step, on every rank.

    Wrong if gradients are not synchronised after an accumulated step, or a layer is cut off.
    """
    for step in evidence.steps:
        trained = evidence.reference.facts.gradients[step].by_name
        for rank, shards in enumerate(evidence.record.shards):
            without = [name for name in trained if f"step{step}/gradient/{name}" not in shards]
            detail = f"step {step}, rank {rank}: {_some(without)}"
            name = f"parameters without gradient, of {len(trained)}"
            compare.count(len(without), name=name, expected=0, detail=detail, unit="parameters")


@law("every-update", of="any trainer", where="world > 1", reference=FULLY_SHARD)
def test_every_parameter_moves(evidence: Evidence) -> None:
    """Every parameter that a step of one process changes MUST change in that step.

    Wrong if the optimizer holds other tensors than the model, or skips a parameter.
    """
    record, reference = evidence.record, evidence.reference
    expected_before = reference.below("initial/")
    before = {name: tensor.float() for name, tensor in expected_before.items()}
    for step in evidence.steps:
        after, expected = record.parameters_after(step), reference.below(f"step{step}/parameter/")
        moving = [name for name in expected if _clearly_differ(expected[name], expected_before[name])]
        still = [name for name in moving if bool((after[name] == before[name].to(after[name].dtype)).all())]
        name = f"parameters that do not move, of {len(moving)}"
        compare.count(len(still), name=name, expected=0, detail=f"step {step}: {_some(still)}", unit="parameters")
        before, expected_before = after, expected


def _clearly_differ(after: Tensor, before: Tensor) -> bool:
    """Return whether a change is larger than the rounding of the parameter to fp32 can hide."""
    return float((after - before).norm()) > 16 * tolerance.FP32_ROUNDOFF * float(before.norm())


@law("gradients", of="any trainer", like="PAR-1", where="precision = fp32", reference=FULLY_SHARD)
def test_gradients_are_those_of_one_process(evidence: Evidence) -> None:
    """Gradients in fp32 MUST be those of one process, in every step: of the mean over all that counts in the step.

    Wrong if they are summed over ranks instead of averaged, micro-batches or ranks count alike that are not alike, or
    shards are stale.
    """
    for step in evidence.steps:
        expected = evidence.reference.below(f"step{step}/gradient/")
        measured = {name: grad for name, grad in evidence.record.gradients(step).items() if name in expected}
        name = f"gradient at step {step}"
        compare.tensors(measured, expected, name=name, within=evidence.reference.gradient_bounds(step))


@law("parameters", of="any trainer", like="PAR-1", where="precision = fp32", reference=FULLY_SHARD)
def test_parameters_are_those_of_one_process(evidence: Evidence) -> None:
    """After each step the change of every parameter since the start MUST be that of one process.

    Wrong if an update is lost on one rank, or gradients are clipped by another norm.
    """
    reference = evidence.reference
    origin, trained = reference.below("initial/"), _trained(evidence)
    for step in evidence.steps:
        expected = reference.below(f"step{step}/parameter/")
        after = evidence.record.parameters_after(step)
        compare.tensors(
            {name: after[name] for name in trained},
            {name: expected[name] for name in trained},
            name=f"change of parameters by step {step}",
            origin=origin,
            within=reference.update_bounds(step),
        )


@law("loss", of="any trainer", like="PAR-1", where="world > 1", reference=FULLY_SHARD)
def test_losses_are_those_of_one_process(evidence: Evidence) -> None:
    """The loss of each step MUST be that of one process, and the same number on every rank that tells one.

    Wrong if it is a rank's own, or the mean of the ranks' means. In bf16 it may deviate as in one process.
    """
    facts = evidence.reference.facts
    told = [rank.losses for rank in evidence.record.ranks if rank.losses]
    if not told:
        raise Unsupported("the trainer's loop tells no losses: let it yield the loss of each step")
    logged = {repr(losses) for losses in told}  # NaN equals itself as a text only
    compare.count(len(logged), name="different losses", expected=1, detail=_some(sorted(logged)), unit="lists")
    in_fp32 = evidence.cell.precision == "fp32"
    within = evidence.reference.number_bound(facts.loss_error) if in_fp32 else evidence.reference.bf16_loss_bound()
    compare.scalars(told[0], facts.losses, name="loss", within=within)


@law("gradient-norm", of="any trainer", like="CLIP-1", where="world > 1", reference=FULLY_SHARD)
def test_norm_is_that_of_the_full_gradients(evidence: Evidence) -> None:
    """The norm by which gradients are clipped MUST be that of the full gradients, and the same on every rank that tells
    it.

    Wrong if it is a rank's own, or if replicas count more than once. In fp32 it is also that of one process.
    """
    record, reference = evidence.record, evidence.reference
    told = [rank.grad_norms for rank in record.ranks if rank.grad_norms]
    if not told:
        raise Unsupported("no norm is known: torch's functions have not clipped, and the loop yields no (loss, norm)")
    logged = {repr(norms) for norms in told}  # NaN equals itself as a text only
    compare.count(len(logged), name="different norms", expected=1, detail=_some(sorted(logged)), unit="lists")
    own = [record.gradients(step) for step in evidence.steps]
    if not own[0]:
        raise ConformanceFailure("no parameter has a gradient at step 0")
    compare.scalars(
        told[0],
        [total_norm(gradients.values(), order=2.0) for gradients in own],
        name="norm, compared with that of the run's own gradients",
        within=tolerance.norm(own[0], order=2.0),
    )
    if evidence.cell.precision == "fp32":
        within = reference.number_bound(reference.facts.norm_error)
        compare.scalars(told[0], reference.facts.grad_norms, name="norm", within=within)


@law("clipping", of="any trainer", like="CLIP-2", where="world > 1", reference=FULLY_SHARD)
def test_gradients_are_scaled_by_one_factor(evidence: Evidence) -> None:
    """Clipping MUST scale all gradients by the one factor that brings their norm down to the limit.

    Wrong if it is left out, reaches some gradients only, or scales each rank's by a norm of its own.
    """
    limit = evidence.reference.facts.max_norm
    for step in evidence.steps:
        before, after = (evidence.record.gradients(step, clipped=clipped) for clipped in (False, True))
        if not before:
            raise ConformanceFailure(f"no parameter has a gradient at step {step}")
        factor = clip_factor(total_norm(before.values(), order=2.0), max_norm=limit)
        scaled = {name: gradient.double() * factor for name, gradient in before.items()}
        within = clipping_bounds(before)
        compare.tensors(after, scaled, name=f"clipped gradients at step {step}", within=within)


@law("bf16-is-used", of="any trainer", like="MP-1", where="precision = bf16-mp", reference=FULLY_SHARD)
def test_products_are_in_bf16(evidence: Evidence) -> None:
    """Matrix products in forward MUST be in the dtypes in which one process with bf16 parameters computes them, except
    in layers that the owner's code keeps in fp32: by a policy of mixed precision that says so, by `ignored_params`, or
    by a cast of their inputs to fp32 in the model.

    Wrong if mixed precision is forgotten, for the model or for a layer.

    A group that was sharded without a policy, and whose code follows the dtype of its weights, is judged like all
    others: nobody has said that it stays in fp32. A cast in the model is known by one process, in which such a layer
    refuses weights in bf16.
    """
    rank, expected = evidence.record.ranks[0], evidence.reference.facts.bf16_matmul_dtypes
    measured = rank.matmul_dtypes
    other = [dtype for dtype in measured if dtype not in expected]
    other += [dtype for dtype in rank.kept_matmul_dtypes if dtype not in ("float32", *expected)]
    missing = [dtype for dtype in expected if dtype not in measured]
    detail = f"products are in {_some(measured)}, those of one process in {_some(expected)}"
    compare.count(len(other) + len(missing), name="other dtypes", expected=0, detail=detail, unit="dtypes")


@law("fp32-masters", of="any trainer", like="MP-2", where="precision = bf16-mp", reference=FULLY_SHARD)
def test_masters_are_in_fp32(evidence: Evidence) -> None:
    """Parameters that the optimizer updates, and the gradients that it steps with, MUST be in fp32.

    Wrong if the model was cast to bf16: small updates are lost.
    """
    facts = evidence.record.ranks[0]
    other = [f"{name} ({p.dtype})" for name, p in facts.parameters.items() if p.dtype != "float32"]
    other += [f"gradients in {dtype}" for dtype in facts.gradient_dtypes if dtype != "float32"]
    compare.count(len(other), name="not in fp32", expected=0, detail=_some(other), unit="parameters or gradients")


@law("bf16-gradients", of="any trainer", like="MP-3", where="precision = bf16-mp", reference=FULLY_SHARD)
def test_bf16_gradients_are_as_accurate_as_in_one_process(evidence: Evidence) -> None:
    """Gradients in mixed precision MUST be no farther from fp64 than those of one process in bf16.

    Wrong if gradients are added up in bf16, or a sum is lost. One process is torch's autocast, or cast parameters.
    """
    errors = evidence.reference.facts.bf16_gradients
    if errors is None:
        raise Unsupported("the reference was not run in bf16")
    expected = evidence.reference.below("step0/gradient/")
    measured = {name: grad for name, grad in evidence.record.gradients(0).items() if name in expected}
    within = evidence.reference.bf16_bounds(errors)
    compare.tensors(measured, expected, name="gradient at step 0", within=within)


@law("bf16-parameters", of="any trainer", like="MP-3", where="precision = bf16-mp", reference=FULLY_SHARD)
def test_bf16_updates_are_as_accurate_as_in_one_process(evidence: Evidence) -> None:
    """After each step in mixed precision the change of every parameter since the start MUST be no farther from that in
    fp64 than the change in one process in bf16.

    Wrong if an update is lost on one rank, gradients are clipped by another norm, or later steps go wrong.

    Gradients may be twice as far from fp64 as those of one process. A change that is linear in them is twice as far
    then. Adam's is less: it turns its step where a gradient's error exceeds the gradient, for a share of the elements
    that grows like the error, so that the deviation grows like its root. A small tensor has whole elements that turn,
    see `subjects.turning`.
    """
    reference = evidence.reference
    if not reference.facts.bf16_updates:
        raise Unsupported("the reference was not run in bf16")
    origin, trained = reference.below("initial/"), _trained(evidence)
    for step in evidence.steps:
        expected = reference.below(f"step{step}/parameter/")
        after = evidence.record.parameters_after(step)
        compare.tensors(
            {name: after[name] for name in trained},
            {name: expected[name] for name in trained},
            name=f"change of parameters by step {step}",
            origin=origin,
            within=reference.bf16_bounds(reference.facts.bf16_updates[step]),
        )


def _trained(evidence: Evidence) -> list[str]:
    """Return the parameters that get a gradient in one process."""
    return [name for name in evidence.reference.facts.parameters if name not in evidence.reference.facts.untrained]


def _unique(names: list[str]) -> list[str]:
    return list(dict.fromkeys(names))


def _some(names: list[str], *, count: int = 3) -> str:
    """Return the first of some names, and how many more there are."""
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return (", ".join(names[:count]) or "none") + more
