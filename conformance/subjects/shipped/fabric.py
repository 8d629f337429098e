"""Lightning Fabric with `ModelParallelStrategy` (FSDP2), by public options alone.

Tried with lightning 2.6.6. https://lightning.ai/docs/fabric/stable/advanced/model_parallel/
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric as LightningFabric
from lightning.fabric.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.optim import Optimizer

from conformance.subjects.cells import SubjectCell
from conformance.subjects.decorated import ParallelConfig, configured
from conformance.subjects.loop import DataGroup, scalar
from conformance.subjects.protocol import Batch, Run, StepObserver
from conformance.subjects.shipped.workload import Decoder, OfDecoder, apply_tensor_parallelism, feature_scale


class Fabric(OfDecoder):
    """Fabric as it is released."""

    name = "fabric"
    shims: Sequence[str] = ()
    packages = ("lightning",)

    def unsupported(self, cell: SubjectCell) -> str | None:
        """Return the reason for HSDP, which the strategy has no option for, and for the simulated accelerator."""
        if cell.device != "cpu":
            return "Fabric has classes for the accelerators that it knows: this adapter asks for accelerator='cpu'"
        return "ModelParallelStrategy has no mesh with replicas" if "dp_replicate" in cell.shape else None

    def build(self, cell: SubjectCell, *, device: torch.device, max_norm: float) -> Run:
        """Set up model and optimizer as Fabric's documentation does."""
        config = configured(cell)

        def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
            return _sharded(model, mesh, config)

        tp = cell.shape.get("tp", 1)
        strategy = ModelParallelStrategy(
            parallelize, data_parallel_size=cell.shape["dp_shard"], tensor_parallel_size=tp
        )
        fabric = LightningFabric(accelerator="cpu", devices=cell.world_size, strategy=strategy)
        fabric.launch()
        with fabric.init_module(empty_init=config.on_meta):
            model = self.model(tied=cell.tied)
        model = fabric.setup_module(model)
        optimizer = fabric.setup_optimizers(self.make_optimizer(model.parameters()))
        rank = fabric.global_rank // tp
        data = DataGroup(rank=rank, ranks=cell.data_ranks, copies=tp)
        return FabricRun(self, fabric, model, optimizer, data, max_norm)

    def after_block(self, model: nn.Module) -> None:
        """Clean up after `no_backward_sync`: nothing to do in Fabric as it is released."""


class CompleteDecoder(Decoder):
    """Decoder that initialises its own buffer, where Fabric asks each module to initialise itself."""

    def reset_parameters(self) -> None:
        """Compute the buffer."""
        self.scale.copy_(feature_scale())


class FabricWithFix(Fabric):
    """Fabric with gradient synchronisation switched on again after `no_backward_sync`, and a model that it initialises.

    Of modules without `reset_parameters` Fabric leaves parameters and buffers uninitialised, with a warning.
    """

    name = "fabric-with-fix"

    def model(self, *, tied: bool) -> nn.Module:
        """Return the decoder."""
        return CompleteDecoder(tied=tied)

    def after_block(self, model: nn.Module) -> None:
        """Switch synchronisation on: `_FSDPNoSync.__exit__` sets `enabled`, which is False in the last micro-batch."""
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_requires_gradient_sync(True, recurse=False)


@dataclass
class FabricRun:
    """One rank that trains by Fabric's methods, see `protocol.Run`."""

    subject: Fabric
    fabric: Any
    model: nn.Module
    wrapped: Any
    """Optimizer as Fabric returns it."""
    data: DataGroup
    max_norm: float

    @property
    def optimizer(self) -> Optimizer:
        """Optimizer of torch that Fabric has wrapped."""
        optimizer: Optimizer = self.wrapped.optimizer
        return optimizer

    @property
    def data_rank(self) -> int:
        """Index of this rank among those with different data."""
        return self.data.rank

    def save(self, directory: Path) -> None:
        """Save model and optimizer with `Fabric.save`."""
        self.fabric.save(directory, {"model": self.model, "optimizer": self.wrapped})

    def load(self, directory: Path) -> None:
        """Load them with `Fabric.load`."""
        self.fabric.load(directory, {"model": self.model, "optimizer": self.wrapped})

    def step(self, step: int, micro_batches: Sequence[Batch], observer: StepObserver) -> float:
        """Train a step; only a step of several micro-batches needs `no_backward_sync`."""
        count = self.data.total(sum(self.subject.count(batch) for batch in micro_batches))
        loss_sum = 0.0
        for index, batch in enumerate(micro_batches):
            if len(micro_batches) == 1:
                loss_sum += self._backward(batch, count, observer, step)
                continue
            with self.fabric.no_backward_sync(self.model, enabled=index < len(micro_batches) - 1):
                loss_sum += self._backward(batch, count, observer, step)
            self.subject.after_block(self.model)
        observer.gradients(self.model, step=step)
        observer.phase("clip", step=step)
        norm = self.fabric.clip_gradients(self.model, self.wrapped, max_norm=self.max_norm, error_if_nonfinite=False)
        observer.clipped(self.model, norm=norm, step=step)
        observer.phase("optimizer", step=step)
        self.wrapped.step()
        self.wrapped.zero_grad()
        observer.phase("idle", step=step)
        return self.data.total(loss_sum) / count

    def _backward(self, batch: Batch, count: float, observer: StepObserver, step: int) -> float:
        observer.phase("forward", step=step)
        loss = self.subject.loss(self.model, batch)
        observer.phase("backward", step=step)
        self.fabric.backward(loss * (self.data.ranks / count))
        return scalar(loss)


def _sharded(model: Any, mesh: DeviceMesh, config: ParallelConfig) -> nn.Module:
    if mesh["tensor_parallel"].size() > 1:
        apply_tensor_parallelism(model, mesh["tensor_parallel"])
    options: dict[str, Any] = {"mp_policy": config.mixed_precision, "offload_policy": config.offload_policy}
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["data_parallel"], **options)
    fully_shard(model, mesh=mesh["data_parallel"], **options)
    return model  # type: ignore[no-any-return]
