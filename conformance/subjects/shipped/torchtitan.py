"""torchtitan's `parallelize_llama`, its mesh and its clipping, in a loop like that of its trainer.

Tried with torchtitan 0.2.2, which needs triton for its imports. https://github.com/pytorch/torchtitan
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.parallel import loss_parallel
from torch.optim import SGD, Optimizer
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.lr_scheduler import LRSchedulersContainer
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config import JobConfig
from torchtitan.config.job_config import Checkpoint
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.distributed.utils import clip_grad_norm_
from torchtitan.models.llama3.infra.parallelize import parallelize_llama
from torchtitan.models.llama3.model.args import TransformerModelArgs
from torchtitan.models.llama3.model.model import Transformer

from conformance.subjects.cells import SubjectCell
from conformance.subjects.decorated import SGD_OPTIONS
from conformance.subjects.loop import DataGroup, scalar
from conformance.subjects.protocol import Batch, Run, StepObserver
from conformance.subjects.shipped.workload import DIM, LAYERS, SEQ_LEN, VOCAB_SIZE, OfDecoder, token_loss


class Torchtitan(OfDecoder):
    """Llama 3 of torchtitan; the loss is divided by the global number of valid tokens, and FSDP divides nothing."""

    name = "torchtitan"
    shims: Sequence[str] = ("torchtitan.distributed.parallel_dims.device_type = 'cpu'",)
    packages = ("torchtitan",)

    def unsupported(self, cell: SubjectCell) -> str | None:
        """Return the reason for tied weights and for pinned memory."""
        if cell.tied:
            return "Llama 3 of torchtitan has no tied weights"
        if cell.offload:
            return "torchtitan offloads to pinned memory alone, which this adapter has not tried on an accelerator"
        return None

    def model(self, *, tied: bool) -> nn.Module:
        """Return a small Llama 3, initialised."""
        model: Any = self._new_model()
        with torch.no_grad():
            model.init_weights()
        return model  # type: ignore[no-any-return]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the summed loss."""
        return token_loss(model(batch["input_ids"]), batch["labels"])

    def build(self, cell: SubjectCell, *, device: torch.device, max_norm: float) -> Run:
        """Shard a model with its weights, or one on the meta device, which is initialised afterwards."""
        parallel_dims.device_type = device.type
        tp = cell.shape.get("tp", 1)
        dims = ParallelDims(
            dp_replicate=cell.shape.get("dp_replicate", 1),
            dp_shard=cell.shape["dp_shard"],
            cp=1,
            tp=tp,
            pp=1,
            ep=1,
            etp=1,
            world_size=cell.world_size,
        )
        with torch.device("meta" if cell.init == "meta" else device):
            model: Any = self._new_model() if cell.init == "meta" else self.model(tied=False)
        parallelize_llama(model, dims, _job_config(cell))
        for module in model.modules():
            if isinstance(module, FSDPModule) and device.type == "cpu":
                module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
        if cell.init == "meta":
            model.to_empty(device=device)
            with torch.no_grad():
                model.init_weights(buffer_device=device)
        model.train()
        data = DataGroup(rank=dist.get_rank() // tp, ranks=cell.data_ranks, copies=tp)
        optimizers = OptimizersContainer([model], SGD, SGD_OPTIONS)
        return TitanRun(self, model, optimizers, data, max_norm, is_tp=tp > 1)

    def _new_model(self) -> nn.Module:
        arguments = TransformerModelArgs(
            dim=DIM,
            n_layers=LAYERS,
            n_heads=4,
            n_kv_heads=2,
            vocab_size=VOCAB_SIZE,
            multiple_of=DIM,
            max_seq_len=SEQ_LEN,
        )
        model: nn.Module = Transformer(arguments)
        return model


def _job_config(cell: SubjectCell) -> JobConfig:
    config = JobConfig()
    config.training.seq_len = SEQ_LEN
    config.training.mixed_precision_param = "bfloat16" if cell.precision == "bf16" else "float32"
    config.training.mixed_precision_reduce = "float32"
    config.activation_checkpoint.mode = "none"
    return config


@dataclass
class TitanRun:
    """One rank that trains as torchtitan's trainer does, see `protocol.Run`: each micro-batch reduces its gradients."""

    subject: Torchtitan
    model: nn.Module
    optimizers: OptimizersContainer[SGD]
    data: DataGroup
    max_norm: float
    is_tp: bool

    @property
    def optimizer(self) -> Optimizer:
        """Optimizer of the model, which torchtitan keeps in one piece without a pipeline."""
        optimizer: Optimizer = self.optimizers.optimizers[0]
        return optimizer

    def save(self, directory: Path) -> None:
        """Save model and optimizer with torchtitan's CheckpointManager."""
        self._checkpoints(directory).save(1)

    def load(self, directory: Path) -> None:
        """Load them."""
        self._checkpoints(directory).load(1)

    def _checkpoints(self, directory: Path) -> CheckpointManager:
        schedules = LRSchedulersContainer(self.optimizers, lambda _step: 1.0)
        config = Checkpoint(enable=True, interval=1)
        return CheckpointManager(None, [self.model], self.optimizers, schedules, {}, config, None, str(directory))

    @property
    def data_rank(self) -> int:
        """Index of this rank among those with different data."""
        return self.data.rank

    def step(self, step: int, micro_batches: Sequence[Batch], observer: StepObserver) -> float:
        """Train a step."""
        count = self.data.total(sum(self.subject.count(batch) for batch in micro_batches))
        loss_sum = sum(self._backward(batch, count, observer, step) for batch in micro_batches)
        observer.gradients(self.model, step=step)
        observer.phase("clip", step=step)
        norm = clip_grad_norm_(list(self.model.parameters()), self.max_norm, foreach=True)
        observer.clipped(self.model, norm=norm, step=step)
        observer.phase("optimizer", step=step)
        self.optimizers.step()
        self.optimizers.zero_grad()
        observer.phase("idle", step=step)
        return self.data.total(loss_sum) / count

    def _backward(self, batch: Batch, count: float, observer: StepObserver, step: int) -> float:
        with loss_parallel() if self.is_tp else nullcontext():
            observer.phase("forward", step=step)
            loss = self.subject.loss(self.model, batch)
            observer.phase("backward", step=step)
            torch.autograd.backward(loss / count)
        return scalar(loss)
