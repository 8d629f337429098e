"""Context parallelism: ring attention over shards of the sequence beside attention in one process.

A row is one way to call `torch.distributed.tensor.experimental.context_parallel`: kernel, order of tokens, way of
passing keys and values, dtype, lengths, and what happens before and after. On the CPU the kernels are stand-ins, see
`reference_trainer.device_attention`; all else, from the shards of buffers to the merged gradients, is torch's own code.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.nn import functional

from conformance.covering_arrays.combinations import Rule
from conformance.experiments.context import RankWorld, experiment
from conformance.instruments.ring_attention import ring_options, unsharded
from conformance.run.experiment import Needs
from conformance.sweeps.covering_sweep import CoveringSweep, Draw, Options, forbids
from conformance.sweeps.drawing import draw_of
from conformance.sweeps.interface_sweep import DTYPES
from conformance.sweeps.layouts import distributed
from conformance.sweeps.trials import Ended, Swept, Trials
from reference_trainer.device_attention import KERNELS, attention_by
from reference_trainer.mesh import fsdp_mesh

OPTIONS: Mapping[str, tuple[object, ...]] = {
    "kernel": KERNELS,
    "is_causal": (True, False),
    "load_balance": (True, False),
    "rotate": ("allgather", "alltoall"),
    "dtype": ("fp32", "bf16"),
    "length": ("even", "short", "long", "odd"),
    "batch": (2, 1),
    "heads": ("equal", "grouped"),
    "strides": ("contiguous", "transposed"),
    "scale": (None, 0.25),
    "buffers": ("restored", "kept"),
    "calls": ("one", "two", "another length", "evaluation", "error before"),
    "backward": ("inside", "after"),
    "unshard": ("labels", "positions"),
    "sharded_attention": ("never", "before", "after"),
}
"""Values of each option, the default first. `sharded_attention` is one of DTensors, outside of context parallelism."""
RULES: tuple[Rule, ...] = (
    # Devices repeat the heads of keys and values before the efficient kernel.
    forbids("kernel", "heads", when=lambda kernel, heads: kernel == "efficient" and heads == "grouped"),
)
REFUSALS: tuple[Options, ...] = ({"is_causal": False, "load_balance": True}, {"backward": "after"})
"""Without a causal mask there is no load to balance; and the context need not serve a backward that comes after it."""
_BALANCED = ("even", "short", "long")
"""Lengths that torch balances: each rank has two equal pieces of the sequence."""
SUSPECTS: tuple[Options, ...] = (
    # findings/ring_attention_backward_after_the_context.py
    *({"load_balance": True, "length": length, "backward": "after"} for length in _BALANCED),
    # findings/unsharding_along_the_first_dimension.py
    *({"load_balance": True, "length": length, "unshard": "positions"} for length in _BALANCED),
    *({"load_balance": True, "length": length, "is_causal": False} for length in _BALANCED),
    {"kernel": "efficient", "length": "odd", "backward": "after"},
    {"kernel": "efficient", "load_balance": False, "backward": "after"},
)
"""Options that fail in some version of torch: tried first, since narrowing a row down takes long."""
_HEADS, _HEAD_DIM = 4, 8
_TOKENS = {"even": 4, "short": 2, "long": 6, "odd": 3}
"""Tokens of a rank by the option `length`. A sequence that ranks cannot share equally ends processes, not calls, see
findings/ring_attention_of_unequal_shards.py."""


@experiment(needs=Needs.TRAINING, takes_share=True)
def sweep(rank: RankWorld) -> Swept:
    """Call ring attention with any two values of its options, on four ranks any three.

    The ring is the last dimension of the cell's mesh.
    """
    return sweep_on(fsdp_mesh(rank.mesh), rank.subjects, strength=3 if rank.size > 3 else 2, draw=draw_of(rank))


def sweep_on(mesh: DeviceMesh, subjects: Collection[str] = (), *, strength: int, draw: Draw | None = None) -> Swept:
    """Return the outcome of all rows, of those that subjects name, or of those that are drawn."""
    trials = Trials(mesh)

    def ended(row: Options) -> Ended:
        trials.renew()  # DTensor keeps decisions for shapes on a mesh: those of an earlier row must not decide another
        return trials.ended(partial(differences, row))

    rows = CoveringSweep(
        *(OPTIONS, ended),
        strength=strength,
        rules=RULES,
        suspects=SUSPECTS,
        refusals=REFUSALS,
        label="attention",
        draw=draw,
    )
    return rows.swept(subjects)


def differences(row: Options, mesh: DeviceMesh) -> dict[str, str]:
    """Return the faults of a row on this rank, each with a text. A collective of the mesh."""
    ring = mesh if mesh.ndim == 1 else mesh[_names(mesh)[-1]]
    lengths = [_TOKENS[row["length"]] * ring.size()]
    if row["calls"] in ("two", "another length"):
        lengths.append(lengths[0] + (2 * ring.size() if row["calls"] == "another length" else 0))
    faults: dict[str, str] = {}
    with attention_by(row["kernel"]), ring_options(load_balance=row["load_balance"], rotate=row["rotate"]):
        for number, length in enumerate(lengths):
            numbers = Numbers.of(row, length, seed=dist.get_rank() // ring.size() + 10 * number)
            for fault, text in _faults(row, ring, numbers):
                faults.setdefault(fault, text)
    return faults


def _names(mesh: DeviceMesh) -> tuple[str, ...]:
    assert mesh.mesh_dim_names is not None
    return mesh.mesh_dim_names


@dataclass(frozen=True)
class Numbers:
    """Inputs of attention, of shapes (batch, heads, tokens, head_dim), in the dtype of a row."""

    query: Tensor
    key: Tensor
    value: Tensor
    grad: Tensor
    """Gradient of the output."""
    is_causal: bool
    scale: float

    @classmethod
    def of(cls, row: Options, length: int, *, seed: int) -> "Numbers":
        """Return eighths between -2 and 2, which every dtype of the sweep holds."""
        generator = torch.Generator().manual_seed(seed)
        few = 2 if row["heads"] == "grouped" else _HEADS
        named = {}
        for name, heads in {"query": _HEADS, "key": few, "value": few, "grad": _HEADS}.items():
            full = torch.randint(-16, 17, (row["batch"], heads, length, _HEAD_DIM), generator=generator) / 8
            if row["strides"] == "transposed":
                full = full.transpose(1, 2).contiguous().transpose(1, 2)
            named[name] = full.to(DTYPES[row["dtype"]])
        scale = _HEAD_DIM**-0.5 if row["scale"] is None else row["scale"]
        return cls(**named, is_causal=row["is_causal"], scale=scale)

    @property
    def tokens(self) -> int:
        """Number of tokens of the whole sequence."""
        return self.query.shape[2]


@dataclass(frozen=True)
class Bounded:
    """Tensor in fp64, with the bound on the deviation of each element."""

    value: Tensor
    bound: Tensor


def expected(numbers: Numbers, *, ranks: int) -> dict[str, Bounded]:
    r"""Return output and gradients of attention in fp64, with bounds for ring attention on some ranks.

    Let u be the unit roundoff of fp32, in which is computed, and w that of a 16-bit dtype of the tensors, else 0; d
    the head's dimension, n the tokens. A score is a sum of d products and a scaling, wrong by at most (d + 2) u a with
    a its largest sum of absolute products in the row. A weight exp(score - log-sum-exp) has that error twice (numerator
    and denominator), n for the sum of the denominator, and a few for exp, log and the merges of the r ranks, each of
    which rounds sigmoid, difference, product and sum: e = u (2 (d + 2) a + 2 n + 8 r + 8).

    - The output is a convex combination of values, also while it is merged: e + n u for the products' sum, and 3 w for
      the weights, which a kernel rounds before it multiplies, the output of each rank's kernel and the last rounding;
      times the largest absolute value of a column.
    - The gradient of the values, P' G: 2 e for the weights, which the kernel computes again from a log-sum-exp with
      that error, n u for the sum, 3 w for the weights, the shares of the ranks and their sum; times P' |G|.
    - The gradient of a score is P (G V' - D), D the product of G and the output: with T = |G| |V|' + |G| M, M the
      largest absolute values of the columns, its error is P T (2 e + (d + 4) u) and, for the output in D, P |G| times
      the output's own bound. The gradients of query and key multiply by the other one and scale: (n u + 3 w) P T more.
    """
    q, k, v, g = (each.double() for each in (numbers.query, numbers.key, numbers.value, numbers.grad))
    shared = q.shape[1] // k.shape[1]
    k, v = (each.repeat_interleave(shared, 1) for each in (k, v))
    d, n = q.shape[-1], q.shape[2]
    u = torch.finfo(torch.float32).eps / 2
    w = 0.0 if numbers.query.dtype == torch.float32 else torch.finfo(numbers.query.dtype).eps / 2
    scores, sizes = numbers.scale * q @ k.mT, abs(numbers.scale) * q.abs() @ k.abs().mT
    if numbers.is_causal:
        hidden = torch.ones(n, n, dtype=torch.bool).triu(1)
        scores, sizes = scores.masked_fill(hidden, -torch.inf), sizes.masked_fill(hidden, 0.0)
    p = scores.softmax(-1)
    e = u * (2 * (d + 2) * sizes.amax(-1, keepdim=True) + 2 * n + 8 * ranks + 8)
    largest = v.abs().amax(2, keepdim=True)
    out, out_bound = p @ v, (e + n * u + 3 * w) * largest
    score_grads = p * (g @ v.mT - (g * out).sum(-1, keepdim=True))
    t = p * (g.abs() @ v.abs().mT + (g.abs() * largest).sum(-1, keepdim=True))
    error = t * (2 * e + (d + 4 + n) * u + 3 * w) + p * (g.abs() * out_bound).sum(-1, keepdim=True)
    value_grads = (p.mT @ g, (p * (2 * e + n * u + 3 * w)).mT @ g.abs())
    key_grads = (numbers.scale * score_grads.mT @ q, abs(numbers.scale) * error.mT @ q.abs())
    query_grads = (numbers.scale * score_grads @ k, abs(numbers.scale) * error @ k.abs())
    summed = [
        (_over_shared_heads(value, shared), _over_shared_heads(bound, shared))
        for value, bound in (key_grads, value_grads)
    ]
    named = zip(("output", "query", "key", "value"), [(out, out_bound), query_grads, *summed], strict=True)
    return {
        name if name == "output" else f"gradient of {name}": Bounded(value, bound) for name, (value, bound) in named
    }


def _over_shared_heads(tensor: Tensor, shared: int) -> Tensor:
    batch, heads, *rest = tensor.shape
    return tensor.reshape(batch, heads // shared, shared, *rest).sum(2)


Faults = Iterator[tuple[str, str]]
"""Faults on this rank, each with a text."""


def _faults(row: Options, ring: DeviceMesh, numbers: Numbers) -> Faults:
    wanted = expected(numbers, ranks=ring.size())
    if row["sharded_attention"] == "before":
        yield from _sharded_faults(ring, numbers, wanted)
    if row["calls"] == "error before":
        yield from _after_an_error(ring, numbers)
    yield from _ring_faults(row, ring, numbers, wanted)
    if row["sharded_attention"] == "after":
        yield from _sharded_faults(ring, numbers, wanted)


def _ring_faults(row: Options, ring: DeviceMesh, numbers: Numbers, wanted: Mapping[str, Bounded]) -> Faults:
    buffers, dims = _buffers(numbers)
    full = {name: buffer.clone() for name, buffer in buffers.items()}
    kept = {*buffers.values()} if row["buffers"] == "kept" else None
    outside = functional.scaled_dot_product_attention
    entered = context_parallel(
        ring, buffers=list(buffers.values()), buffer_seq_dims=list(dims.values()), no_restore_buffers=kept
    )
    with entered:
        places = buffers["positions"].clone()
        shards = {name: buffer.clone() for name, buffer in buffers.items()}
        leaves = {name: shards[name].clone().requires_grad_() for name in ("query", "key", "value")}
        output = _attend(leaves, numbers)
        if row["calls"] == "evaluation":
            with torch.no_grad():
                again = _attend(leaves, numbers)
            if not torch.equal(again, output):
                yield "output without gradients", "differs from that with gradients"
        if row["backward"] == "inside":
            torch.autograd.backward(output, shards["grad"])
        along = row["unshard"]
        gathered = unsharded(ring, [output.detach().clone(), shards[along]], [2, dims[along]])
    if functional.scaled_dot_product_attention is not outside:
        yield "attention outside", "scaled_dot_product_attention is still replaced"
    if row["backward"] == "after":
        torch.autograd.backward(output, shards["grad"])
    yield from _misplaced(ring, places, full["positions"])
    for name, shard in shards.items():
        if not torch.equal(shard, full[name].index_select(dims[name], places)):
            yield f"shard of {name}", "has other elements than the shard of the positions"
        left = shard if kept else full[name]
        if not torch.equal(buffers[name], left):
            yield f"{name} after the context", f"is not the {'shard' if kept else 'full tensor'}"
    results = {"output": output.detach(), **{f"gradient of {name}": leaf.grad for name, leaf in leaves.items()}}
    for name, result in results.items():
        yield from _deviation(name, result, wanted[name], places)
    yield from _deviation("output that is unsharded", gathered[0], wanted["output"], full["positions"])
    if not torch.equal(gathered[1], full[along]):
        yield f"{along} that are unsharded", "differ from the full tensor"


def _buffers(numbers: Numbers) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Return copies of the tensors along the sequence, and the dimension of each that the sequence has."""
    batch, tokens = numbers.query.shape[0], numbers.tokens
    named = {"query": numbers.query, "key": numbers.key, "value": numbers.value, "grad": numbers.grad}
    buffers = {name: tensor.clone(memory_format=torch.preserve_format) for name, tensor in named.items()}
    buffers["labels"] = torch.arange(batch * tokens).view(batch, tokens)
    buffers["positions"] = torch.arange(tokens)
    return buffers, {**dict.fromkeys(named, 2), "labels": 1, "positions": 0}


def _attend(leaves: Mapping[str, Tensor], numbers: Numbers) -> Tensor:
    query, key, value = (leaves[name] for name in ("query", "key", "value"))
    is_grouped = key.shape[1] != query.shape[1]
    return functional.scaled_dot_product_attention(
        query, key, value, is_causal=numbers.is_causal, scale=numbers.scale, enable_gqa=is_grouped
    )


def _misplaced(ring: DeviceMesh, places: Tensor, positions: Tensor) -> Faults:
    every: list[list[int]] = [[] for _ in range(ring.size())]
    dist.all_gather_object(every, places.tolist(), group=ring.get_group())
    if sorted(place for each in every for place in each) != positions.tolist():
        yield "positions", f"ranks have {every}"


def _deviation(name: str, result: Tensor | None, wanted: Bounded, places: Tensor) -> Faults:
    """Yield the element, of the tokens at some places, that is furthest beyond its bound, if any is."""
    if result is None:
        yield name, "there is none"
        return
    value, bound = (each.index_select(2, places) for each in (wanted.value, wanted.bound))
    if result.shape != value.shape:
        yield name, f"has shape {tuple(result.shape)}, expected {tuple(value.shape)}"
        return
    excess = torch.nan_to_num((result.double() - value).abs() - bound, nan=torch.inf)
    if (excess > 0).any():
        worst = int(excess.argmax())
        measured, right, allowed = (float(each.flatten()[worst]) for each in (result, value, bound))
        yield name, f"{measured:.6g} at {worst} of {excess.numel()}, expected {right:.6g} within {allowed:.2g}"


def _after_an_error(ring: DeviceMesh, numbers: Numbers) -> Faults:
    """Leave the context by an error of its body, as a loop does that goes on with the next batch."""
    buffers, dims = _buffers(numbers)
    full = {name: buffer.clone() for name, buffer in buffers.items()}
    try:
        with context_parallel(ring, buffers=list(buffers.values()), buffer_seq_dims=list(dims.values())):
            raise _BodyFailed
    except _BodyFailed:
        pass
    for name, buffer in buffers.items():
        if not torch.equal(buffer, full[name]):
            yield f"{name} after an error", "is not the full tensor"


class _BodyFailed(Exception):
    """Error of the body of a context."""


def _sharded_faults(ring: DeviceMesh, numbers: Numbers, wanted: Mapping[str, Bounded]) -> Faults:
    """Yield the faults of attention of DTensors that are sharded along the sequence, which has no ring."""
    named = {"query": numbers.query, "key": numbers.key, "value": numbers.value}
    shards = {name: distributed(full, ring, (Shard(2),)) for name, full in named.items()}
    output = _attend(shards, numbers)
    assert isinstance(output, DTensor)
    places = torch.arange(numbers.tokens)
    yield from _deviation("output of sharded attention", output.full_tensor(), wanted["output"], places)
