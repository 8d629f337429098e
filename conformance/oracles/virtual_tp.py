"""Forward pass of virtual tensor-parallel ranks in one process, with the roundings of each rank's partial results.

Each rank computes with its shards of the weights: columns of wq, wk, wv, w1, w3 and of the output, rows of wo and w2,
also of each expert, rows of the embedding. Ranks exchange a copy whose gradients are summed, or a sum whose gradient is
copied (the operators f and g of arXiv:1909.08053, and their sequence-parallel forms of arXiv:2205.05198).
"""

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import add
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor
from torch.func import functional_call

from conformance.numerics.rings import Ring, ring_sum
from conformance.oracles.torch_versions import traits_of
from conformance.oracles.tp_schedule import is_norm, is_router, sharded_dim
from reference_trainer.data import IGNORED_LABEL
from reference_trainer.experts import MixtureOfExperts
from reference_trainer.model import Block, Transformer


class _Copies(torch.autograd.Function):
    """Copies of a tensor, for each rank; backward sums their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int, dim: int | None, ring: Ring) -> tuple[Tensor, ...]:
        ctx.dim, ctx.ring = dim, ring
        return tuple(x.clone() for _ in range(count))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return ring_sum(grads, dim=ctx.dim, ring=ctx.ring), None, None, None


class _Sum(torch.autograd.Function):
    """Sum of the ranks' partial results; backward returns the same gradient for each rank."""

    @staticmethod
    def forward(ctx: Any, dim: int | None, ring: Ring, *partials: Tensor) -> Tensor:
        ctx.count = len(partials)
        return ring_sum(partials, dim=dim, ring=ring)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *(grad.clone() for _ in range(ctx.count)))


class _Gathered(torch.autograd.Function):
    """Shards of the ranks along a dimension, gathered; backward returns a separate tensor for each rank.

    The gradient of `torch.cat` would be views, with the strides of the full tensor and at any address, for which a
    library of kernels may choose another order of sums than for the ranks' own tensors.
    """

    @staticmethod
    def forward(ctx: Any, dim: int, is_view: bool, *shards: Tensor) -> Tensor:
        ctx.dim, ctx.sizes = dim, [shard.shape[dim] for shard in shards]
        gathered = torch.cat(shards, dim)
        if not is_view:
            return gathered
        padded = gathered.new_empty(*gathered.shape[:-1], len(shards) * max(ctx.sizes))
        return padded[..., : gathered.shape[-1]].copy_(gathered)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        shards = torch.split(grad, ctx.sizes, ctx.dim)
        return None, None, *(shard.clone(memory_format=torch.contiguous_format) for shard in shards)


def _copies(x: Tensor, count: int, dim: int | None, ring: Ring) -> Sequence[Tensor]:
    return _Copies.apply(x, count, dim, ring)  # type: ignore[no-untyped-call, no-any-return]


def _sum(partials: Sequence[Tensor], dim: int | None, ring: Ring) -> Tensor:
    return _Sum.apply(dim, ring, *partials)  # type: ignore[no-untyped-call, no-any-return]


def _gathered(shards: Sequence[Tensor], dim: int, *, is_view: bool = False) -> Tensor:
    return _Gathered.apply(dim, is_view, *shards)  # type: ignore[no-untyped-call, no-any-return]


class TensorParallelForward:
    """Forward pass of a model as `tp` ranks compute it: tokens (batch, seq_len), int64, to logits.

    Logits have shape (batch, seq_len, vocab_size) and the dtype of the model's parameters.
    """

    def __init__(
        self, model: Transformer, *, tp: int, ring: Ring, sequence_parallel: bool, norms_in_tp: bool = True
    ) -> None:
        self._model, self._tp, self._sequence_parallel = model, tp, sequence_parallel
        self._ring = ring
        self._norms_in_tp = norms_in_tp
        self._dim = 1 if sequence_parallel else None
        """Dimension along which activations are reduce-scattered, the sequence; None if they are all-reduced."""
        self.copied: dict[str, list[Tensor]] = {}
        """Weights by name, of which each rank has a copy, whose gradient is a term of the full sum."""
        for name, weight in model.named_parameters():
            if is_router(name) or (sequence_parallel and is_norm(name)):
                self.copied[name] = [weight.detach().clone().requires_grad_() for _ in range(tp)]

    def __call__(self, tokens: Tensor) -> Tensor:
        """Return the logits of tokens."""
        model = self._model
        x: Tensor = model.tok_embeddings(tokens)  # only one rank knows a token, the others add zero
        for name, block in cast("list[tuple[str, Block]]", list(model.layers.named_children())):
            if block.is_skipped:
                continue
            normed = self._norm(f"layers.{name}.attention_norm", x)
            x = x + block.dropout(self._region(f"layers.{name}.attention", normed, model.rope_table))
            normed = self._norm(f"layers.{name}.ffn_norm", x)
            x = x + block.dropout(self._region(f"layers.{name}.feed_forward", normed))
        copies = _copies(self._norm("norm", x), self._tp, self._dim, self._ring)
        weights = self._shards(model.output.weight, 0)
        logits = [F.linear(copy, weight) for copy, weight in zip(copies, weights, strict=True)]
        return _gathered(logits, -1, is_view=traits_of(str(torch.__version__)).uneven_gathers_are_views)

    def _region(self, path: str, x: Tensor, *others: Tensor) -> Tensor:
        """Output of a module between a gather of its input and a reduction of its output."""
        module = self._model.get_submodule(path)
        copies = _copies(x, self._tp, self._dim, self._ring)
        # Views, for autograd to add up the ranks' terms of a bias first, and then those of several forward passes.
        parameters = {name: p.view_as(p) if p.ndim == 1 else p for name, p in module.named_parameters()}
        outputs, losses = [], []
        for copy, local in zip(copies, [self._parameters(path, parameters, r) for r in range(self._tp)], strict=True):
            if isinstance(module, MixtureOfExperts):
                module.balance_loss = None
            outputs.append(functional_call(module, local, (copy, *others)))
            if isinstance(module, MixtureOfExperts) and module.balance_loss is not None:
                losses.append(module.balance_loss)
        if isinstance(module, MixtureOfExperts):  # each rank has a share of the gradient of a loss that all compute
            module.balance_loss = reduce(add, losses) / self._tp
        return _sum(outputs, self._dim, self._ring)

    def _parameters(self, path: str, full: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
        """Weights of one rank. A row-wise bias belongs to the sum: each rank adds a share of it."""
        local = {}
        for name, parameter in full.items():
            dim = sharded_dim(f"{path}.{name}")
            if dim is not None:
                local[name] = self._shards(parameter, dim)[rank]
            else:
                copies = self.copied.get(f"{path}.{name}")
                local[name] = copies[rank] if copies else parameter / self._tp
        return local

    def _shards(self, tensor: Tensor, dim: int) -> list[Tensor]:
        """Return the shards of the ranks, each in separate memory as on the ranks."""
        return [shard.clone(memory_format=torch.contiguous_format) for shard in tensor.chunk(self._tp, dim)]

    def _norm(self, name: str, x: Tensor) -> Tensor:
        """Apply a norm; in sequence parallelism each rank has a shard, and a term of the weight's gradient."""
        norm = self._model.get_submodule(name)
        if not self._sequence_parallel:
            # A view, for autograd to add up the norm's own terms first, as where the module's input is made a DTensor.
            normed: Tensor = norm(x.view_as(x) if self._norms_in_tp else x)
            return normed
        ranks = zip(self.copied[f"{name}.weight"], self._shards(x, 1), strict=True)
        return _gathered([functional_call(norm, {"weight": weight}, (shard,)) for weight, shard in ranks], 1)


class _VocabularyParallelLoss(torch.autograd.Function):
    """Summed negative log-likelihood of sharded logits; backward of softmax and loss in one, as loss_parallel does."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, tp: int, ring: Ring) -> Tensor:
        shifted = logits - logits.amax(-1, keepdim=True)
        sums = [shard.contiguous().exp().sum(-1, keepdim=True) for shard in shifted.chunk(tp, -1)]
        log_probabilities = shifted - ring_sum(sums, dim=None, ring=ring).log()
        valid = labels != IGNORED_LABEL
        safe = labels.where(valid, 0).unsqueeze(-1)
        ctx.save_for_backward(log_probabilities, valid, safe)
        return -log_probabilities.gather(-1, safe).squeeze(-1).where(valid, 0).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        log_probabilities, valid, safe = ctx.saved_tensors
        one_hot = torch.zeros_like(log_probabilities).scatter(-1, safe, -1.0)
        return (one_hot + log_probabilities.exp()) * grad.where(valid, 0).unsqueeze(-1), None, None, None


def vocabulary_parallel_loss(logits: Tensor, labels: Tensor, *, tp: int, ring: Ring) -> Tensor:
    """Return the summed loss, a scalar in fp32, of logits that are sharded over `tp` ranks along the vocabulary.

    Logits have shape (tokens, vocab_size), fp32; labels (tokens,), int64, of which IGNORED_LABEL is left out.
    """
    return _VocabularyParallelLoss.apply(logits, labels, tp, ring)  # type: ignore[no-untyped-call, no-any-return]
