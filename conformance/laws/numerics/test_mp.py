"""MP: dtypes are those of the precision, read where tensors are used, and so are the bytes on the wire."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain

from torch import Tensor

from conformance.assertions import compare
from conformance.assertions.attention import Attention, attention_of
from conformance.assertions.fixtures import Measure, Run
from conformance.assertions.steps import compare_steps, compare_updates, require_known_sum_order
from conformance.experiments.fsdp_policies import cast_inputs_and_outputs
from conformance.instruments.capture import fingerprint
from conformance.instruments.facts import Collective, RankFacts
from conformance.judge.law import law
from conformance.oracles.dtype_policy import FP32, expected_dtypes
from conformance.oracles.frozen import at_step
from conformance.oracles.initialisation import initial_weights
from conformance.oracles.pipeline import held_by, held_dtypes
from conformance.oracles.reference import initial_model
from conformance.oracles.schedule import Event
from conformance.oracles.traffic import Traffic, TrafficByKey, add_up, step_events
from conformance.oracles.virtual_cp import positions
from conformance.outcomes import ConformanceFailure
from conformance.plan.cells import Cell
from conformance.run.record import Record
from reference_trainer.config import TrainerConfig
from reference_trainer.parallel_dims import ParallelDims, resolve_mesh

FULLY_SHARD = "https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html"
MIXED_PRECISION = f"{FULLY_SHARD}#torch.distributed.fsdp.MixedPrecisionPolicy"
BUFFERS = "https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html#torch.nn.Module.register_buffer"
TENSOR_PARALLEL = "https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html"

_BUFFERS = ("rope_table/", "initial_buffer/", "final_buffer/")
_MASTERS = ("initial_parameter/", "final_parameter/", "gradient/", "optimizer_state/")
"""Kinds of tensors that the optimizer reads and updates."""
_OPERATORS = tuple(f"{kind}/{phase}" for kind in ("matmul", "attention") for phase in ("forward", "backward"))


@law(
    "MP-1",
    where="implementation = fsdp2",
    gaps=["integer-model", "large-models"],
    reference=MIXED_PRECISION,
)
def test_dtypes_are_those_of_the_mixed_precision_policy(run: Run, cell: Cell) -> None:
    """Every parameter, gradient, optimizer state, buffer, module, operator and collective on the wire MUST have the
    dtype of the precision.

    Wrong if bf16 did not run somewhere, if the reduce dtype was dropped, or if a cast reaches a buffer or the masters.
    """
    config, record = cell.config, run(cell)
    dims = resolve_mesh(config.mesh, world_size=cell.world_size)
    expected = _with_operators_of(attention_of(record), expected_dtypes(config, steps=record.steps))
    for facts in record.ranks:
        own = held_dtypes(facts.mesh_coordinate.get("pp", 0), expected, config)
        _compare(facts.dtypes, _seen(own, facts, record), name="dtypes", rank=facts.rank)
        at = facts.mesh_coordinate
        tp_rank, pp_rank = at.get("tp", 0), at.get("pp", 0)
        per_step = (step_events(at_step(config, step), dims, tp_rank=tp_rank, pp_rank=pp_rank) for step in record.steps)
        sent = _wire_dtypes(chain.from_iterable(per_step))
        # Steps only, like MP-4.
        seen = _wire_dtypes(each for each in facts.collectives if each.phase != "build" and not _is_routed(each, dims))
        if dims.pp > 1:  # a stage has a part of them; PP-1, PP-3 and PP-4 judge those of FSDP and of transfers, too
            sent, seen = ({key: by[key] for key in by if key in sent and key in seen} for by in (sent, seen))
        _compare(seen, sent, name="dtypes on the wire", rank=facts.rank)


def _is_routed(collective: Collective, dims: ParallelDims) -> bool:
    """Return whether the size of a collective follows the routing of experts: EP-4 judges it."""
    return collective.kind == "all_to_all" and dims.ep > 1


def _with_operators_of(attention: Attention, expected: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return the expected dtypes where attention may be products and a softmax in another dtype.

    Up to torch 2.15 they are in fp32, unless a knob says otherwise (`allow_fp16_bf16_reduction_math_sdp`).
    """
    others = {thing: dtypes for thing, dtypes in expected.items() if not thing.startswith("attention/")}
    return others | {thing: sorted({*dtypes, *others.get(thing, ())}) for thing, dtypes in attention.dtypes.items()}


def _seen(expected: dict[str, list[str]], facts: RankFacts, record: Record) -> dict[str, list[str]]:
    """Return the expected dtypes without the kinds of operators that inductor has fused into its kernels."""
    if record.config.compile != "inductor":
        return expected
    return {thing: dtypes for thing, dtypes in expected.items() if thing in facts.dtypes or thing not in _OPERATORS}


@law(
    "MP-2",
    where="precision in (bf16-mp, bf16-init) and implementation = fsdp2",
    gaps=["rerun-cost-combined", "resumed", "large-models"],
    numbers=True,
    reference=FULLY_SHARD,
)
def test_mixed_precision_builds_differ_in_starting_weights_alone(run: Run, measure: Measure, cell: Cell) -> None:
    """A model built in fp32, or in bf16 and cast to fp32 after `fully_shard`, sampled or loaded, MUST start from the
    weights rounded to the dtype in which it is built, train in the dtypes of its precision, and compute each step from
    those weights.

    Wrong if the cast leaves bf16 behind, the optimizer holds the tensors from before it, a load skips or rounds a
    tensor, or all-gathers still return the weights from before the cast.
    """
    require_known_sum_order(measure, cell)
    record, plain = run(cell), run(cell.but(precision="bf16-mp", init="meta"))
    compare.bits(record.select("initial/parameter/"), initial_weights(cell.config), name="starting weights")
    for facts, expected in zip(record.ranks, plain.ranks, strict=True):
        if facts.dtypes != expected.dtypes:
            differing = sorted(key for key in expected.dtypes if facts.dtypes.get(key) != expected.dtypes[key])
            raise ConformanceFailure(f"rank {facts.rank}: other dtypes than built in fp32: {differing[:5]}")
    compare_steps(record)
    compare_updates(record)


@law("MP-3", where="implementation = fsdp2", gaps=["integer-model", "large-models"], reference=BUFFERS)
def test_rope_tables_and_buffers_keep_every_bit(run: Run, cell: Cell) -> None:
    """RoPE tables and other fp32 buffers MUST stay fp32 and keep every bit, in each attention, when it is recomputed,
    and after training.

    Wrong if FSDP casts inputs of blocks, a cast of the model reaches its buffers, or recomputation sees another table
    than forward did. A table that was rounded and raised to fp32 again has other bits.
    """
    config, record = cell.config, run(cell)
    buffers = dict(initial_model(config).named_buffers())
    expected = _only(_BUFFERS, expected_dtypes(config, steps=record.steps))
    attentions = [thing.removeprefix("rope_table/") for thing in expected if thing.startswith("rope_table/")]
    for facts, shards in zip(record.ranks, record.shards, strict=True):
        own = _held(expected, facts, config)
        table = fingerprint(_own_positions(buffers["rope_table"], facts, config))
        tables = {attention: [table] for attention in attentions}
        _compare(_only(_BUFFERS, facts.dtypes), own, name="dtypes of buffers", rank=facts.rank)
        _compare(facts.rope_tables, _held(tables, facts, config), name="bits of the RoPE table", rank=facts.rank)
        final = {key.removeprefix("final/buffer/"): t for key, t in shards.items() if key.startswith("final/buffer/")}
        compare.bits(final, buffers, name=f"buffers of rank {facts.rank} after training")


def _own_positions(table: Tensor, facts: RankFacts, config: TrainerConfig) -> Tensor:
    """Return the part of a RoPE table that a rank needs: all of it, unless ranks share sequences."""
    cp = config.mesh.cp
    if cp == 1:
        return table
    return table[:, positions(config.data.seq_len, cp=cp, rank=facts.mesh_coordinate["dp_shard"] % cp)]


@law("MP-4", where="implementation = fsdp2", gaps=["large-models"], reference=TENSOR_PARALLEL)
def test_collective_bytes_equal_the_traffic_model(run: Run, cell: Cell) -> None:
    """Number and bytes of the collectives of each phase, group, kind and dtype MUST be those that the algorithms need.

    In every step on every rank. A collective too many costs bandwidth; one too few is most often a sum left out.
    """
    config = cell.config
    dims = resolve_mesh(config.mesh, world_size=cell.world_size)
    measured_bytes = expected_bytes = 0
    misfits: list[str] = []
    record = run(cell)
    for facts in record.ranks:
        at = facts.mesh_coordinate
        for step in record.steps:
            events = step_events(at_step(config, step), dims, tp_rank=at.get("tp", 0), pp_rank=at.get("pp", 0))
            expected = add_up(events)
            in_step = (event for event in facts.collectives if event.step == step and not _is_routed(event, dims))
            measured = add_up(event for event in in_step if not _agrees(event, record))
            misfits += (f"rank {facts.rank}, step {step}, {misfit}" for misfit in _misfits(measured, expected))
            measured_bytes += sum(traffic.nbytes for traffic in measured.values())
            expected_bytes += sum(traffic.nbytes for traffic in expected.values())
    detail, unit = "; ".join(misfits[:4]), "bytes that ranks contribute"
    compare.count(measured_bytes, name="traffic", expected=expected_bytes, detail=detail, unit=unit)
    compare.count(len(misfits), name="traffic that differs", expected=0, detail=detail, unit="entries of the model")


def _agrees(event: Collective, record: Record) -> bool:
    """Return whether stages agree on the shapes that they transfer, as they do before their first step from 2.15 on."""
    agreement = (record.steps[0], "data", "pp", "all_reduce", "int32")
    return (event.step, event.phase, event.group, event.kind, event.dtype) == agreement


def _misfits(measured: TrafficByKey, expected: TrafficByKey) -> Iterator[str]:
    for key in sorted(measured.keys() | expected.keys()):
        sent, wanted = measured.get(key, Traffic()), expected.get(key, Traffic())
        if sent != wanted:
            phase, group, kind, dtype = key
            yield (
                f"{phase}: {kind} over {group} in {dtype}: measured {sent.nbytes} bytes in {sent.count} collectives, "
                f"expected {wanted.nbytes} bytes in {wanted.count}"
            )


@law(
    "MP-5",
    where="precision != bf16-mixed and implementation = fsdp2",
    gaps=["resumed", "integer-model", "large-models"],
    numbers=True,
    reference=MIXED_PRECISION,
)
def test_master_weights_are_fp32(run: Run, cell: Cell) -> None:
    """Master weights, gradients as the optimizer sees them and optimizer state MUST be fp32, and lose no update.

    Wrong if the model was bf16 when it was sharded: updates below half a unit in the last place of bf16 then vanish.
    Dtypes alone could be those of copies: therefore the recorded gradients are applied again in fp64. If masters or
    moments are rounded to bf16 in any step, the parameters that come out are further away than fp32 explains.
    """
    config, record = cell.config, run(cell)
    expected = {thing: [FP32] for thing in _only(_MASTERS, expected_dtypes(config, steps=record.steps))}
    for facts in record.ranks:
        own = _held(expected, facts, config)
        _compare(_only(_MASTERS, facts.dtypes), own, name="dtypes of masters", rank=facts.rank)
    compare_updates(record)


@law(
    "MP-6",
    where="(features = 0 or features = 1 and precision = fp16-mp) and tp = 1",
    reference=FULLY_SHARD,
    since="2.9",
)
def test_mixed_precision_policy_casts_inputs_and_outputs(measure: Measure, cell: Cell) -> None:
    """Floating-point inputs of a module MUST be cast to `param_dtype` with `cast_forward_inputs`, at any depth inside
    of its arguments, and outputs to `output_dtype` if that is set; integers, and without these options all tensors,
    MUST keep their dtypes, and gradients have the dtypes of the tensors that they belong to. Casts MUST round to the
    nearest number, ties to even.
    """
    for rank, by_policy in enumerate(measure(cast_inputs_and_outputs, cell)):
        for policy, casts in by_policy.items():
            dtypes = casts.dtypes
            expected = _cast_dtypes(*policy.split("/"), low="float16" if cell.precision == "fp16-mp" else "bfloat16")
            wrong = {what: dtype for what, dtype in dtypes.items() if dtype != expected.pop(what)}
            wrong |= dict.fromkeys(expected, "missing")
            detail = f"rank {rank}, cast_forward_inputs/output_dtype {policy}: {wrong}"
            compare.count(len(wrong), name="wrong dtypes", expected=0, detail=detail, unit=f"of {len(dtypes)}")
            detail = f"rank {rank}, cast_forward_inputs/output_dtype {policy}: {casts.wrong}"
            compare.count(sum(casts.wrong.values()), name="wrong elements", expected=0, detail=detail, unit="elements")


def _cast_dtypes(casts: str, output: str, *, low: str) -> dict[str, str]:
    given = "float32" if casts == "True" else low
    inside = low if casts == "True" else "float32"
    return {
        "argument": low,
        "keyword": inside,
        "inside": inside,
        "integer": "int64",
        "output": low if output == "None" else output,
        "output inside": inside if output == "None" else output,
        "output integer": "int64",
        "gradient of argument": given,
        "gradient of weight": "float32",
    }


def _held(expected: Mapping[str, list[str]], facts: RankFacts, config: TrainerConfig) -> dict[str, list[str]]:
    return held_by(facts.mesh_coordinate.get("pp", 0), expected, config)


def _compare(measured: Mapping[str, list[str]], expected: Mapping[str, list[str]], *, name: str, rank: int) -> None:
    """Require that exactly the expected keys were seen, with the expected values."""
    __tracebackhide__ = True
    wrong = [
        f"{thing}: measured {_listed(measured, thing)}, expected {_listed(expected, thing)}"
        for thing in dict.fromkeys([*expected, *measured])
        if measured.get(thing) != expected.get(thing)
    ]
    detail = f"rank {rank}: {'; '.join(wrong[:4])}"
    compare.count(len(wrong), name=f"wrong {name}", expected=0, detail=detail, unit=f"of {len(expected)}")


def _listed(dtypes: Mapping[str, list[str]], thing: str) -> str:
    return " and ".join(dtypes.get(thing, [])) or "nothing"


def _only(kinds: tuple[str, ...], dtypes: Mapping[str, list[str]]) -> dict[str, list[str]]:
    return {thing: values for thing, values in dtypes.items() if thing.startswith(kinds)}


def _wire_dtypes(collectives: Iterable[Event | Collective]) -> dict[str, list[str]]:
    """Return the dtypes of collectives by phase, kind, size and group; sums of loss parallel differ only in size."""
    seen: dict[str, set[str]] = {}
    for sent in collectives:
        seen.setdefault(f"{sent.phase}: {sent.kind} of {sent.numel} over {sent.group}", set()).add(sent.dtype)
    return {thing: sorted(dtypes) for thing, dtypes in seen.items()}
