"""EP: experts compute each chosen token once, wherever they are, and train on the tokens of all ranks."""

import math
from collections.abc import Iterator
from operator import mul

import torch

from conformance.assertions import compare
from conformance.assertions.dropout import recorded_masks
from conformance.assertions.fixtures import Measure, Run
from conformance.bound import bound
from conformance.experiments.experts import Routing, exchange_rows, routing
from conformance.instruments.facts import RankFacts
from conformance.judge.law import law
from conformance.oracles import tolerance
from conformance.oracles.dtype_policy import dtype_policy
from conformance.oracles.expert_exchange import exchange_events
from conformance.oracles.reference import Tensors, reference_run
from conformance.oracles.virtual_ep import is_of_experts
from conformance.plan.cells import Cell
from conformance.run.record import Record
from reference_trainer.parallel_dims import resolve_mesh

SWITCH_TRANSFORMERS = "https://arxiv.org/abs/2101.03961"
ALL_TO_ALL = "https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.all_to_all_single"
DIVIDE_FACTOR = (
    "https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html"
    "#torch.distributed.fsdp.FSDPModule.set_gradient_divide_factor"
)
_NUMBERS = "int64"
"""Dtype of numbers of rows."""


@law("EP-1", where="model = experts and features <= 2", reference=ALL_TO_ALL)
def test_each_row_gets_the_result_of_its_expert(measure: Measure, cell: Cell) -> None:
    """Each row MUST be computed once, by the expert that was chosen for it, on any rank; its result and its
    gradient MUST come back to its place.

    Wrong if rows are lost, doubled or permuted, if an expert without rows breaks the exchange, or if gradients go
    another way than rows. Rows are whole numbers, and experts multiply by their numbers: every result is exact.
    """
    ranks = measure(exchange_rows, cell)
    for name in ranks[0]:
        outcomes = [each[name] for each in ranks]
        sent = sum(each.rows for each in outcomes)
        arrived = sum(each.arrived for each in outcomes)
        compare.count(arrived, name=f"rows that experts computed, chosen {name}", expected=sent, unit="rows")
        for kind in ("wrong", "wrong_gradients"):
            by_rank = [getattr(each, kind) for each in outcomes]
            unit, detail = f"{kind.replace('_', ' ')} of {sent} rows", f"by rank: {by_rank}"
            compare.count(sum(by_rank), name=f"rows chosen {name}", expected=0, detail=detail, unit=unit)


@law(
    "EP-2",
    where="model = experts and precision = fp32",
    gaps=["resumed"],
    numbers=True,
    reference=DIVIDE_FACTOR,
)
def test_gradients_of_experts_are_means_over_all_tokens(run: Run, cell: Cell) -> None:
    """The gradient of an expert MUST be that of the mean over the tokens of all ranks, as that of any other parameter.

    Wrong if it is divided by the ranks that share the expert alone, or by the tokens that the expert got.
    """
    record, config = run(cell), cell.config
    expected = reference_run(config, dtype=torch.float64, masks=recorded_masks(record)).gradients[0]
    measured, wanted = _gradients_of_experts(record.select("step0/gradient/")), _gradients_of_experts(expected)
    compare.tensors(measured, wanted, name="gradient of experts", within=tolerance.fp32_gradients(config))


def _gradients_of_experts(gradients: Tensors) -> Tensors:
    return {name: gradient for name, gradient in gradients.items() if is_of_experts(name)}


@law("EP-3", where="model = experts and features <= 2", numbers=True, reference=SWITCH_TRANSFORMERS)
def test_experts_are_balanced_over_all_ranks(measure: Measure, cell: Cell) -> None:
    """The balance loss of a micro-batch MUST be that of its tokens on all ranks: the share of each expert in them,
    times the sum of its probabilities.

    Wrong if each rank balances its own tokens, if ranks average losses of different loads, or if loads of micro-batches
    are added up.
    """
    config = cell.config
    experts, weight = config.model.n_experts, config.model.balance_weight
    ranks = measure(routing, cell)[:: config.mesh.tp]  # tensor-parallel ranks have the same tokens, see EP-5
    losses = [sum(routed.balance_loss for routed in block) for block in zip(*ranks, strict=True)]
    expected = [experts * weight * _imbalance(block) for block in zip(*ranks, strict=True)]
    # Each loss is a sum of numbers of one sign: over the tokens of a rank, and over experts. Rounding of the
    # probabilities does not count, whose own sums are expected.
    tokens = config.data.global_batch_size * config.data.seq_len // config.accumulation
    within = bound("u * (tokens + experts + 4)", u=tolerance.FP32_ROUNDOFF, tokens=tokens, experts=experts)
    compare.scalars(losses, expected, name="balance loss", within=within, each="block")


def _imbalance(ranks: tuple[Routing, ...]) -> float:
    """Sum over experts of their share in all choices times their probability, summed over all tokens."""
    loads = [sum(by_rank) for by_rank in zip(*[routed.load for routed in ranks], strict=True)]
    probabilities = [sum(by_rank) for by_rank in zip(*[routed.probability for routed in ranks], strict=True)]
    return math.fsum(map(mul, loads, probabilities)) / float(sum(loads))


@law("EP-4", where="ep > 1", reference=ALL_TO_ALL)
def test_all_to_alls_follow_the_routing(run: Run, cell: Cell) -> None:
    """Each rank MUST send every row that was chosen for an expert once on its way there, and every row that has arrived
    once on its way back, in forward, in backward, and where forward is recomputed; sizes are known from one exchange of
    numbers of rows.

    Wrong if rows are padded to a capacity, sent to every rank, or sent in another dtype than that of computation. Rows
    of each rank follow from the recorded choices of all routers.
    """
    record = run(cell)
    for step in record.steps:
        for phase, exchanges, numbers in _exchanges(cell):
            rows = _rows_of_ranks(record, step, phase)
            for facts in record.ranks:
                sent, counts = (_sent(record, facts, step, phase, numbers=each) for each in (False, True))
                where = f"step {step}, {phase}, rank {facts.rank}"
                elements = exchanges * rows[facts.rank] * record.config.model.dim
                compare.count(sent, name=f"exchanged elements, {where}", expected=elements, unit="elements")
                compare.count(counts, name=f"exchanged numbers, {where}", expected=numbers, unit="numbers")


def _rows_of_ranks(record: Record, step: int, phase: str) -> list[int]:
    """Return the rows that each rank sends in all blocks and micro-batches, if they go to their experts and back once.

    They are those of its own tokens, and those that ranks of its group have sent to the experts that it holds.
    """
    folder = "evaluated_experts" if phase == "evaluate" else "experts"
    tp, ep = record.config.mesh.tp, record.config.mesh.ep
    held = record.config.model.n_experts // ep
    chosen = [record.shards_below(f"step{step}/{folder}/", rank=facts.rank) for facts in record.ranks]
    holders = [torch.cat([experts.flatten() for experts in own.values()]) // held for own in chosen]
    places = [rank // tp % ep for rank in range(len(holders))]
    arrived = [
        sum(int((holder == place).sum()) for holder in holders[rank - place * tp :: tp][:ep])
        for rank, place in enumerate(places)
    ]
    return [len(holder) + received for holder, received in zip(holders, arrived, strict=True)]


def _exchanges(cell: Cell) -> Iterator[tuple[str, int, int]]:
    """Yield each phase, the times that its rows go to experts and back, and the numbers of rows that a rank sends."""
    model, dims = cell.config.model, resolve_mesh(cell.config.mesh, world_size=cell.world_size)
    events = exchange_events(cell.config, dims)
    for phase in dict.fromkeys(event.phase for event in events):
        issued = [event for event in events if event.phase == phase]
        numbers = [event.numel for event in issued if event.dtype == _NUMBERS]
        micro_batches = cell.config.accumulation - (phase == "evaluate")
        yield phase, (len(issued) - len(numbers)) // (2 * model.n_layers * micro_batches), sum(numbers)


def _sent(record: Record, facts: RankFacts, step: int, phase: str, *, numbers: bool) -> int:
    dtype = _NUMBERS if numbers else dtype_policy(record.cell.precision).compute
    return sum(
        each.numel
        for each in facts.collectives
        if (each.step, each.phase, each.kind, each.dtype) == (step, phase, "all_to_all", dtype)
    )


@law("EP-5", where="model = experts and features <= 2", numbers=True, reference=SWITCH_TRANSFORMERS)
def test_routers_choose_in_fp32(measure: Measure, cell: Cell) -> None:
    """Probabilities of experts MUST be those of fp32 arithmetic on the router's input and weight, in every precision,
    and the most probable experts MUST be chosen, up to rounding; tensor-parallel ranks, each of which has a part of
    every expert, MUST choose the same ones for a token, with the same probabilities.

    Wrong if logits or probabilities are rounded to 16 bits: experts whose logits are close then change places.
    """
    model, tp = cell.config.model, cell.config.mesh.tp
    ranks = measure(routing, cell)
    for rank, routings in enumerate(ranks):
        pairs = zip(routings, ranks[rank - rank % tp], strict=True)
        differing = sum((own.load, own.probability) != (first.load, first.probability) for own, first in pairs)
        detail = f"rank {rank} and the first of its tensor-parallel ranks"
        compare.count(differing, name="routings that differ", expected=0, detail=detail, unit="routings")
        for index, routed in enumerate(routings):
            # A logit errs by at most dim u times the sum of its terms' sizes, S (Higham, "Accuracy and Stability of
            # Numerical Algorithms", 2nd edition, section 3.1). The logarithm of a probability is the difference of two
            # numbers that err as much; its exponential, sum and quotient add one rounding for each expert, and four.
            within = bound(
                "u * (2 * (dim + 1) * S + experts + 4)",
                u=tolerance.FP32_ROUNDOFF,
                dim=model.dim,
                S=routed.logit_size,
                experts=model.n_experts,
            )
            at = f"rank {rank}, block {index % model.n_layers}, micro-batch {index // model.n_layers}"
            _require_at_most(within.value, routed.deviation, name="error of log-probabilities", at=at)
            advantage = max(0.0, routed.overlooked)
            _require_at_most(2.0 * within.value, advantage, name="advantage of experts that were not chosen", at=at)


def _require_at_most(most: float, measured: float, *, name: str, at: str) -> None:
    __tracebackhide__ = True
    compare.between(measured, 0.0, most, name=name, detail=at, unit="one", kind="rounding")
