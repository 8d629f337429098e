"""Proofs that allocator, mesh, numerics, optimizer and prefetching take effect, and facts in which records differ."""

from collections import Counter

import torch

from conformance.oracles.dtype_policy import FP32, dtype_policy
from conformance.oracles.torch_versions import traits_of
from conformance.outcomes import ConformanceFailure
from conformance.plan.cells import ALLOCATOR_VARIABLES
from conformance.plan.mesh import Mesh
from conformance.run.record import Record
from reference_trainer.precision import PRECISIONS


def expandable_segments_take_effect(record: Record, neighbour: Record) -> None:
    """Raise ConformanceFailure unless the ranks had the variables in time, and the allocator obeyed them.

    Ranks must have the variables before they touch the device. A snapshot of the allocator says of each segment whether
    it is expandable. Without the variables no segment is expandable, unless the session's own environment sets them:
    the neighbour must have had other values.
    """
    wanted = record.cell.environment
    for facts, others in zip(record.ranks, neighbour.ranks, strict=False):
        for name in ALLOCATOR_VARIABLES:
            value, usual = facts.variables[name], others.variables[name]
            expect(value == wanted[name], f"{record.cell.id}: {name} is {value} before the device is used")
            expect(value != usual, f"{neighbour.cell.id}: {name} is {usual} too")
    expandable = {facts.expandable_segments for facts in record.ranks}
    expected = record.cell.expandable_segments == "1"
    expect(expandable == {expected}, f"{record.cell.id}: expandable segments: {expandable}, not {expected}")


def mesh_takes_effect(record: Record, neighbour: Record) -> None:
    """Raise ConformanceFailure unless ranks have the mesh's coordinates, and communicate over its dimensions only."""
    mesh = Mesh.parse(record.cell.mesh)
    sizes = {"pp": mesh.pp, "dp_replicate": mesh.dp_replicate, "dp_shard": mesh.dp_shard, "tp": mesh.tp}
    for name, size in sizes.items():
        seen = {facts.mesh_coordinate.get(name, 0) for facts in record.ranks}
        expect(seen == set(range(size)), f"coordinates {sorted(seen)} in mesh dimension {name} of size {size}")
    pairs = {(facts.rank, transfer.peer) for facts in record.ranks for transfer in facts.transfers}
    expect(bool(pairs) == (mesh.pp > 1), f"{len(pairs)} pairs of ranks exchange tensors")
    wide = {name for name, size in sizes.items() if size > 1 and name != "pp"}
    alone = {"dp_shard"} if traits_of(record.header.torch).one_rank_reduces else set()
    wide |= {f"dp_shard/{ranks}" for ranks in (mesh.ep, mesh.dp_shard // mesh.ep) if 1 < ranks < mesh.dp_shard}
    for run, expected in ((record, wide | alone), (neighbour, alone)):
        groups = {e.group for facts in run.ranks for e in facts.collectives if e.phase in ("forward", "backward")}
        expect(groups == expected, f"forward and backward communicate over {sorted(groups)}, not {sorted(expected)}")
    for run, expected_shards in ((record, mesh.dp_shard * mesh.tp), (neighbour, 1)):
        shards = _most_shards(run)
        expect(shards == expected_shards, f"parameters have at most {shards} different shards, not {expected_shards}")


def _most_shards(record: Record) -> int:
    """Return the largest number of different shards of a parameter that ranks hold."""
    shards = {(name, layout) for facts in record.ranks for name, layout in facts.layouts.items()}
    return max(Counter(name for name, _ in shards).values())


_PASSES = ("data", "forward", "backward")
"""Phases in which FSDP communicates; in `data` a rank with several stages of a pipeline gathers ahead."""


def precision_takes_effect(record: Record, neighbour: Record) -> None:
    """Raise ConformanceFailure unless weights, products and reductions of both have the dtypes of their precisions."""
    for run in (record, neighbour):
        policy = dtype_policy(run.cell.precision)
        in_bf16 = run.cell.precision == "bf16-init"
        in_fp32 = run.cell.model == "experts" or run.cell.float8 != "none"  # routers, and products that emulate float8
        mixed = ["uint8"] if run.cell.float8 == "tensorwise" else []
        several, traits = Mesh.parse(run.cell.mesh).dp_shard > 1, traits_of(run.header.torch)
        expected = {
            "matrix products": {policy.compute, *([FP32] if in_fp32 else [])},
            "all-gathers": {policy.compute, *mixed} if several or traits.one_rank_gathers else set(),
            "reduce-scatters": {policy.reduce} if several or traits.one_rank_reduces else set(),
            "norms": {policy.sharded_norms},
            "other parameters": {policy.sharded},
            "fp32 weights begin as bf16 numbers": {str(in_bf16)},
            "the loss is scaled": {str(PRECISIONS[run.cell.precision].scales_loss)},
        }
        measured = _dtypes(run)
        wrong = {what: sorted(dtypes) for what, dtypes in measured.items() if dtypes != expected[what]}
        expect(not wrong, f"{run.cell.id}: {wrong}, expected { ({what: sorted(expected[what]) for what in wrong}) }")


def _dtypes(record: Record) -> dict[str, set[str]]:
    facts = record.ranks[0]
    initial = {key.partition("/")[2]: set(names) for key, names in facts.dtypes.items() if key.startswith("initial_p")}
    weights = [weight for weight in record.select("initial/parameter/").values() if weight.dtype == torch.float32]
    sent = {
        kind: {e.dtype for e in facts.collectives if (e.kind, e.group) == (kind, "dp_shard") and e.phase in _PASSES}
        for kind in ("all_gather", "reduce_scatter")
    }
    return {
        "matrix products": {dtype for each in record.ranks for dtype in each.dtypes.get("matmul/forward", ())},
        "all-gathers": sent["all_gather"],
        "reduce-scatters": sent["reduce_scatter"],
        "norms": set().union(*(dtypes for name, dtypes in initial.items() if "norm" in name)),
        "other parameters": set().union(*(dtypes for name, dtypes in initial.items() if "norm" not in name)),
        "fp32 weights begin as bf16 numbers": {str(all(bool((w.bfloat16() == w).all()) for w in weights))},
        "the loss is scaled": {str(step.loss_scale != 1.0) for step in facts.steps},
    }


def loss_scale_takes_effect(record: Record, neighbour: Record) -> None:
    """Raise ConformanceFailure unless steps are skipped that the neighbour takes.

    The neighbour may skip steps of a larger scale: in long runs it grows until gradients overflow.
    """
    skipped, usual = ([step.loss_scale for step in run.ranks[0].steps if step.skipped] for run in (record, neighbour))
    fits = neighbour.config.loss_scale.initial
    expect(bool(skipped), "no step is skipped")
    expect(all(scale > fits for scale in usual), f"steps with scales {usual} are skipped, although {fits} fits")


def tf32_takes_effect(record: Record, neighbour: Record) -> None:
    """Raise ConformanceFailure unless gradients from the same weights differ from those of the neighbour."""
    expect(same(record, neighbour, "initial/parameter/"), "initial weights differ")
    expect(not same(record, neighbour, "step0/gradient/"), "gradients are the same in every bit with TF32 and without")


def float8_takes_effect(record: Record, neighbour: Record) -> None:
    """Raise ConformanceFailure unless gradients differ from those of the neighbour, and fewer bytes are gathered.

    With a scale for each row, as many are gathered.
    """
    expect(same(record, neighbour, "initial/parameter/"), "initial weights differ")
    expect(
        not same(record, neighbour, "step0/gradient/"), "gradients are the same in every bit with float8 and without"
    )
    gathered, usual = (
        sum(e.nbytes for e in run.ranks[0].collectives if e.kind == "all_gather" and e.phase in _PASSES)
        for run in (record, neighbour)
    )
    fewer = record.cell.float8 == "tensorwise" and usual > 0
    expect((gathered < usual) == fewer, f"{gathered} bytes are gathered, {usual} without float8")


_STATE = {
    "adamw": {"exp_avg", "exp_avg_sq"},
    "adamw-foreach": {"exp_avg", "exp_avg_sq"},
    "adamw-fused": {"exp_avg", "exp_avg_sq"},
    "sgd": set[str](),
    "sgd-momentum": {"momentum_buffer"},
}
"""Keys of the state of a parameter's size, by optimizer."""
_UPDATES = {"aten::addcdiv_": "for-loop", "aten::_foreach_addcdiv_": "foreach", "aten::_fused_adamw_": "fused"}
"""Implementation of AdamW by the operator that changes the parameters; see torch/optim/adam.py."""


def optimizer_takes_effect(record: Record, neighbour: Record) -> None:
    """Compare the optimizer's state, and the operators of its steps. Raises ConformanceFailure, see `proofs.Proof`."""
    for run in (record, neighbour):
        state, expected = _state(run), _STATE[run.cell.optimizer]
        expect(state == expected, f"{run.cell.id}: state is {sorted(state)}, not {sorted(expected)}")
    used, usual = _implementations(record), _implementations(neighbour)
    wanted = {"adamw-foreach": {"foreach"}, "adamw-fused": {"fused"}}.get(record.cell.optimizer, set())
    expect(used == wanted, f"AdamW steps with {sorted(used)}, not {sorted(wanted)}")
    chosen = {"foreach"} if record.device_type != "cpu" and record.cell.offload == "none" else {"for-loop"}
    expect(usual == chosen, f"AdamW by default steps with {sorted(usual)}, not {sorted(chosen)}")


def _state(record: Record) -> set[str]:
    keys = (key.split("/") for facts in record.ranks for key in facts.fingerprints)
    return {kind for when, kind, _ in keys if when == "final"} - {"parameter", "buffer"}


def _implementations(record: Record) -> set[str]:
    return {_UPDATES[name] for name in operators(record, "optimizer") if name in _UPDATES}


def forward_prefetch_takes_effect(record: Record, neighbour: Record) -> None:
    """Raise ConformanceFailure unless as many groups are prefetched as the axis says, and none in the neighbour."""
    for run in (record, neighbour):
        gathers, expected = _most_gathered_at_once(run), 1 + run.cell.forward_prefetch
        expect(gathers == expected, f"{run.cell.id}: a group all-gathers {gathers} groups with its own, not {expected}")


def backward_prefetch_takes_effect(record: Record, neighbour: Record) -> None:
    """Raise ConformanceFailure unless FSDP has a list of as many groups as the axis says, and prefetches them.

    In the neighbour FSDP must have no list.
    """
    for run in (record, neighbour):
        told = max((len(groups) for facts in run.ranks for groups in facts.backward_prefetch.values()), default=0)
        expect(told == run.cell.backward_prefetch, f"{run.cell.id}: FSDP is told to prefetch {told} groups")
    gathers, usual = (_gathered_before_reducing(run) for run in (record, neighbour))
    more = record.cell.backward_prefetch - 1
    expect(gathers - usual == more, f"{gathers} all-gathers before the first reduction, {usual} by default")


def _most_gathered_at_once(record: Record) -> int:
    """Return the largest number of all-gathers of FSDP that a rank issued in forward on entering a module."""
    gathers = (
        (facts.rank, e.step, e.during)
        for facts in record.ranks
        for e in facts.collectives
        if (e.phase, e.kind, e.group) == ("forward", "all_gather", "dp_shard")
    )
    return max(Counter(gathers).values())


def _gathered_before_reducing(record: Record) -> int:
    """Return the number of all-gathers that rank 0 issued in the first backward before its first reduce-scatter."""
    kinds = [e.kind for e in record.ranks[0].collectives if (e.phase, e.group) == ("backward", "dp_shard")]
    return kinds.index("reduce_scatter")


def expect(holds: bool, effect: str) -> None:
    """Raise ConformanceFailure with a description of the observed effect, unless the effect is the expected one."""
    __tracebackhide__ = True
    if not holds:
        raise ConformanceFailure(effect)


def operators(record: Record, phase: str) -> Counter[str]:
    """Return the number of calls of each operator in a phase, on all ranks together, by name."""
    return sum((Counter(facts.operators[phase]) for facts in record.ranks), Counter())


def layer_count(record: Record) -> int:
    """Return the number of transformer blocks."""
    return len({name.split(".")[1] for name in record.ranks[0].parameters if name.startswith("layers.")})


def collectives(record: Record, phase: str, kind: str, group: str) -> int:
    """Return the number of collectives of one kind in a phase over a group, on all ranks together."""
    issued = ((e.phase, e.kind, e.group) for facts in record.ranks for e in facts.collectives)
    return sum(event == (phase, kind, group) for event in issued)


def held(record: Record, prefix: str) -> set[tuple[str, str]]:
    """Return key and fingerprint of all tensors of ranks whose key begins with the prefix."""
    pairs = (pair for facts in record.ranks for pair in facts.fingerprints.items())
    return {(key, fingerprint) for key, fingerprint in pairs if key.startswith(prefix)}


def same(record: Record, neighbour: Record, prefix: str) -> bool:
    """Return whether ranks of both runs hold the same bits in all tensors whose key begins with the prefix."""
    return held(record, prefix) == held(neighbour, prefix)


def batches(record: Record) -> set[str]:
    """Return the digests of the inputs of all ranks and steps."""
    return {batch["inputs"] for facts in record.ranks for batch in facts.batches}
