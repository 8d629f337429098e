"""MP: dtypes are what was asked for, read where they are used."""

from collections.abc import Iterable, Mapping

from conformance.instruments.capture import fingerprint
from conformance.instruments.collectives import Collective
from conformance.judge.law import Run, law
from conformance.laws import compare
from conformance.laws.steps import compare_updates
from conformance.oracles.dtype_policy import FP32, expected_dtypes
from conformance.oracles.reference import initial_model
from conformance.oracles.schedule import Event
from conformance.oracles.traffic import step_events
from conformance.plan.cells import Cell
from conformance.plan.workload import trainer_config
from reference_trainer.parallel_dims import resolve_mesh

MIXED_PRECISION = (
    "https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html#torch.distributed.fsdp.MixedPrecisionPolicy"
)
BUFFERS = "https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html#torch.nn.Module.register_buffer"

_BUFFERS = ("rope_table/", "initial_buffer/", "final_buffer/")
_MASTERS = ("initial_parameter/", "final_parameter/", "gradient/", "optimizer_state/")
"""What the optimizer works on and keeps."""


@law("MP-1", reference=MIXED_PRECISION)
def test_dtypes_are_those_of_the_policy(run: Run, cell: Cell) -> None:
    """Every parameter, gradient, optimizer state, buffer, module and operator MUST have the dtype that the precision
    gives it, and so must every collective on the wire.

    Wrong if bf16 did not run somewhere, if the reduce dtype was dropped, or if a cast reaches a buffer or the masters.
    """
    config = trainer_config(cell)
    dims = resolve_mesh(config.mesh, world_size=cell.world_size)
    expected = expected_dtypes(config)
    for facts in run(cell).ranks:
        _compare(facts.dtypes, expected, name="dtypes", rank=facts.rank)
        sent = step_events(config, dims, tp_rank=facts.mesh_coordinate.get("tp", 0))
        seen = (collective for collective in facts.collectives if collective.phase != "build")  # as MP-4, only steps
        _compare(_wire_dtypes(seen), _wire_dtypes(sent), name="dtypes on the wire", rank=facts.rank)


@law("MP-3", reference=BUFFERS)
def test_rope_tables_and_buffers_keep_every_bit(run: Run, cell: Cell) -> None:
    """RoPE tables and other fp32 buffers MUST stay fp32 and keep every bit, in each attention, when it is recomputed,
    and after training.

    Wrong if FSDP casts what blocks are given, a cast of the model reaches its buffers, or recomputation sees another
    table than forward did. A table that was rounded and raised to fp32 again has other bits.
    """
    config, record = trainer_config(cell), run(cell)
    buffers = dict(initial_model(config).named_buffers())
    expected = _only(_BUFFERS, expected_dtypes(config))
    table = fingerprint(buffers["rope_table"])
    tables = {thing.removeprefix("rope_table/"): [table] for thing in expected if thing.startswith("rope_table/")}
    for facts, shards in zip(record.ranks, record.shards, strict=True):
        _compare(_only(_BUFFERS, facts.dtypes), expected, name="dtypes of buffers", rank=facts.rank)
        _compare(facts.rope_tables, tables, name="bits of the RoPE table", rank=facts.rank)
        final = {key.removeprefix("final/buffer/"): t for key, t in shards.items() if key.startswith("final/buffer/")}
        compare.bits(final, buffers, name=f"buffers of rank {facts.rank} after training")


@law("MP-5", reference=MIXED_PRECISION)
def test_masters_are_fp32(run: Run, cell: Cell) -> None:
    """Master weights, gradients as the optimizer sees them and optimizer state MUST be fp32, and lose no update.

    Wrong if the model was bf16 when it was sharded: updates below half a unit in the last place of bf16 then vanish.
    Dtypes alone could be those of copies: therefore the recorded gradients are applied again in fp64. If masters or
    moments are rounded to bf16 in any step, the parameters that come out are further away than fp32 explains.
    """
    config, record = trainer_config(cell), run(cell)
    expected = {thing: [FP32] for thing in _only(_MASTERS, expected_dtypes(config))}
    for facts in record.ranks:
        _compare(_only(_MASTERS, facts.dtypes), expected, name="dtypes of masters", rank=facts.rank)
    compare_updates(record)


def _compare(measured: Mapping[str, list[str]], expected: Mapping[str, list[str]], *, name: str, rank: int) -> None:
    """Everything that is expected was seen, nothing else, and each with what is expected of it."""
    __tracebackhide__ = True
    wrong = [
        f"{thing}: measured {_listed(measured, thing)}, expected {_listed(expected, thing)}"
        for thing in dict.fromkeys([*expected, *measured])
        if measured.get(thing) != expected.get(thing)
    ]
    detail = f"rank {rank}: {'; '.join(wrong[:4])}"
    compare.count(len(wrong), name=f"wrong {name}", expected=0, detail=detail, unit=f"of {len(expected)}")


def _listed(found: Mapping[str, list[str]], thing: str) -> str:
    return " and ".join(found.get(thing, [])) or "nothing"


def _only(kinds: tuple[str, ...], found: Mapping[str, list[str]]) -> dict[str, list[str]]:
    return {thing: values for thing, values in found.items() if thing.startswith(kinds)}


def _wire_dtypes(collectives: Iterable[Event | Collective]) -> dict[str, list[str]]:
    """Dtypes by what is sent; sizes tell apart what else is alike, as a loss parallel's sums and activations are."""
    seen: dict[str, set[str]] = {}
    for sent in collectives:
        seen.setdefault(f"{sent.phase}: {sent.kind} of {sent.numel} over {sent.group}", set()).add(sent.dtype)
    return {thing: sorted(dtypes) for thing, dtypes in seen.items()}
