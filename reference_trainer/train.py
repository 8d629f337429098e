"""Trainer: build a parallel model, then repeat forward, backward, clip, step.

Reading order: checks, precision, goes_with, config, experts, model, init_weights, weights, parallel_dims, mesh,
mixed_precision, reshard, frozen, skipped, float8, parallelize, fsdp1, build, pipeline, device_attention,
context_parallel, loss, clip, optim, data, observer, this file, checkpoint, nonfinite, loop, __main__.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from reference_trainer.build import build_model
from reference_trainer.clip import clip_gradients
from reference_trainer.config import TrainerConfig
from reference_trainer.context_parallel import ContextParallel
from reference_trainer.data import Batches
from reference_trainer.float8 import precompute_scales
from reference_trainer.frozen import freeze
from reference_trainer.fsdp1 import FSDP1Model
from reference_trainer.loss import (
    LossScaler,
    count_valid_tokens,
    full_loss,
    loss_context,
    scaled_for_backward,
    sum_over,
    summed_loss,
    with_balance,
)
from reference_trainer.mesh import build_mesh, check_offload, dp_rank, set_tf32
from reference_trainer.observer import Observer
from reference_trainer.optim import build_optimizer, build_schedule
from reference_trainer.parallel_dims import ParallelDims, check_fits_mesh, resolve_mesh
from reference_trainer.parallelize import set_gradient_sync
from reference_trainer.pipeline import Pipeline, check_pipeline, gather_over_stages, held_stages
from reference_trainer.reshard import reshard_policy
from reference_trainer.skipped import skip
from reference_trainer.stopwatch import TRAINING


@dataclass(frozen=True)
class StepMetrics:
    """Metrics of one optimizer step, equal on every rank."""

    step: int
    loss: float
    """Mean over the valid tokens of the step, in nats."""
    grad_norm: float
    """Total norm before clipping."""
    valid_tokens: int
    lr: float
    loss_scale: float = 1.0
    """Factor by which the loss was multiplied in backward."""
    skipped: bool = False
    """True if gradients overflowed, so that only the scale was changed."""


class Trainer:
    """One process of a training run. The default process group must exist.

    Raises UsageError if the configuration does not fit the number of processes, or the process group's backends.
    """

    @TRAINING
    def __init__(
        self, config: TrainerConfig, *, device: torch.device, world_size: int, observer: Observer | None = None
    ) -> None:
        self.config, self.device = config, device
        self.observer = observer or Observer()
        self.dims: ParallelDims = resolve_mesh(config.mesh, world_size=world_size)
        check_fits_mesh(config, self.dims)
        check_pipeline(config, self.dims)
        check_offload(config, device)
        set_tf32(config, device)
        self.batches = Batches(config.data, vocab_size=config.model.vocab_size, seed=config.seed)
        self.mesh = build_mesh(self.dims, device)
        self.reshard = reshard_policy(config, self.dims, device)
        self.observer.reshard_policy(self.reshard.after_forward)
        stages = held_stages(config, self.dims, self.mesh)
        self.model = build_model(config, self.mesh, device, self.reshard, self.observer, stages=stages)
        self.optimizer = build_optimizer(self.model, config.optimizer)
        self.schedule = build_schedule(self.optimizer, config)
        self.scaler = LossScaler(config, device)
        self.update_scales()
        self._seed_dropout()
        self._context = ContextParallel(config, self.dims, device) if self.dims.cp > 1 else None
        self._pipeline: Pipeline | None = None
        if stages is not None:
            self._pipeline = Pipeline(
                self.model, config, self.mesh, device, loss=self._summed_loss, observer=self.observer
            )

    @TRAINING
    def train_step(self, step: int) -> StepMetrics:
        """Train one step: forward and backward over all micro-batches, unscale, clip, step."""
        observer = self.observer
        observer.phase("data", step=step)
        if self.config.frozen:
            freeze(self.model, self.config.frozen, step=step)
        micro_batches = self.batches.micro_batches(
            step,
            dp_rank=dp_rank(self.mesh) // self.dims.cp,
            dp_size=self.dims.sample_groups,
            accumulation=self.config.accumulation,
        )
        observer.batch(micro_batches, step=step)
        labels = [labels for _, labels in micro_batches]
        valid_tokens = count_valid_tokens(labels, self.mesh, self.device) // self.dims.cp
        loss_sum = self._accumulate(micro_batches, valid_tokens=valid_tokens, step=step)
        if self.scaler.is_enabled():
            observer.phase("unscale", step=step)
            self.scaler.unscale_(self.optimizer)
        observer.gradients(self.model, step=step)

        observer.phase("clip", step=step)
        norm = self._clip()
        observer.clipped(self.model, norm=norm, step=step)
        observer.phase("optimizer", step=step)
        lr = float(self.schedule.get_last_lr()[0])
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.update_scales()
        self.scaler.update()
        skipped = self.scaler.get_scale() < scale
        self.schedule.step()
        self.optimizer.zero_grad()
        observer.phase("idle", step=step)
        loss = sum_over(loss_sum, self.mesh, ("pp", "dp_replicate", "dp_shard")) / valid_tokens
        return StepMetrics(step, float(loss), float(norm), valid_tokens, lr, scale, skipped)

    def update_scales(self) -> None:
        """Compute the scales of weights that are gathered in float8; to be called when weights have changed."""
        if self.config.float8 == "tensorwise":
            precompute_scales(self.model)

    def _accumulate(self, micro_batches: list[tuple[Tensor, Tensor]], *, valid_tokens: int, step: int) -> Tensor:
        """Accumulate the gradient of the step's mean loss; returns the summed loss of this rank's micro-batches.

        In a pipeline that is zero on ranks without the last stage.
        """
        loss_sum = torch.zeros((), device=self.device)
        if self._pipeline:
            self.scaler.scale(loss_sum)  # creates the scale, also where no loss is scaled
            start = partial(self._start_of_backward, valid_tokens=valid_tokens)
            with self._loss_context():
                return loss_sum + self._pipeline.run(micro_batches, start_of_backward=start, step=step)
        waiting: list[Tensor] = []
        for index, (inputs, labels) in enumerate(micro_batches):
            if index and self.config.evaluation == "between-micro-batches":
                self._evaluate(*micro_batches[index - 1], step=step)
            set_gradient_sync(self.model, self.config.gradient_sync, last=index == len(micro_batches) - 1)
            skip(self.model, self.config.skipped, forward=step * len(micro_batches) + index)
            loss_sum += self._forward_backward(inputs, labels, waiting, valid_tokens=valid_tokens, step=step)
        return loss_sum

    @torch.no_grad()
    def _evaluate(self, inputs: Tensor, labels: Tensor, *, step: int) -> Tensor:
        """Return the summed loss of a micro-batch, without gradients and dropout."""
        self.observer.phase("evaluate", step=step)
        self.model.eval()
        with self._loss_context(), self._shards(inputs, labels) as (own_inputs, own_labels):
            loss_sum = self._summed_loss(self.model(own_inputs.to(self.device)), own_labels.to(self.device))
        self.model.train()
        return full_loss(loss_sum)

    def _forward_backward(
        self, inputs: Tensor, labels: Tensor, waiting: list[Tensor], *, valid_tokens: int, step: int
    ) -> Tensor:
        """Accumulate the gradient of the step's mean loss; returns the micro-batch's summed loss, a detached scalar.

        `inputs` and `labels` are int64 of shape (samples, seq_len). The loss joins those that are `waiting` for their
        backward; the last of `passes` runs it, and empties the list.
        """
        self.observer.phase("forward", step=step)
        with self._loss_context(), self._shards(inputs, labels) as (own_inputs, own_labels):
            logits = self.model(own_inputs.to(self.device))
            loss_sum = self._summed_loss(logits, own_labels.to(self.device))
            if self.config.model.n_experts:
                loss_sum = with_balance(loss_sum, self.model.balance_loss(), tp=self.dims.tp)
            waiting.append(loss_sum)
            if len(waiting) == self.config.passes:
                self.observer.phase("backward", step=step)
                torch.autograd.backward(
                    [self._start_of_backward(loss_sum, valid_tokens=valid_tokens) for loss_sum in waiting]
                )
                waiting.clear()
        return full_loss(loss_sum.detach())

    def _shards(self, inputs: Tensor, labels: Tensor) -> AbstractContextManager[tuple[Tensor, Tensor]]:
        """Return a context of this rank's part of inputs and labels, in which forward and backward run."""
        return self._context.shards(self.model, inputs, labels) if self._context else nullcontext((inputs, labels))

    def _loss_context(self) -> AbstractContextManager[None]:
        return loss_context(parallel=self.config.loss_parallel and self.dims.tp > 1)

    def _summed_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return summed_loss(logits, labels, arithmetic=self.config.model.arithmetic)

    def _start_of_backward(self, loss_sum: Tensor, *, valid_tokens: int) -> Tensor:
        """Return the scalar from which backward starts, from a micro-batch's summed loss."""
        divisor = self.config.gradient_divisor or self.dims.dp
        return self.scaler.scale(scaled_for_backward(loss_sum, divisor=divisor, valid_tokens=valid_tokens))

    def _clip(self) -> Tensor:
        """Clip gradients; returns the total norm before, a plain scalar."""
        options = self.config.optimizer
        if isinstance(self.model, FSDP1Model):
            return self.model.clip(max_norm=options.max_norm)
        return clip_gradients(
            self.model.parameters(),
            max_norm=options.max_norm,
            norm_type=options.norm_order,
            error_if_nonfinite=options.error_if_nonfinite,
            foreach=options.foreach_clip,
            over_stages=partial(gather_over_stages, mesh=self.mesh),
        )

    def _seed_dropout(self) -> None:
        """Seed dropout so that masks differ where activations differ, and agree where they are replicated."""
        names = self.mesh.mesh_dim_names or ()
        tp_rank = self.mesh.get_local_rank("tp") if "tp" in names and self.config.sequence_parallel else 0
        stages = [self.mesh.get_local_rank("pp")] if "pp" in names else []
        sequence = np.random.SeedSequence([self.config.seed, dp_rank(self.mesh), tp_rank, *stages])
        torch.manual_seed(int(sequence.generate_state(1, np.uint64)[0]))
