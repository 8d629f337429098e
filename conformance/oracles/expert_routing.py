"""Routing: experts that a run chose, or that are chosen in turns."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from reference_trainer.experts import Router, Routes
from reference_trainer.model import Transformer


def replay_choices(model: Transformer, choices: Sequence[Tensor]) -> None:
    """Let routers choose these experts in the next forwards, by block; without choices nothing changes.

    Rounding decides between experts that are almost equally probable. `choices` have the shapes of `Routes.experts`.
    """
    for mixture, experts in zip(model.mixtures, choices, strict=False):
        mixture.router.forward = partial(_choosing, mixture.router, experts)  # type: ignore[method-assign]


def route_evenly(model: Transformer) -> None:
    """Let routers choose each expert equally often in the next forwards, up to one token: one after the other.

    What experts compute then needs memory that no weight changes, and that ranks have alike.
    """
    for mixture in model.mixtures:
        mixture.router.forward = partial(_in_turns, mixture.router)  # type: ignore[method-assign]


def _in_turns(router: Router, x: Tensor) -> Routes:
    choices = torch.arange(x.shape[0] * router.experts_per_token, device=x.device) % router.weight.shape[0]
    return _choosing(router, choices.view(-1, router.experts_per_token), x)


def _choosing(router: Router, experts: Tensor, x: Tensor) -> Routes:
    probabilities = Router.forward(router, x).probabilities
    chosen = probabilities.gather(-1, experts)
    return Routes(experts, chosen / chosen.sum(-1, keepdim=True), probabilities)
