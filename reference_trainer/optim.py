"""Optimizer and learning-rate schedule."""

import math

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from reference_trainer.config import OptimizerConfig, TrainerConfig
from reference_trainer.fsdp1 import summon_full_params

_FOREACH_AND_FUSED: dict[str, tuple[bool | None, bool | None]] = {
    "auto": (None, None),
    "for-loop": (False, False),
    "foreach": (True, False),
    "fused": (False, True),
}
"""Arguments `foreach` and `fused` of torch's optimizers; None leaves the choice to torch."""


def parameter_groups(model: nn.Module, *, weight_decay: float) -> list[dict[str, object]]:
    """Return an optimizer's groups: matrices, which decay, and norms and biases (one-dimensional), which do not."""
    with summon_full_params(model):
        are_matrices = [p.ndim >= 2 for p in model.parameters()]
    parameters = [
        (p, is_matrix) for p, is_matrix in zip(model.parameters(), are_matrices, strict=True) if p.requires_grad
    ]
    return [
        {"params": [p for p, is_matrix in parameters if is_matrix], "weight_decay": weight_decay},
        {"params": [p for p, is_matrix in parameters if not is_matrix], "weight_decay": 0.0},
    ]


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Build the optimizer of a model that is sharded and initialised: it must hold the parameters that are trained."""
    groups = parameter_groups(model, weight_decay=config.weight_decay)
    foreach, fused = _FOREACH_AND_FUSED[config.implementation]
    match config.name:
        case "adamw":
            betas = (config.beta1, config.beta2)
            return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, foreach=foreach, fused=fused)
        case "sgd":
            return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, foreach=foreach, fused=fused)


def lr_decay_steps(config: TrainerConfig) -> int | None:
    """Return the steps after which the learning rate has fallen; None if it is constant after warm-up."""
    return (config.optimizer.lr_decay_steps or config.steps) if config.optimizer.final_lr_fraction < 1.0 else None


def learning_rate_factor(step: int, config: TrainerConfig) -> float:
    """Return the factor of `lr`: a linear warm-up, then a cosine from 1 to `final_lr_fraction` over the decay steps."""
    options, decay = config.optimizer, lr_decay_steps(config)
    if step < options.warmup_steps:
        return (step + 1) / (options.warmup_steps + 1)
    if decay is None:
        return 1.0
    progress = min(1.0, (step - options.warmup_steps) / max(1, decay - 1 - options.warmup_steps))
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return options.final_lr_fraction + (1.0 - options.final_lr_fraction) * cosine


def build_schedule(optimizer: torch.optim.Optimizer, config: TrainerConfig) -> LambdaLR:
    """Build the learning-rate schedule of a run."""
    return LambdaLR(optimizer, lambda step: learning_rate_factor(step, config))
