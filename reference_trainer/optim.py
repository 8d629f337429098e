"""Optimizer, learning-rate schedule and clipping."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim.lr_scheduler import LambdaLR

from reference_trainer.config import OptimizerConfig


def parameter_groups(model: nn.Module, *, weight_decay: float) -> list[dict[str, object]]:
    """Matrices decay; norms and biases (one-dimensional) do not."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """To be called on the sharded, initialised model: the optimizer must hold the parameters that are trained."""
    groups = parameter_groups(model, weight_decay=config.weight_decay)
    match config.name:
        case "adamw":
            return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps)
        case "sgd":
            return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum)


def learning_rate_factor(step: int, *, config: OptimizerConfig, steps: int) -> float:
    """Linear warm-up, then a cosine from 1 to `final_lr_fraction` at the last step."""
    if step < config.warmup_steps:
        return (step + 1) / (config.warmup_steps + 1)
    progress = min(1.0, (step - config.warmup_steps) / max(1, steps - 1 - config.warmup_steps))
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.final_lr_fraction + (1.0 - config.final_lr_fraction) * cosine


def build_schedule(optimizer: torch.optim.Optimizer, config: OptimizerConfig, *, steps: int) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: learning_rate_factor(step, config=config, steps=steps))


def clip_gradients(parameters: Iterable[nn.Parameter], *, max_norm: float) -> Tensor:
    """Scale all gradients down to a total 2-norm of `max_norm` (0: leave them) and return the norm before.

    The norm is over all meshes, a plain scalar, the same on every rank.
    """
    parameters = list(parameters)
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = get_total_norm(gradients)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()  # until here each rank knows the norm of its own shards only
    if max_norm > 0:
        clip_grads_with_norm_(parameters, max_norm, norm)
    return norm
