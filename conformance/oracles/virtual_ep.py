"""Expert parallelism in one process: all ranks go through the model together, one layer after the other.

An expert multiplies the rows of several ranks at once, and its gradients are sums over them: the kernels, and with them
every bit, are those of a run only if the rows are the same. Each rank has a copy of the model, with the experts that it
holds (arXiv:2006.16668, section 3.1: experts are divided among devices, all other parameters are not).
"""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from conformance.oracles.reference import Tensors
from reference_trainer.experts import MixtureOfExperts
from reference_trainer.model import Transformer


class ExpertParallelForward:
    """Forward of all data-parallel ranks; consecutive `ep` ranks divide the experts of a model among them."""

    def __init__(self, model: Transformer, *, ranks: int, ep: int) -> None:
        self._ep = ep
        self.models = [_with_own_experts(model, holder=rank % ep, ep=ep) for rank in range(ranks)]
        """Model of each rank."""

    def __call__(self, tokens: Sequence[Tensor]) -> list[Tensor]:
        """Return the logits of each rank for its tokens, int64 of shape (samples, seq_len)."""
        xs = [model.tok_embeddings(each) for model, each in zip(self.models, tokens, strict=True)]
        for index in self.models[0].blocks:
            blocks = [model.blocks[index] for model in self.models]
            xs = [
                x + block.dropout(block.attention(block.attention_norm(x), model.rope_table))
                for x, block, model in zip(xs, blocks, self.models, strict=True)
            ]
            normed = [block.ffn_norm(x) for block, x in zip(blocks, xs, strict=True)]
            mixed = self._mixed([model.mixtures[index] for model in self.models], normed)
            xs = [x + block.dropout(each) for x, block, each in zip(xs, blocks, mixed, strict=True)]
        return [model.output(model.norm(x)) for model, x in zip(self.models, xs, strict=True)]

    def _mixed(self, mixtures: Sequence[MixtureOfExperts], xs: Sequence[Tensor]) -> list[Tensor]:
        """Outputs of the mixtures of all ranks."""
        tokens = [x.flatten(0, 1) for x in xs]
        routed = [mixture.router(each) for mixture, each in zip(mixtures, tokens, strict=True)]
        counts = [mixture.counts(routes) for mixture, routes in zip(mixtures, routed, strict=True)]
        load = torch.stack(counts).sum(0)
        for mixture, routes in zip(mixtures, routed, strict=True):
            mixture.balance_loss = mixture.balance(routes, load)
        routed_tokens = zip(tokens, routed, strict=True)
        sorted_rows = [mixture.rows(*each) for mixture, each in zip(mixtures, routed_tokens, strict=True)]
        rows, orders = ([each[index] for each in sorted_rows] for index in range(2))
        results: list[Tensor] = []
        for first in range(0, len(mixtures), self._ep):
            group = slice(first, first + self._ep)
            results += _computed([mixture.experts for mixture in mixtures[group]], rows[group], counts[group])
        finished = zip(xs, routed, results, orders, strict=True)
        return [mixture.combined(*each) for mixture, each in zip(mixtures, finished, strict=True)]


def _with_own_experts(model: Transformer, *, holder: int, ep: int) -> Transformer:
    """Return a copy of a model with the experts that one of `ep` ranks holds."""
    own = copy.deepcopy(model)
    for mixture in own.mixtures:
        for name, weight in list(mixture.experts.named_parameters()):
            mixture.experts.register_parameter(name, nn.Parameter(weight.detach().chunk(ep)[holder].clone()))
    return own


def _computed(holders: Sequence[nn.Module], rows: Sequence[Tensor], counts: Sequence[Tensor]) -> list[Tensor]:
    """Results of the rows of each rank of a group, which are sorted by expert; `counts` has their numbers by expert."""
    chunks = [torch.split(each, numbers.tolist()) for each, numbers in zip(rows, counts, strict=True)]
    results: list[list[Tensor]] = [[] for _ in rows]
    for holder, held in zip(holders, torch.stack(tuple(counts)).chunk(len(holders), dim=1), strict=True):
        first = len(results[0])
        experts = range(first, first + held.shape[1])
        together = torch.cat([own[expert] for expert in experts for own in chunks])
        computed = torch.split(holder(together, held.sum(0)), held.T.flatten().tolist())
        for rank, own in enumerate(results):
            own += computed[rank :: len(rows)]
    return [torch.cat(each) for each in results]


def joined_experts(ranks: Sequence[Tensors], *, ep: int) -> list[Tensors]:
    """Return the gradients of all experts of each group of `ep` ranks, which hold them, by parameter name."""
    groups = [ranks[first : first + ep] for first in range(0, len(ranks), ep)]
    return [
        {name: torch.cat([own[name] for own in group]) for name in group[0] if is_of_experts(name)} for group in groups
    ]


def is_of_experts(parameter: str) -> bool:
    """Return whether a parameter stacks experts."""
    return ".experts." in parameter
