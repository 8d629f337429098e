"""Emulation of a mesh in one process that rounds where the ranks do: casts, reductions and tensor-parallel sums.

The emulation takes the master weights at the start of a step and computes the step's loss and gradients; it shares the
modules of the model with the trainer and nothing else. In bf16 or fp16 a rounding left out or added shows as a
difference. Sources: `torch.distributed.fsdp.MixedPrecisionPolicy` (parameters are cast when they are unsharded,
gradients before they are reduced), `FSDPModule.set_requires_gradient_sync` and `set_requires_all_reduce` (gradients
that are added up before they are reduced); arXiv:1909.08053 section 3 (column- and row-wise sharding), arXiv:2205.05198
section 4 (sequence parallelism); `torch.distributed.tensor.parallel.loss_parallel`.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial, reduce
from itertools import islice
from operator import add
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor

from conformance.numerics.device_operators import chosen_as_on, kernel_device
from conformance.numerics.knobs import pinned_knobs, pinned_numerics
from conformance.numerics.rings import Ring, ring_of, ring_sum
from conformance.oracles.dropout import Masks, Rounding, replay
from conformance.oracles.dtype_policy import FP16, dtype_policy
from conformance.oracles.frozen import at_step, is_trained
from conformance.oracles.pipeline import added_up_at_once, backward_order
from conformance.oracles.reference import Batch, Tensors, initial_model
from conformance.oracles.schedule import (
    backward_count,
    gradient_sync,
    group_of,
    reduces_earlier,
)
from conformance.oracles.skipped import is_computed, leave_out
from conformance.oracles.torch_versions import traits_of
from conformance.oracles.tp_schedule import is_norm, sharded_dim
from conformance.oracles.virtual_cp import ContextParallelForward
from conformance.oracles.virtual_ep import ExpertParallelForward, is_of_experts, joined_experts
from conformance.oracles.virtual_float8 import multiply_in_float8
from conformance.oracles.virtual_tp import TensorParallelForward, vocabulary_parallel_loss
from reference_trainer.config import TrainerConfig
from reference_trainer.data import IGNORED_LABEL, Batches
from reference_trainer.model import Transformer

Observe = Callable[[Transformer, int, int, int], AbstractContextManager[object]]
"""Function of the model, a data-parallel rank, a micro-batch, and the place of the latter in the order of backward.

With several forward passes before each backward it is called once for all of these, whose number takes the place of
that of the micro-batch."""


def unobserved(*_arguments: object) -> AbstractContextManager[object]:
    """Return a context that does nothing."""
    return nullcontext()


class Reduction(NamedTuple):
    """Gradients that ranks have reduced, by parameter name, in the dtype of the reduction."""

    sums: Tensors
    sizes: Tensors
    """Sums of the terms' sizes, of the shapes of the sums."""


@dataclass(frozen=True)
class Emulation:
    """Loss and gradients of one step on a mesh; tensors by parameter name."""

    loss: float
    """Mean over the step's valid tokens, in nats."""
    gradients: Tensors
    """Full gradients, unscaled, before clipping, in the masters' shapes and dtypes, on the CPU."""
    conditions: dict[str, float]
    """Condition of each gradient's sum over ranks: norm of the sum of its terms' sizes over the norm of the sum."""
    uncast: Sequence[Reduction] = ()
    """Reductions of gradients that are then cast to coarser masters, on the CPU; they are added up after the cast."""
    knobs: dict[str, bool] = field(default_factory=dict)
    """True for each knob of this process that was set as ranks have it, see `conformance.numerics.knobs`."""


def emulated_step(
    config: TrainerConfig,
    masters: Tensors,
    *,
    step: int,
    loss_scale: float = 1.0,
    masks: Masks | None = None,
    device: str = "cpu",
    observe: Observe = unobserved,
) -> Emulation:
    """Compute one step on the mesh of `config`, which must be resolved.

    `masters` are the full weights before the step by parameter name, in their dtypes. Gradients are computed of the
    loss times `loss_scale`, a power of two, and divided by it when they are reduced.

    `device` is the type of the device of the run: the emulation uses the same kernels and the operators of such a
    device, since others round in other places. Tensors that are given or returned are on the CPU. Sums over more than
    two data-parallel ranks are taken in one order of many, see `tolerance.emulated_gradients`. Dropout replays `masks`;
    raises ValueError if they are missing. The model computes inside of the contexts of `observe`.
    """
    if config.model.dropout and masks is None:
        raise ValueError("the emulation draws no masks of dropout: give those of a run")
    compute, kernels = _compute_dtype(config), kernel_device(device)
    with pinned_numerics(kernels), chosen_as_on(device, compute, head_dim=config.model.head_dim):
        return _emulated(config, masters, step, loss_scale, masks.of(step) if masks else (), device, observe)


def _emulated(
    config: TrainerConfig,
    masters: Tensors,
    step: int,
    loss_scale: float,
    masks: Sequence[Tensor],
    device: str,
    observe: Observe,
) -> Emulation:
    kernels, config = kernel_device(device), at_step(config, step)
    inputs, labels = Batches(config.data, vocab_size=config.model.vocab_size, seed=config.seed).global_batch(step)
    batch = (inputs.to(kernels), labels.to(kernels))
    masters = {name: master.to(kernels) for name, master in masters.items()}
    divisor = config.gradient_divisor or _data_parallel_size(config)
    scale = divisor / int((labels != IGNORED_LABEL).sum())
    model = initial_model(config).to(kernels)  # for its buffers
    for name, parameter in model.named_parameters():
        parameter.data = masters[name].to(_compute_dtype(config))
    if config.float8 != "none":
        multiply_in_float8(model, masters, config)
    ring = ring_of(kernels)
    forward, models = _together(config, model)
    members = [_member(config, own, ring) for own in models]
    dropout: Rounding = "device" if device != "cpu" else "traced" if config.compile != "none" else "processor"
    drop = partial(replay, rounding=dropout)
    loss, gradients = _local_gradients(config, members, forward, batch, masks, drop, observe, scale=scale * loss_scale)
    rounds = _reduce_scatter_inputs(config, gradients, copied=members[0].copied, ring=ring)
    sums = _reductions(config, rounds)
    sizes = _reductions(config, [[_absolute(grads) for grads in ranks] for ranks in rounds])
    reduced, size = (_sum([_cast_like(terms, masters) for terms in each]) for each in (sums, sizes))
    conditions = {name: _ratio(size[name].norm(), grad.norm()) for name, grad in reduced.items()}
    return Emulation(
        loss=loss * scale / divisor,
        gradients={name: grad.cpu() / loss_scale for name, grad in reduced.items()},
        conditions=conditions,
        uncast=[Reduction(*(_coarsened(each, masters) for each in pair)) for pair in zip(sums, sizes, strict=True)],
        knobs=pinned_knobs(kernels),
    )


def _compute_dtype(config: TrainerConfig) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, dtype_policy(config.precision).compute)
    return dtype


@dataclass(frozen=True)
class _Member:
    """One of the ranks that share samples, or a rank that has its own."""

    model: Transformer
    loss_of: Callable[[Batch], Tensor]
    """Summed loss of the tokens that the rank computes."""
    leaves: Tensors
    """Trained parameters by name, and copies of a parameter by name and tensor-parallel rank."""
    copied: Sequence[str]
    """Names of the trained parameters of which there are copies."""


def _member(config: TrainerConfig, model: Transformer, ring: Ring) -> _Member:
    forward = _tensor_parallel(config, model, ring)
    loss_of = _loss_function(config, forward or model, ring)
    return _Member(
        model,
        _with_balance(loss_of, model) if config.model.n_experts else loss_of,
        leaves={n: leaf for n, leaf in _leaves(model, forward).items() if is_trained(n.partition("@")[0], config)},
        copied=[name for name in (forward.copied if forward else ()) if is_trained(name, config)],
    )


_Forward = Callable[[Sequence[_Member], Sequence[Batch]], list[Tensor]]
"""Function of ranks that compute together, and the micro-batch of each, that returns their summed losses."""


def _together(config: TrainerConfig, model: Transformer) -> tuple[_Forward, list[Transformer]]:
    """Return the forward of ranks that compute together, and the models of these: of a single rank the model itself."""
    if config.model.n_experts:
        experts = ExpertParallelForward(model, ranks=_data_parallel_size(config), ep=config.mesh.ep)
        return partial(_in_lockstep, experts.losses), experts.models
    if config.mesh.cp > 1:
        context = ContextParallelForward(model, cp=config.mesh.cp, seq_len=config.data.seq_len)
        return partial(_sharded_losses, context), context.models
    return _alone, [model]


def _alone(members: Sequence[_Member], batches: Sequence[Batch]) -> list[Tensor]:
    """Summed loss of a micro-batch that one rank computes."""
    return [member.loss_of(batch) for member, batch in zip(members, batches, strict=True)]


def _in_lockstep(
    run: Callable[[Sequence[Callable[[], Tensor]]], list[Tensor]],
    members: Sequence[_Member],
    batches: Sequence[Batch],
) -> list[Tensor]:
    """Summed losses of micro-batches that several ranks compute in lockstep."""
    return run([partial(member.loss_of, batch) for member, batch in zip(members, batches, strict=True)])


def _sharded_losses(
    context: ContextParallelForward, members: Sequence[_Member], batches: Sequence[Batch]
) -> list[Tensor]:
    """Summed losses of the shards of a micro-batch that several ranks compute."""
    places = zip(batches, context.positions, strict=True)
    shards = [(inputs[:, own], labels[:, own]) for (inputs, labels), own in places]
    return _in_lockstep(context.losses, members, shards)


def _local_gradients(
    config: TrainerConfig,
    members: Sequence[_Member],
    forward: _Forward,
    batch: Batch,
    masks: Sequence[Tensor],
    drop: Callable[[Transformer, Sequence[Tensor]], None],
    observe: Observe,
    *,
    scale: float,
) -> tuple[float, list[list[Tensors]]]:
    """Summed loss of a batch, and the gradients of `scale` times it by backward and data-parallel rank.

    Backwards come in the order in which their gradients are added up. `drop` sets the masks of the next forward.
    """
    loss, gradients, order = 0.0, [], backward_order(config)
    for place in range(backward_count(config)):
        together = order[place * config.passes : (place + 1) * config.passes]
        used = [
            {name: leaf for name, leaf in member.leaves.items() if is_computed(name, config, together)}
            for member in members
        ]
        for leaves in used:
            _set_grad_dtypes(config, leaves, place)
        ranks: list[Tensors] = []
        for first in range(0, _data_parallel_size(config), len(members)):
            losses: list[list[Tensor]] = []
            with ExitStack() as observed:
                for rank, member in enumerate(members, start=first):
                    observed.enter_context(observe(member.model, rank, together[0] // config.passes, place))
                for index in together:
                    batches: list[Batch] = []
                    for rank, member in enumerate(members, start=first):
                        leave_out(member.model, config, index)
                        drop(member.model, _micro_batch(config, masks, rank, index))
                        inputs, labels = _micro_batch(config, batch, rank, index)
                        batches.append((inputs, labels))
                    losses.append(forward(members, batches))
                ranks += _gradients_of(config, used, [[own * scale for own in each] for each in losses])
            loss += sum(float(own.detach()) for each in losses for own in each)
        gradients.append(ranks)
    return loss, gradients


def _gradients_of(
    config: TrainerConfig, parameters: Sequence[Tensors], losses: Sequence[Sequence[Tensor]]
) -> list[Tensors]:
    """Return the gradients, by rank, of the sum of losses by pass and rank, which one backward computes.

    Each loss has a compiled graph of its own. What such a graph returns is rounded, see `_is_compiled`, and cast before
    autograd adds the gradients of several.
    """
    apart = [{name: leaf for name, leaf in own.items() if _is_cast_after_rounding(name, config)} for own in parameters]
    leaves = [leaf for own in parameters for leaf in own.values()]
    joint = iter(torch.autograd.grad([loss for each in losses for loss in each], leaves, retain_graph=any(apart)))
    gradients = [{name: next(joint) for name in own} for own in parameters]
    for rank, rounded in enumerate(apart):
        if rounded:
            own_losses = [each[rank] for each in losses]
            gradients[rank] |= _added_after_casts(config, rounded, own_losses)
    return gradients


def _added_after_casts(config: TrainerConfig, parameters: Tensors, losses: Sequence[Tensor]) -> Tensors:
    """Return the gradients of the sum of losses, each of which has them rounded and cast by itself."""
    by_loss = [
        torch.autograd.grad(loss, list(parameters.values()), retain_graph=True, allow_unused=True) for loss in losses
    ]
    return {
        name: torch.stack([grad for grad in rounded if grad is not None]).to(_reduce_dtype(config)).sum(0)
        for name, *rounded in zip(parameters, *by_loss, strict=True)
    }


def _is_cast_after_rounding(name: str, config: TrainerConfig) -> bool:
    is_wide = _has_gradients_of_own_dtypes(config) and _is_replicated_over_tp(name.partition("@")[0], config)
    return is_wide and _is_compiled(name, config)


def _has_gradients_of_own_dtypes(config: TrainerConfig) -> bool:
    """Return whether gradients keep the dtype of computation; autograd casts those of FSDP1 back in every version."""
    policy = dtype_policy(config.precision)
    keeps = traits_of(str(torch.__version__)).gradients_have_own_dtypes and config.implementation == "fsdp2"
    return keeps and policy.reduce != policy.compute


def _set_grad_dtypes(config: TrainerConfig, parameters: Tensors, place: int) -> None:
    """Let gradients of a micro-batch have the dtypes that those of a run have."""
    if _has_gradients_of_own_dtypes(config):
        for name, leaf in parameters.items():
            if not _is_compiled(name, config):
                is_wide = _is_replicated_over_tp(name.partition("@")[0], config)
                leaf.grad_dtype = _reduce_dtype(config) if is_wide else _grad_dtype(name, config, place)


def _is_replicated_over_tp(parameter: str, config: TrainerConfig) -> bool:
    """Return whether tensor-parallel ranks have copies of a parameter, whose gradients autograd casts at once.

    They may have to be summed over these ranks, see `VersionTraits.gradients_have_own_dtypes`.
    """
    in_tp = config.mesh.tp > 1 and (config.norms_in_tp or not is_norm(parameter))
    return in_tp and sharded_dim(parameter) is None


def _reduce_dtype(config: TrainerConfig) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, dtype_policy(config.precision).reduce)
    return dtype


def _is_compiled(parameter: str, config: TrainerConfig) -> bool:
    """Return whether a compiled graph computes a gradient, which rounds it to the dtype of the parameter.

    Graphs are traced with parameters whose `grad_dtype` is their dtype, with any setting of FSDP for backward.
    """
    return config.compile != "none" and parameter.startswith("layers.")


def _grad_dtype(name: str, config: TrainerConfig, place: int) -> torch.dtype | None:
    """Dtype to which autograd casts the gradients of a micro-batch, one by one, before it adds those of a tied weight.

    None leaves gradients as they are computed, so that a norm's stay in fp32; but FSDPParamGroup lets autograd cast the
    first of several gradients that are added up (`_set_unsharded_grad_dtypes`, torch 2.15).
    """
    order = backward_order(config)
    is_first = place == 0 or not is_computed(name, config, order[: place * config.passes])
    is_only_kept = gradient_sync(config) == "last" and is_first and place < backward_count(config) - 1
    return _reduce_dtype(config) if is_only_kept else None


def _data_parallel_size(config: TrainerConfig) -> int:
    if config.mesh.dp_shard == "auto":
        raise ValueError("mesh.dp_shard is auto: the emulation needs the number of ranks")
    return config.mesh.dp_replicate * config.mesh.dp_shard


def _tensor_parallel(config: TrainerConfig, model: Transformer, ring: Ring) -> TensorParallelForward | None:
    if config.mesh.tp == 1:
        return None
    return TensorParallelForward(
        model,
        tp=config.mesh.tp,
        ring=ring,
        sequence_parallel=config.sequence_parallel,
        norms_in_tp=config.norms_in_tp,
    )


def _leaves(model: Transformer, forward: TensorParallelForward | None) -> Tensors:
    """All tensors with gradients: parameters by name, and copies of a parameter by name and rank."""
    copied = forward.copied if forward else {}
    leaves: Tensors = {name: parameter for name, parameter in model.named_parameters() if name not in copied}
    for name, copies in copied.items():
        leaves |= {_rank_copy(name, rank): copy for rank, copy in enumerate(copies)}
    return leaves


def _rank_copy(name: str, rank: int) -> str:
    return f"{name}@{rank}"


def _loss_function(config: TrainerConfig, forward: Callable[[Tensor], Tensor], ring: Ring) -> Callable[[Batch], Tensor]:
    """Summed loss of a micro-batch, in fp32, by torch's own cross entropy: another formula would round differently.

    That of the integer model is minus the sum of the labels' logits.
    """
    tp = config.mesh.tp

    def loss_of(batch: Batch) -> Tensor:
        logits, labels = forward(batch[0]).float().flatten(0, 1), batch[1].flatten()
        if config.model.arithmetic == "integer":
            return F.nll_loss(logits, labels, reduction="sum", ignore_index=IGNORED_LABEL)
        if tp > 1 and config.loss_parallel:
            return vocabulary_parallel_loss(logits, labels, tp=tp, ring=ring)
        return _cross_entropy(logits, labels)

    return loss_of


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy summed over valid labels, of logits of any floating dtype."""
    flat = logits.float().flatten(0, -2)
    return F.cross_entropy(flat, labels.flatten(), reduction="sum", ignore_index=IGNORED_LABEL)


def _with_balance(loss_of: Callable[[Batch], Tensor], model: Transformer) -> Callable[[Batch], Tensor]:
    """Loss of a micro-batch with that of the balance of its experts."""
    return lambda batch: loss_of(batch) + model.balance_loss()


def _micro_batch(config: TrainerConfig, batch: Sequence[Tensor], rank: int, index: int) -> list[Tensor]:
    """Consecutive samples belong to a rank, or to those that share them, and within it to a micro-batch."""
    groups = _data_parallel_size(config) // config.mesh.cp
    return [t.chunk(groups)[rank // config.mesh.cp].chunk(config.accumulation)[index] for t in batch]


def _reduce_scatter_inputs(
    config: TrainerConfig, gradients: Sequence[Sequence[Tensors]], *, copied: Collection[str], ring: Ring
) -> list[list[Tensors]]:
    """Inputs of each reduce-scatter, by round and rank, from the gradients by backward and rank.

    The gradient of a weight that tensor-parallel ranks have copies of is summed over them when a round begins;
    gradients of postponed reductions are first added up by each rank, in the dtype of the reduce-scatter.
    """
    on_the_wire = _reduce_dtype(config)
    if gradient_sync(config) == "last":
        by_rank = [
            [_added_up(config, grads, on_the_wire) for grads in _rounds(config, gradients_of_rank)]
            for gradients_of_rank in zip(*gradients, strict=True)
        ]
        rounds = zip(*by_rank, strict=True)
        return [[_to(_summed_over_copies(total, copied, ring), on_the_wire) for total in totals] for totals in rounds]
    return [[_to(_summed_over_copies(grads, copied, ring), on_the_wire) for grads in ranks] for ranks in gradients]


def _rounds(config: TrainerConfig, gradients: Sequence[Tensors]) -> list[Sequence[Tensors]]:
    """Gradients, or sums, by backward that are reduced together, by round; see `schedule.reduces_earlier`."""
    names = {name: group_of(name.partition("@")[0], config) for each in gradients for name in each}
    groups = set(names.values())
    earlier = {name for name, group in names.items() if reduces_earlier(group, config, groups)}
    if not earlier:
        return [gradients]
    last = [{name: grad for name, grad in each.items() if name not in earlier} for each in gradients[:-1]]
    return [
        [{name: grad for name, grad in each.items() if name in earlier} for each in gradients[:-1]],
        [*last, gradients[-1]],
    ]


def _added_up(config: TrainerConfig, gradients: Sequence[Tensors], dtype: torch.dtype) -> Tensors:
    """Sum over micro-batches in `dtype`; gradients in another one are first added up in that one, without a cast.

    Gradients that have not waited, those of the last backward alone, are not cast.
    """
    total: Tensors = {}
    for name in dict.fromkeys(name for grads in gradients for name in grads):
        terms = [grads[name] for grads in gradients if name in grads]
        has_waited = len(gradients) == 1 or any(name in grads for grads in gradients[:-1])
        if terms[0].dtype != dtype and has_waited:
            remaining = iter(terms)
            terms = [reduce(add, islice(remaining, n)).to(dtype) for n in added_up_at_once(name, config)[: len(terms)]]
        total[name] = reduce(add, terms)
    return total


def _summed_over_copies(gradients: Tensors, copied: Collection[str], ring: Ring) -> Tensors:
    """Result of the all-reduce of tensor-parallel ranks."""
    summed = {name: grad for name, grad in gradients.items() if name.partition("@")[0] not in copied}
    for name in {key.partition("@")[0] for key in gradients}.intersection(copied):
        copies = [grad for key, grad in gradients.items() if key.partition("@")[0] == name]
        summed[name] = ring_sum(copies, dim=None, ring=ring)
    return summed


def _reductions(config: TrainerConfig, rounds: Sequence[Sequence[Tensors]]) -> list[Tensors]:
    """Means over all ranks; experts that are divided among ranks are reduced over those that have the same ones."""
    ep = config.mesh.ep
    if ep == 1:
        return _reduced(config, rounds)
    others = [
        [{name: grad for name, grad in own.items() if not is_of_experts(name)} for own in ranks] for ranks in rounds
    ]
    experts = [joined_experts(ranks, ep=ep) for ranks in rounds]
    pairs = zip(_reduced(config, others), _reduced(config, experts), strict=True)
    return [dense | routed for dense, routed in pairs]


def _reduced(config: TrainerConfig, rounds: Sequence[Sequence[Tensors]]) -> list[Tensors]:
    """Means over all ranks, from the inputs of each reduce-scatter by round and rank; they are yet to be added up."""
    before, between, after = _divisors(config)
    sums = [_reduce_scattered(config, [_quotients(grads, before) for grads in ranks]) for ranks in rounds]
    sums = [[_quotients(replica, between) for replica in replicas] for replicas in sums]
    if gradient_sync(config) == "all-reduce-last":
        rounds_of_replica = [_rounds(config, replica) for replica in zip(*sums, strict=True)]
        sums = [[_sum(each) for each in together] for together in zip(*rounds_of_replica, strict=True)]
    return [_quotients(_sum(replicas), after) for replicas in sums]


def _divisors(config: TrainerConfig) -> tuple[float, float, float]:
    """Divisors of a gradient in FSDP2 before the reduce-scatter, after it, and after the all-reduce.

    Each reduction is a mean, but in fp16 neither sums shall overflow nor gradients vanish: there the first divisor is
    about the root of the number of ranks, a power of two, and the last is the rest of it
    (`_get_gradient_divide_factors` in torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py). It grows while it
    divides the number of ranks: of three ranks it is 2, and the last 1.5.

    With a `gradient_divisor` ranks sum, and the divisor takes the place of their number.
    """
    size, replicas = _data_parallel_size(config), config.mesh.dp_replicate
    divisor = config.gradient_divisor or size
    if dtype_policy(config.precision).reduce != FP16:
        return (1.0, 1.0, divisor) if config.gradient_divisor else (1.0, size / replicas, float(replicas))
    before = 1.0
    while divisor % before == 0 and divisor / before > before:
        before *= 2
    return before, 1.0, divisor / before


def _reduce_scattered(config: TrainerConfig, ranks: Sequence[Tensors]) -> list[Tensors]:
    """Sums over the shard groups, by replica."""
    size = len(ranks) // config.mesh.dp_replicate
    return [_sum(ranks[start : start + size]) for start in range(0, len(ranks), size)]


def _quotients(tensors: Tensors, divisor: float) -> Tensors:
    return {name: tensor / divisor for name, tensor in tensors.items()}


def _sum(terms: Sequence[Tensors]) -> Tensors:
    """Sum of the terms of each name; not all have all names."""
    names = dict.fromkeys(name for tensors in terms for name in tensors)
    return {name: reduce(add, (tensors[name] for tensors in terms if name in tensors)) for name in names}


def _to(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}


def _absolute(tensors: Tensors) -> Tensors:
    return {name: tensor.abs() for name, tensor in tensors.items()}


def _ratio(numerator: Tensor, denominator: Tensor) -> float:
    return float(numerator) / float(denominator) if float(denominator) else 1.0


def _coarsened(tensors: Tensors, masters: Tensors) -> Tensors:
    """Return the tensors, on the CPU, that a cast to the dtypes of the masters rounds."""
    return {
        name: tensor.cpu()
        for name, tensor in tensors.items()
        if torch.finfo(masters[name].dtype).eps > torch.finfo(tensor.dtype).eps
    }


def _cast_like(tensors: Tensors, masters: Tensors) -> Tensors:
    return {name: tensor.to(masters[name].dtype) for name, tensor in tensors.items()}
