"""Context parallelism in one process: ranks share samples, each with a part of every sequence, and attention is a ring.

Each rank has a copy of the model, and runs forward by itself up to each attention, for which all ranks meet. There the
keys and values of all ranks pass by each of them, whose attention merges those of the parts. Sources: arXiv:2310.01889
(rings), arXiv:2311.09431 (a piece of either half of a sequence for each rank),
https://docs.pytorch.org/tutorials/unstable/context_parallel.html.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor

from conformance.numerics.lockstep import Lockstep
from reference_trainer.device_attention import register
from reference_trainer.model import Transformer, apply_rope

_aten = torch.ops.aten
_SEQUENCE = 2
"""Dimension of the tokens of queries, keys and values: (batch, heads, tokens, head_dim)."""


def positions(seq_len: int, *, cp: int, rank: int) -> Tensor:
    """Return the places of a rank's tokens in a sequence: its piece of the first half, and that of the last."""
    chunks = torch.arange(seq_len).chunk(2 * cp)
    return torch.cat([chunks[rank], chunks[2 * cp - 1 - rank]])


class ContextParallelForward:
    """Models of the ranks that share samples, which compute in lockstep."""

    def __init__(self, model: Transformer, *, cp: int, seq_len: int) -> None:
        self.positions = [positions(seq_len, cp=cp, rank=rank) for rank in range(cp)]
        """Places of each rank's tokens in a sequence."""
        self.models = [copy.deepcopy(model) for _ in range(cp)]
        """Model of each rank."""
        self._lockstep = Lockstep(cp)
        for rank, (own, places) in enumerate(zip(self.models, self.positions, strict=True)):
            own.rope_table = own.rope_table[:, places]
            for block in own.blocks.values():
                block.attention.attend = partial(self._attend, rank)

    def losses(self, functions: Sequence[Callable[[], Tensor]]) -> list[Tensor]:
        """Return the results of functions of each rank, which call its model."""
        return self._lockstep.run(functions)

    def _attend(self, rank: int, q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        """Return attention of a rank's queries; shapes are those of `reference_trainer.model.softmax_attention`."""
        q, k = apply_rope(q, table), apply_rope(k, table)
        groups = q.shape[2] // k.shape[2]
        k, v = (each.repeat_interleave(groups, dim=2) for each in (k, v))
        q, k, v = (each.transpose(1, _SEQUENCE) for each in (q, k, v))
        return self._lockstep.meet(rank, _Attention(q, k, v), _ring_attention).transpose(1, _SEQUENCE)


class _Attention(NamedTuple):
    """Operands of a rank's attention; gradients have the same form."""

    query: Tensor
    key: Tensor
    value: Tensor


def _ring_attention(ranks: Sequence[_Attention]) -> Sequence[Tensor]:
    """Return the results of the ranks, of the shape of their queries."""
    register()
    return _Ring.apply(*[tensor for each in ranks for tensor in each])  # type: ignore[no-untyped-call, no-any-return]


class _Visit(NamedTuple):
    """Keys and values of one rank at another, in one turn of the ring."""

    owner: int
    turn: int
    is_causal: bool
    last_queries: bool
    """Only the queries in the last half of sequences see these keys, and all of them."""
    first_keys: bool
    """All queries see these keys, but only those in the first half of sequences."""

    def queries(self, tensor: Tensor) -> Tensor:
        """Return the queries, or the elements of a tensor of their shape, that take part."""
        return tensor.chunk(2, _SEQUENCE)[1] if self.last_queries else tensor

    def keys(self, tensor: Tensor) -> Tensor:
        """Return those of the keys or values that take part."""
        return tensor.chunk(2, _SEQUENCE)[0] if self.first_keys else tensor


def _visits(rank: int, ranks: int) -> Iterator[_Visit]:
    """Yield the keys and values that pass by a rank: its own first, and then those of the ranks before it."""
    for turn in range(ranks):
        passed_start = turn > rank
        yield _Visit(
            (rank - turn) % ranks,
            turn,
            is_causal=turn == 0,
            last_queries=passed_start,
            first_keys=turn > 0 and not passed_start,
        )


class _Ring(torch.autograd.Function):
    """Attention of all ranks; the arguments are queries, keys and values of one rank after the other.

    Results are merged in fp32, and so are gradients, whose sums travel with the keys and values that they belong to.
    """

    @staticmethod
    def forward(ctx: Any, *operands: Tensor) -> tuple[Tensor, ...]:
        ranks = _by_rank(operands)
        results = [_merged(rank, ranks) for rank in range(len(ranks))]
        ctx.save_for_backward(*operands, *[tensor for result in results for tensor in result])
        return tuple(output for output, _ in results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        number = 3 * len(grads)
        ranks, results = _by_rank(ctx.saved_tensors[:number]), ctx.saved_tensors[number:]
        outputs, sums = results[::2], results[1::2]
        wide = [_Attention(*(torch.zeros_like(each, dtype=torch.float32) for each in _own(own))) for own in ranks]
        for turn in range(len(ranks)):
            for rank in range(len(ranks)):
                visit = list(_visits(rank, len(ranks)))[turn]
                found = _gradients(visit, grads[rank], ranks[rank].query, ranks[visit.owner], outputs[rank], sums[rank])
                mine, theirs = wide[rank], wide[visit.owner]
                wide[rank] = mine._replace(query=_added(mine.query, found.query, 1 if visit.last_queries else None))
                half = 0 if visit.first_keys else None
                wide[visit.owner] = wide[visit.owner]._replace(
                    key=_added(theirs.key, found.key, half), value=_added(theirs.value, found.value, half)
                )
        return tuple(grad.to(own.query.dtype) for own, gradients in zip(ranks, wide, strict=True) for grad in gradients)


def _by_rank(operands: Sequence[Tensor]) -> list[_Attention]:
    return [_Attention(*operands[first : first + 3]) for first in range(0, len(operands), 3)]


def _own(operands: _Attention) -> _Attention:
    """Return operands as a ring sends them: keys and values that are contiguous."""
    return operands._replace(key=operands.key.contiguous(), value=operands.value.contiguous())


def _merged(rank: int, ranks: Sequence[_Attention]) -> tuple[Tensor, Tensor]:
    """Return attention of a rank in its dtype, and the logarithms of its sums of exponentials in fp32.

    With a and b the logarithms of two parts' sums, the parts' results have the weights 1 - s and s of s = sigmoid(b -
    a), and the logarithm of both sums is a - log(sigmoid(a - b)).
    """
    merged = logarithms = None
    for visit in _visits(rank, len(ranks)):
        there = _own(ranks[visit.owner])
        output, sums, *_ = _aten._scaled_dot_product_flash_attention(
            visit.queries(ranks[rank].query), visit.keys(there.key), visit.keys(there.value), 0.0, visit.is_causal
        )
        output, sums = output.float(), sums.float().unsqueeze(-1)
        if merged is None or logarithms is None:
            merged, logarithms = output, sums
            continue
        before, log_before = visit.queries(merged), visit.queries(logarithms)
        after = before - F.sigmoid(sums - log_before) * (before - output)
        log_after = log_before - F.logsigmoid(log_before - sums)
        merged, logarithms = (
            torch.cat([full.chunk(2, _SEQUENCE)[0], new], _SEQUENCE) if visit.last_queries else new
            for full, new in ((merged, after), (logarithms, log_after))
        )
    assert merged is not None
    assert logarithms is not None
    return merged.to(ranks[rank].query.dtype), logarithms.squeeze(-1)


def _gradients(
    visit: _Visit, grad: Tensor, query: Tensor, there: _Attention, output: Tensor, sums: Tensor
) -> _Attention:
    """Return the gradients of the operands of a visit, in their dtype."""
    own = _own(there)
    keys, values = visit.keys(own.key), visit.keys(own.value)
    # Of lengths within a batch, and of random numbers, there are none.
    none, seed = query.new_empty(0), torch.zeros((), dtype=torch.int64, device=query.device)
    grads = _aten._scaled_dot_product_flash_attention_backward(
        *(visit.queries(grad), visit.queries(query), keys, values, visit.queries(output)),
        visit.queries(sums).contiguous(),
        *(none, none, output.shape[_SEQUENCE], own.key.shape[_SEQUENCE], 0.0, visit.is_causal, seed, seed),
    )
    return _Attention(*grads)


def _added(total: Tensor, term: Tensor, half: int | None) -> Tensor:
    """Add a term to a sum, or to one half of it along the sequence."""
    if half is None:
        return total.add_(term)
    halves = list(total.chunk(2, _SEQUENCE))
    halves[half] = halves[half] + term
    return torch.cat(halves, _SEQUENCE)
