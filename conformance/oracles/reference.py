"""Single-process references: the trainer's model definition and initial weights, and nothing else of the trainer.

Loss, gradient averaging, clipping, AdamW and SGD are written out here, so that a fault of the trainer or of torch's
optimizers, clipping or loss functions cannot be on both sides of a comparison. `tests/fast/oracles/test_reference.py`
checks these formulas against torch's own, and the gradients against finite differences.
"""

import copy
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import msgspec
import torch
from torch import Tensor

from conformance.oracles.dropout import Masks, replay
from conformance.oracles.expert_routing import replay_choices
from conformance.oracles.frozen import trained
from conformance.oracles.skipped import is_computed, leave_out
from reference_trainer.config import LossScaleConfig, MeshConfig, ModelConfig, OptimizerConfig, TrainerConfig
from reference_trainer.data import IGNORED_LABEL, Batches
from reference_trainer.init_weights import init_weights
from reference_trainer.model import Transformer

Tensors = dict[str, Tensor]
"""Full tensors by parameter name."""
Batch = tuple[Tensor, Tensor]
"""Inputs and labels, shape (samples, seq_len), int64."""


@dataclass
class ReferenceRun:
    """Training run of a single process; tensors by parameter name, in the shapes and dtype of the master weights."""

    initial: Tensors
    """Initial weights."""
    losses: list[float] = field(default_factory=list)
    """Mean loss of each step over its valid tokens, in nats."""
    grad_norms: list[float] = field(default_factory=list)
    """Total norm of each step's gradients, of the type that the configuration names, before clipping."""
    gradients: list[Tensors] = field(default_factory=list)
    """Gradients of each step before clipping."""
    parameters: Tensors = field(default_factory=dict)
    """Parameters after the last step."""
    optimizer_state: dict[str, Tensors] = field(default_factory=dict)
    """State after the last step: `exp_avg` and `exp_avg_sq` of AdamW, `momentum_buffer` of SGD with momentum."""
    rates: list[float] = field(default_factory=list)
    """Learning rate of each step."""


def initial_model(config: TrainerConfig) -> Transformer:
    """Return a new unsharded model with the initial weights, fp32 on the CPU."""
    return copy.deepcopy(_initial_model(config.model, config.seed))


@lru_cache(maxsize=4)
def _initial_model(config: ModelConfig, seed: int) -> Transformer:
    model = Transformer(config)
    init_weights(model, seed=seed)
    return model


def train_reference(config: TrainerConfig, *, dtype: torch.dtype, masks: Masks | None = None) -> ReferenceRun:
    """Train in one process, weights and computation in `dtype`, each step on the full global batch at once.

    If forward passes leave out blocks, or routers balance experts, each micro-batch of all ranks is one pass. Dropout
    replays `masks`, and routers the choices with them; raises ValueError if masks are missing.
    """

    def gradients(parameters: Tensors, loss_sum: Tensor, valid_tokens: int) -> tuple[float, Tensors]:
        grads = torch.autograd.grad(loss_sum / valid_tokens, list(parameters.values()))
        return float(loss_sum.detach()) / valid_tokens, dict(zip(parameters, grads, strict=True))

    return _train(initial_model(config).to(dtype), config, gradients, masks)


def summed_loss(model: Transformer, batch: Batch) -> Tensor:
    """Return the negative log-likelihood summed over the valid labels of a batch: a scalar, in fp32 or fp64.

    Logits below fp32 are raised to fp32 first. The integer model's loss is minus the labels' logits. Experts add their
    balance loss, of all tokens of the batch.
    """
    inputs, labels = batch
    logits: Tensor = model(inputs)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    valid = labels != IGNORED_LABEL
    label_logits = logits.gather(-1, labels.where(valid, 0).unsqueeze(-1)).squeeze(-1)
    normalisation = logits.logsumexp(-1) if model.config.arithmetic == "float" else 0.0
    likelihood = ((normalisation - label_logits) * valid).sum()
    return likelihood + model.balance_loss() if model.config.n_experts else likelihood


def _train(
    model: Transformer,
    config: TrainerConfig,
    gradients: Callable[[Tensors, Tensor, int], tuple[float, Tensors]],
    masks: Masks | None,
) -> ReferenceRun:
    """Training loop around a function that computes the gradients of one forward pass."""
    if config.model.dropout and masks is None:
        raise ValueError("the reference draws no masks of dropout: give those of a run")
    batches = Batches(config.data, vocab_size=config.model.vocab_size, seed=config.seed)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    run = ReferenceRun(initial={name: p.clone() for name, p in parameters.items()})
    update = _update(config.optimizer)
    for step in range(config.steps):
        batch = batches.global_batch(step)
        choices = masks.choices.get(step, ()) if masks else ()
        valid_tokens = int((batch[1] != IGNORED_LABEL).sum())
        loss, grads = 0.0, Tensors()
        passes = _passes(config, [*batch, *choices, *(masks.of(step) if masks else ())])
        for index, (inputs, labels, *own) in enumerate(passes):
            leave_out(model, config, index, step=step)
            replay_choices(model, own[: len(choices)])
            replay(model, own[len(choices) :])
            used: Tensors = {n: p for n, p in model.named_parameters() if is_computed(n, config, [index], step=step)}
            mean, terms = gradients(used, summed_loss(model, (inputs, labels)), valid_tokens)
            loss += mean
            grads |= {name: grads[name] + grad if name in grads else grad for name, grad in terms.items()}
        grads = trained(grads, config, step=step)
        run.losses.append(loss)
        run.gradients.append(grads)
        run.rates.append(learning_rate(config, step))
        run.grad_norms.append(update.clip_and_step(parameters, grads, lr=run.rates[-1]))
    run.parameters, run.optimizer_state = parameters, update.state
    return run


def _passes(config: TrainerConfig, tensors: Sequence[Tensor]) -> list[Sequence[Tensor]]:
    """Return the samples, or tokens, of each forward pass of a global batch, whose first dimension they are."""
    if not _tells_passes_apart(config):
        return [tensors]
    if config.mesh.dp_shard == "auto":
        raise ValueError("mesh.dp_shard is auto: the samples of a micro-batch follow from the number of ranks")
    ranks = [t.chunk(config.mesh.dp_replicate * config.mesh.dp_shard) for t in tensors]
    indices = range(config.accumulation)
    return [[torch.cat([own.chunk(len(indices))[index] for own in each]) for each in ranks] for index in indices]


def _tells_passes_apart(config: TrainerConfig) -> bool:
    """Return whether a step depends on the samples of each micro-batch: if passes leave out blocks, or experts.

    The balance loss of experts is that of a micro-batch, of all ranks.
    """
    return bool(config.skipped) or (config.model.n_experts > 0 and config.accumulation > 1)


def replay_updates(config: TrainerConfig, initial: Tensors, gradients: Mapping[int, Tensors]) -> ReferenceRun:
    """Clip given gradients of any dtype and apply them to `initial`, step after step, in fp64.

    The gradients of each step, by its number, are full tensors by parameter name.
    """
    parameters = {name: p.double() for name, p in initial.items()}
    run = ReferenceRun(initial={name: p.clone() for name, p in parameters.items()})
    update = _update(config.optimizer)
    for step, step_gradients in gradients.items():
        doubled = {name: grad.double() for name, grad in step_gradients.items()}
        run.gradients.append(step_gradients)
        run.rates.append(learning_rate(config, step))
        run.grad_norms.append(update.clip_and_step(parameters, doubled, lr=run.rates[-1]))
    run.parameters, run.optimizer_state = parameters, update.state
    return run


def learning_rate(config: TrainerConfig, step: int) -> float:
    """Return the learning rate of a step; that of the step after the last is the optimizer's rate at the end.

    It rises linearly during warm-up, and then falls along a quarter of cos^2 to `final_lr_fraction` in the last of
    `lr_decay_steps` steps, which are those of the run if they are not given (as arXiv:1608.03983, without restarts).
    """
    options, last = config.optimizer, (config.optimizer.lr_decay_steps or config.steps) - 1
    warm, floor = options.warmup_steps, options.final_lr_fraction
    if step < warm:
        return options.lr * (step + 1) / (warm + 1)
    fallen = min(1.0, (step - warm) / max(1, last - warm))
    return options.lr * (floor + (1.0 - floor) * math.cos(math.pi / 2 * fallen) ** 2)


def total_norm(gradients: Iterable[Tensor], *, order: float) -> float:
    """Return the p-norm over all elements of all gradients, each once, computed in fp64; `order` is p or infinity.

    Gradients have any shape and dtype.
    """
    sizes = [grad.double().abs() for grad in gradients]
    if order == math.inf:
        return max((float(size.max()) for size in sizes if size.numel()), default=0.0)
    return float(math.fsum(float(size.pow(order).sum()) for size in sizes) ** (1.0 / order))


def clip_factor(norm: float, *, max_norm: float) -> float:
    """Return the factor that scales the norm down to `max_norm`; the 1e-6 is that of torch's clip_grads_with_norm_."""
    return min(1.0, max_norm / (norm + 1e-6)) if max_norm > 0 else 1.0


def _update(config: OptimizerConfig) -> "_Update":
    return _AdamW(config) if config.name == "adamw" else _Sgd(config)


class _Update(ABC):
    """Optimizer with clipping; `state` holds its tensors by kind and parameter name."""

    def __init__(self, config: OptimizerConfig) -> None:
        self._config = config
        self.state: dict[str, Tensors] = {}

    @torch.no_grad()
    def clip_and_step(self, parameters: Tensors, gradients: Tensors, *, lr: float) -> float:
        """Clip, and change the parameters in place; returns the norm of the gradients before clipping."""
        norm = total_norm(gradients.values(), order=self._config.norm_order)
        factor = clip_factor(norm, max_norm=self._config.max_norm)
        self.step(parameters, {name: grad * factor for name, grad in gradients.items()}, lr)
        return norm

    @abstractmethod
    def step(self, parameters: Tensors, gradients: Tensors, lr: float) -> None:
        """Change the parameters in place."""


class _Sgd(_Update):
    """b <- momentum b + g + decay p, from b = 0; p <- p - lr b. Matrices decay, vectors do not."""

    def __init__(self, config: OptimizerConfig) -> None:
        super().__init__(config)
        self._buffers: Tensors = {}
        self.state = {"momentum_buffer": self._buffers} if config.momentum else {}

    def step(self, parameters: Tensors, gradients: Tensors, lr: float) -> None:
        config = self._config
        for name, p in _with_gradients(parameters, gradients):
            buffer = self._buffers.setdefault(name, torch.zeros_like(p))
            buffer.mul_(config.momentum).add_(gradients[name] + _decay(config, p) * p)
            p.sub_(lr * buffer)


class _AdamW(_Update):
    """Decoupled weight decay, arXiv:1711.05101 algorithm 2 with bias correction."""

    def __init__(self, config: OptimizerConfig) -> None:
        super().__init__(config)
        self._steps = Counter[str]()
        """Number of steps that each parameter has taken."""
        self.state = {"exp_avg": {}, "exp_avg_sq": {}}

    def step(self, parameters: Tensors, gradients: Tensors, lr: float) -> None:
        config = self._config
        self._steps.update(gradients.keys())
        for name, p in _with_gradients(parameters, gradients):
            grad, steps = gradients[name], self._steps[name]
            mean = self.state["exp_avg"].setdefault(name, torch.zeros_like(p))
            square = self.state["exp_avg_sq"].setdefault(name, torch.zeros_like(p))
            mean.mul_(config.beta1).add_(grad, alpha=1 - config.beta1)
            square.mul_(config.beta2).addcmul_(grad, grad, value=1 - config.beta2)
            corrected = square.sqrt() / (1 - config.beta2**steps) ** 0.5
            p.mul_(1 - lr * _decay(config, p))
            p.sub_(lr / (1 - config.beta1**steps) * mean / (corrected + config.eps))


def _with_gradients(parameters: Tensors, gradients: Tensors) -> list[tuple[str, Tensor]]:
    """Return the parameters that an optimizer changes: it leaves alone those without a gradient."""
    return [(name, p) for name, p in parameters.items() if name in gradients]


def _decay(config: OptimizerConfig, parameter: Tensor) -> float:
    return config.weight_decay if parameter.ndim >= 2 else 0.0


def reference_run(config: TrainerConfig, *, dtype: torch.dtype, masks: Masks | None = None) -> ReferenceRun:
    """Return the training run of one process in `dtype`, for weights as for computation.

    The run does not depend on mesh, precision, accumulation and other options that only move data, except through the
    masks of dropout; where passes differ, mesh and accumulation say which samples are in each.
    """
    return _reference(_workload(config), dtype, masks)


@lru_cache(maxsize=64)
def _reference(config: TrainerConfig, dtype: torch.dtype, masks: Masks | None) -> ReferenceRun:
    return train_reference(config, dtype=dtype, masks=masks)


def _workload(config: TrainerConfig) -> TrainerConfig:
    """Return the configuration without the options that must not change the result."""
    return msgspec.structs.replace(
        config,
        mesh=config.mesh if _tells_passes_apart(config) else MeshConfig(),
        precision="fp32",
        loss_scale=LossScaleConfig(),
        tf32=False,
        float8="none",
        reshard="default",
        memory_bytes=None,
        offload="none",
        pin_memory=False,
        sequence_parallel=True,
        norms_in_tp=True,
        loss_parallel=False,
        activation_checkpointing="none",
        compile="none",
        compiled="blocks",
        accumulation=config.accumulation if _tells_passes_apart(config) else 1,
        passes=1,
        gradient_sync="each",
        evaluation="none",
        shard_placement="rows",
        gradient_divisor=None,
        init="meta",
        checkpoint=None,
        checkpoint_reader="each-rank",
        optimizer=msgspec.structs.replace(config.optimizer, foreach_clip=True, implementation="auto"),
    )
