"""Mixture of experts: each token passes those of several feed-forward networks that a router chooses for it.

Sources: balance loss and the router's fp32 are those of Switch Transformers (arXiv:2101.03961, sections 2.2 and 2.4),
weights of several experts those of Mixtral (arXiv:2401.04088), the shared expert is that of DeepSeekMoE
(arXiv:2401.06066). No token is dropped: experts take as many tokens as are routed to them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from reference_trainer.config import ModelConfig

Dispatch = Callable[[Callable[[Tensor, Tensor], Tensor], Tensor, Tensor], Tensor]
"""Function that lets experts compute rows: of `Experts.forward`, rows of shape (rows, dim) sorted by expert, and the
number of rows of each expert. It returns the results in the order of the rows."""


def as_it_is(tensor: Tensor) -> Tensor:
    """Return a tensor of a model that is not tensor-parallel; see `MixtureOfExperts.local`."""
    return tensor


class Routes(NamedTuple):
    """Experts of each token, and their weights."""

    experts: Tensor
    """Indices of the chosen experts, int64 of shape (tokens, experts_per_token)."""
    weights: Tensor
    """Weights of the chosen experts, whose sum is 1; fp32 or wider, of the same shape."""
    probabilities: Tensor
    """Probabilities of all experts, of shape (tokens, n_experts)."""


class Router(nn.Module):
    """Linear layer whose results, the logits, choose experts; computes in fp32 or wider for activations of any dtype.

    A logit that is rounded to 16 bits ties with others, so that neighbouring experts change places.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.n_experts, config.dim))
        self.experts_per_token = config.experts_per_token
        self.local: Callable[[Tensor], Tensor] = as_it_is
        """Function as `MixtureOfExperts.local`."""

    def forward(self, x: Tensor) -> Routes:
        """Choose experts for tokens of shape (tokens, dim)."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        probabilities = F.linear(x.to(dtype), self.local(self.weight).to(dtype)).softmax(-1)
        top, experts = probabilities.topk(self.experts_per_token, dim=-1)
        return Routes(experts, top / top.sum(-1, keepdim=True), probabilities)


class Experts(nn.Module):
    """Feed-forward networks of one shape (SwiGLU), whose weights are stacked along the first dimension."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(config.n_experts, config.ffn_dim, config.dim))
        self.w2 = nn.Parameter(torch.empty(config.n_experts, config.dim, config.ffn_dim))
        self.w3 = nn.Parameter(torch.empty(config.n_experts, config.ffn_dim, config.dim))

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Map rows of shape (rows, dim): the first `counts[0]` by the first expert that this rank holds, and so on."""
        w1, w2, w3 = (w.to_local() if isinstance(w, DTensor) else w for w in (self.w1, self.w2, self.w3))
        outputs = []
        for expert, x in enumerate(torch.split(rows, counts.tolist())):
            hidden = F.silu(F.linear(x, w1[expert])) * F.linear(x, w3[expert])
            outputs.append(F.linear(hidden, w2[expert]))
        return torch.cat(outputs)


def on_this_rank(experts: Callable[[Tensor, Tensor], Tensor], rows: Tensor, counts: Tensor) -> Tensor:
    """Let a rank that holds all experts compute its own rows; see `Dispatch`."""
    return experts(rows, counts)


class MixtureOfExperts(nn.Module):
    """Routed experts beside one that sees every token."""

    def __init__(self, config: ModelConfig, shared: nn.Module) -> None:
        super().__init__()
        self.router = Router(config)
        self.experts = Experts(config)
        self.shared = shared
        self.balance_weight = config.balance_weight
        self.dispatch: Dispatch = on_this_rank
        self.sum_over_ranks: Callable[[Tensor], Tensor] = lambda load: load
        """Function that adds up, in place, the numbers of tokens by expert over all ranks with other tokens."""
        self.local: Callable[[Tensor], Tensor] = as_it_is
        """Function that returns the plain tensor of one that is equal on all tensor-parallel ranks. Each of these ranks
        has a part of every expert, and of the output: gradients of such tensors are sums over these ranks."""
        self.balance_loss: Tensor | None = None
        """Balance loss of the last forward of the model, summed over its tokens."""

    def forward(self, x: Tensor) -> Tensor:
        """Map activations of shape (batch, seq_len, dim), each position by itself."""
        tokens = self.local(x).flatten(0, 1)
        routes = self.router(tokens)
        counts = self.counts(routes)
        loss = self.balance(routes, self.sum_over_ranks(counts.clone()))
        if self.balance_loss is None:  # else backward recomputes: its graph would keep what it has recomputed
            self.balance_loss = loss
        rows, order = self.rows(tokens, routes)
        return self.combined(x, routes, self.dispatch(self.experts, rows, counts), order)

    def counts(self, routes: Routes) -> Tensor:
        """Return the number of tokens of each expert."""
        return routes.experts.flatten().bincount(minlength=routes.probabilities.shape[-1])

    def balance(self, routes: Routes, load: Tensor) -> Tensor:
        """Return the loss that is least if all experts get equally many tokens, summed over this rank's tokens.

        `load` has the number of tokens of each expert on all ranks, so that the sum over ranks is the loss of all
        tokens: a rank's own load would let each balance for itself.
        """
        share = load.to(routes.probabilities.dtype) / load.sum()
        weight = self.balance_weight * len(share)
        loss: Tensor = weight * (routes.probabilities.sum(0) * share).sum()
        return loss

    def rows(self, tokens: Tensor, routes: Routes) -> tuple[Tensor, Tensor]:
        """Return the tokens, of shape (tokens, dim), once for each of their experts, sorted by expert, and the order.

        Autograd then adds up the gradients of a token in the order of its experts, and permutes rows without adding.
        """
        order = routes.experts.flatten().argsort(stable=True)
        return tokens.unsqueeze(1).expand(-1, routes.experts.shape[1], -1).flatten(0, 1)[order], order

    def combined(self, x: Tensor, routes: Routes, results: Tensor, order: Tensor) -> Tensor:
        """Return the weighted sum of the results of each token's experts, and that of the shared one.

        `results` are those of the rows, in their order.
        """
        by_token = results[order.argsort()].view(*routes.experts.shape, -1)
        mixed = (by_token * routes.weights.to(by_token.dtype).unsqueeze(-1)).sum(1)
        out: Tensor = mixed.view(x.shape) + self.shared(x)
        return out


def over_ranks(
    experts: Callable[[Tensor, Tensor], Tensor], rows: Tensor, counts: Tensor, *, group: dist.ProcessGroup
) -> Tensor:
    """Let the ranks of a group, each of which holds equally many experts, compute all ranks' rows; see `Dispatch`.

    Each rank sends the rows of other ranks' experts there, and gets back the results.
    """
    sent = counts.view(group.size(), -1)  # by rank, and by its experts
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    to_ranks, from_ranks = sent.sum(1).tolist(), received.sum(1).tolist()
    arrived = _AllToAll.apply(rows, from_ranks, to_ranks, group)  # type: ignore[no-untyped-call]
    order = _by_expert(received)
    results = experts(arrived[order], received.sum(0))[order.argsort()]
    returned: Tensor = _AllToAll.apply(results, to_ranks, from_ranks, group)  # type: ignore[no-untyped-call]
    return returned


def _by_expert(received: Tensor) -> Tensor:
    """Return the order in which experts take rows: by expert, and of each expert by rank.

    Rows arrive by rank, and of each rank by expert; `received` are their numbers, of shape (ranks, experts).
    """
    ranks, experts = received.shape
    expert = torch.arange(experts, device=received.device).repeat(ranks)
    return expert.repeat_interleave(received.flatten()).argsort(stable=True)


class _AllToAll(torch.autograd.Function):
    """Exchange of rows between ranks, whose backward sends gradients back.

    torch.distributed.nn.functional.all_to_all_single is deprecated, and its successor is private (torch 2.13).
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
        """Return the rows that all ranks sent to this one; `received` and `sent` are their numbers by rank."""
        ctx.received, ctx.sent, ctx.group = received, sent, group
        output = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(output, rows.contiguous(), received, sent, group=group)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        """Return the gradients of the rows that this rank sent."""
        returned: Tensor = _AllToAll.apply(grads[0], ctx.sent, ctx.received, ctx.group)  # type: ignore[no-untyped-call]
        return returned, None, None, None
