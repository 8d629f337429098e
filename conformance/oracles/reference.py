"""Single-process references: the same model definition and initial weights, and nothing else of the trainer.

Loss, gradient averaging, clipping, AdamW and SGD are written out here, so that a fault of the trainer or of torch's
optimizers, clipping or loss functions cannot be on both sides of a comparison. `tests/test_reference.py` checks these
formulas against torch's own, and the gradients against finite differences.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from reference_trainer.config import OptimizerConfig, TrainerConfig
from reference_trainer.data import IGNORED_LABEL, Batches
from reference_trainer.init_weights import init_weights
from reference_trainer.model import Transformer

Tensors = dict[str, Tensor]
Batch = tuple[Tensor, Tensor]


@dataclass
class ReferenceRun:
    """What a single process computes; tensors by parameter name, in the dtype of the master weights."""

    initial: Tensors
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    """Total 2-norm of each step's gradients, before clipping."""
    gradients: list[Tensors] = field(default_factory=list)
    """Of each step, before clipping."""
    parameters: Tensors = field(default_factory=dict)
    """After the last step."""
    optimizer_state: dict[str, Tensors] = field(default_factory=dict)
    """After the last step: `exp_avg` and `exp_avg_sq` of AdamW."""


def initial_model(config: TrainerConfig) -> Transformer:
    """The unsharded model with its initial weights, fp32 on the CPU."""
    model = Transformer(config.model)
    init_weights(model, seed=config.seed)
    return model


def train_reference(config: TrainerConfig, *, dtype: torch.dtype) -> ReferenceRun:
    """Train on one process, weights and computation in `dtype`, each step on the whole global batch at once."""

    def gradients(model: Transformer, batch: Batch, valid_tokens: int) -> tuple[float, Tensors]:
        loss_sum = summed_loss(model, batch)
        names, parameters = zip(*model.named_parameters(), strict=True)
        grads = torch.autograd.grad(loss_sum / valid_tokens, parameters)
        return float(loss_sum.detach()) / valid_tokens, dict(zip(names, grads, strict=True))

    return _train(initial_model(config).to(dtype), config, gradients)


def train_bf16_emulation(config: TrainerConfig, *, dp_size: int) -> ReferenceRun:
    """Train as FSDP2 does with `param_dtype=bf16, reduce_dtype=fp32`, rounding where it rounds.

    For each data-parallel rank the fp32 master weights are cast to bf16 (as on unshard), forward and backward run in
    bf16 on that rank's samples, and the bf16 gradients are cast to fp32; these are averaged in fp32 and applied to
    the master weights. Buffers stay fp32. Source: torch.distributed.fsdp.MixedPrecisionPolicy.
    """

    def gradients(model: Transformer, batch: Batch, valid_tokens: int) -> tuple[float, Tensors]:
        compute = Transformer(config.model)
        compute.rope_table.copy_(model.rope_table)
        for name, parameter in compute.named_parameters():
            parameter.data = model.get_parameter(name).detach().to(torch.bfloat16)
        names, parameters = zip(*compute.named_parameters(), strict=True)
        loss, totals = 0.0, {name: torch.zeros(p.shape) for name, p in zip(names, parameters, strict=True)}
        for rank in range(dp_size):
            accumulated = {name: torch.zeros(p.shape) for name, p in zip(names, parameters, strict=True)}
            for micro_batch in _micro_batches(batch, rank=rank, dp_size=dp_size, accumulation=config.accumulation):
                loss_sum = summed_loss(compute, micro_batch)
                loss += float(loss_sum.detach())
                grads = torch.autograd.grad(loss_sum * (dp_size / valid_tokens), parameters)
                for name, grad in zip(names, grads, strict=True):
                    accumulated[name] += grad.float()
            for name, grad in accumulated.items():
                totals[name] += grad
        return loss / valid_tokens, {name: total / dp_size for name, total in totals.items()}

    return _train(initial_model(config), config, gradients)


def _micro_batches(batch: Batch, *, rank: int, dp_size: int, accumulation: int) -> list[Batch]:
    """Consecutive samples belong to a rank, and within it to a micro-batch."""
    shares = [tensor.chunk(dp_size)[rank].chunk(accumulation) for tensor in batch]
    return list(zip(*shares, strict=True))


def summed_loss(model: Transformer, batch: Batch) -> Tensor:
    """Negative log-likelihood summed over the labels that count; logits below fp32 are raised to fp32 first."""
    inputs, labels = batch
    logits: Tensor = model(inputs)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    valid = labels != IGNORED_LABEL
    chosen = logits.gather(-1, labels.where(valid, 0).unsqueeze(-1)).squeeze(-1)
    return ((logits.logsumexp(-1) - chosen) * valid).sum()


def _train(
    model: Transformer,
    config: TrainerConfig,
    gradients: Callable[[Transformer, Batch, int], tuple[float, Tensors]],
) -> ReferenceRun:
    """The loop around whatever computes the gradients of one step."""
    if config.model.dropout or config.optimizer.warmup_steps or config.optimizer.final_lr_fraction != 1.0:
        raise ValueError("the reference knows neither dropout nor learning-rate schedules: use a cell without them")
    batches = Batches(config.data, vocab_size=config.model.vocab_size, seed=config.seed)
    run = ReferenceRun(initial={name: p.detach().clone() for name, p in model.named_parameters()})
    update: _Update = _AdamW(config.optimizer) if config.optimizer.name == "adamw" else _Sgd(config.optimizer)
    for step in range(config.steps):
        batch = batches.global_batch(step)
        loss, grads = gradients(model, batch, int((batch[1] != IGNORED_LABEL).sum()))
        norm = total_norm(grads.values(), kind=2)
        run.losses.append(loss)
        run.grad_norms.append(norm)
        run.gradients.append(grads)
        factor = clip_factor(norm, max_norm=config.optimizer.max_norm)
        with torch.no_grad():
            update.step(dict(model.named_parameters()), {name: grad * factor for name, grad in grads.items()})
    run.parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    run.optimizer_state = update.state
    return run


def total_norm(gradients: Iterable[Tensor], *, kind: Literal[2]) -> float:
    """2-norm over all elements of all gradients, summed in fp64."""
    return math.sqrt(sum(float(grad.double().square().sum()) for grad in gradients))


def clip_factor(norm: float, *, max_norm: float) -> float:
    """Factor that brings the norm down to `max_norm`; the 1e-6 is that of torch's clip_grads_with_norm_."""
    return min(1.0, max_norm / (norm + 1e-6)) if max_norm > 0 else 1.0


class _Update(Protocol):
    """An optimizer; `state` holds its tensors by kind and parameter name."""

    state: dict[str, Tensors]

    def step(self, parameters: Tensors, gradients: Tensors) -> None: ...


class _Sgd:
    """p <- p - lr (g + decay p); matrices decay, vectors do not."""

    def __init__(self, config: OptimizerConfig) -> None:
        if config.momentum:
            raise ValueError("the reference's SGD has no momentum: use momentum 0")
        self._config = config
        self.state: dict[str, Tensors] = {}

    def step(self, parameters: Tensors, gradients: Tensors) -> None:
        for name, p in parameters.items():
            p.sub_(self._config.lr * (gradients[name] + _decay(self._config, p) * p))


class _AdamW:
    """Decoupled weight decay, arXiv:1711.05101 algorithm 2 with bias correction."""

    def __init__(self, config: OptimizerConfig) -> None:
        self._config, self._step = config, 0
        self.state: dict[str, Tensors] = {"exp_avg": {}, "exp_avg_sq": {}}

    def step(self, parameters: Tensors, gradients: Tensors) -> None:
        config = self._config
        self._step += 1
        for name, p in parameters.items():
            grad = gradients[name]
            mean = self.state["exp_avg"].setdefault(name, torch.zeros_like(p))
            square = self.state["exp_avg_sq"].setdefault(name, torch.zeros_like(p))
            mean.mul_(config.beta1).add_(grad, alpha=1 - config.beta1)
            square.mul_(config.beta2).addcmul_(grad, grad, value=1 - config.beta2)
            corrected = square.sqrt() / (1 - config.beta2**self._step) ** 0.5
            p.mul_(1 - config.lr * _decay(config, p))
            p.sub_(config.lr / (1 - config.beta1**self._step) * mean / (corrected + config.eps))


def _decay(config: OptimizerConfig, parameter: Tensor) -> float:
    return config.weight_decay if parameter.ndim >= 2 else 0.0
