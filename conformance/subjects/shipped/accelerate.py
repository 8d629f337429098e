"""Hugging Face accelerate with its FSDP2 plugin.

Tried with accelerate 1.15.0. Without an accelerator it runs plain DDP in place of FSDP, without a warning; the first
shim below lets it take the path that it takes with GPUs. For tensor parallelism over FSDP2 it imports a class from
transformers that transformers 5.23.0 no longer has; a model whose parameters are all on the tensor-parallel mesh does
not use it. https://huggingface.co/docs/accelerate/concept_guides/fsdp1_vs_fsdp2
"""

import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, GradientAccumulationPlugin
from torch import nn
from torch.optim import Optimizer
from transformers.integrations import tensor_parallel

from conformance.subjects.cells import SubjectCell
from conformance.subjects.decorated import configured
from conformance.subjects.loop import DataGroup, scalar
from conformance.subjects.protocol import Batch, Run, StepObserver
from conformance.subjects.shipped.workload import Decoder, OfDecoder, apply_tensor_parallelism, feature_scale

SHIM = "accelerate.state.PartialState._shared_state['distributed_type'] = MULTI_GPU"
NO_ACCELERATOR = "accelerate recognises the accelerators that it has names for: this adapter runs it on the CPU"
_TP_CLASS = "ReplicateParallel"
_TP_SHIM = f"transformers.integrations.tensor_parallel.{_TP_CLASS} = object"


class WithoutShim(OfDecoder):
    """accelerate as it is on the CPU: the plugin is ignored, and DDP runs."""

    name = "accelerate-without-shim"
    shims: Sequence[str] = ()
    packages = ("accelerate",)
    efficient_loading = False

    def unsupported(self, cell: SubjectCell) -> str | None:
        """Return the reason for meshes of two dimensions, and for the meta device."""
        if cell.device != "cpu":
            return NO_ACCELERATOR
        if cell.mesh != "dp2":
            return "on its path without FSDP accelerate runs DDP"
        if cell.init == "meta":
            return "on its path without FSDP accelerate copies the model, which a model on the meta device refuses"
        return None

    def build(self, cell: SubjectCell, *, device: torch.device, max_norm: float) -> Run:
        """Prepare model and optimizer together, as accelerate's documentation does."""
        forget_state()
        self.apply_shim()
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            cpu_ram_efficient_loading=self.efficient_loading,
            mixed_precision_policy="bf16" if cell.precision == "bf16" else None,
            cpu_offload=configured(cell).offload_policy if cell.offload else None,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["FeedForward"],
        )
        tp = cell.shape.get("tp", 1)
        accelerator = Accelerator(
            cpu=True,
            fsdp_plugin=plugin,
            parallelism_config=_parallelism(cell),
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        )
        model, optimizer = self.prepare(accelerator, cell, device)
        data = DataGroup(rank=accelerator.process_index // tp, ranks=cell.data_ranks, copies=tp)
        return AccelerateRun(self, accelerator, model, optimizer, data, max_norm)

    def apply_shim(self) -> None:
        """Leave accelerate as it is."""

    def prepare(self, accelerator: Any, cell: SubjectCell, device: torch.device) -> tuple[nn.Module, Any]:
        """Make model and optimizer, on the meta device if the cell says so, and prepare both."""
        with torch.device("meta" if cell.init == "meta" else device):
            model: nn.Module = self.model(tied=cell.tied)
        if "tp" in cell.shape:
            apply_tensor_parallelism(model, accelerator.torch_device_mesh["tp"])
        model, optimizer = accelerator.prepare(model, self.make_optimizer(model.parameters()))
        if cell.init == "meta":
            materialize(model, device)
        return model, optimizer


class Accelerate(WithoutShim):
    """accelerate on the path that it takes with GPUs."""

    name = "accelerate"
    shims: Sequence[str] = (SHIM,)

    def unsupported(self, cell: SubjectCell) -> str | None:
        """Return the reason for tensor parallelism, if transformers lacks the class that accelerate imports."""
        if cell.device != "cpu":
            return NO_ACCELERATOR
        if "tp" in cell.shape and not hasattr(tensor_parallel, _TP_CLASS):
            version = importlib.metadata.version("transformers")
            return f"accelerate imports {_TP_CLASS} from transformers, and transformers {version} has none"
        return None

    def apply_shim(self) -> None:
        """Let accelerate believe that there are GPUs."""
        PartialState(cpu=True)
        apply_shim()


class AccelerateWithFix(Accelerate):
    """accelerate with an optimizer that is made of the prepared model's parameters, and with tensor parallelism."""

    name = "accelerate-with-fix"
    shims = (SHIM, _TP_SHIM)

    def unsupported(self, cell: SubjectCell) -> str | None:
        """Return None: every cell is run on processors."""
        return None if cell.device == "cpu" else NO_ACCELERATOR

    def apply_shim(self) -> None:
        """Give transformers the class that accelerate imports, too."""
        super().apply_shim()
        if not hasattr(tensor_parallel, _TP_CLASS):
            setattr(tensor_parallel, _TP_CLASS, object)

    def prepare(self, accelerator: Any, cell: SubjectCell, device: torch.device) -> tuple[nn.Module, Any]:
        """Prepare the model, materialise it, and only then make the optimizer."""
        if cell.init != "meta":
            return super().prepare(accelerator, cell, device)
        with torch.device("meta"):
            model: nn.Module = self.model(tied=cell.tied)
        # accelerate refuses to prepare a model without its optimizer: the one it returns is thrown away.
        model, _ = accelerator.prepare(model, self.make_optimizer(model.parameters()))
        materialize(model, device)
        return model, _Plain(self.make_optimizer(model.parameters()))


class EfficientLoading(AccelerateWithFix):
    """accelerate with weights that rank 0 alone loads (`cpu_ram_efficient_loading`)."""

    name = "accelerate-efficient-loading"
    efficient_loading = True

    def unsupported(self, cell: SubjectCell) -> str | None:
        """Return the reason for the meta device, where rank 0 has no weights, and for tensor parallelism."""
        if cell.device != "cpu":
            return NO_ACCELERATOR
        if cell.init == "meta":
            return "rank 0 needs the weights that it loads"
        if "tp" in cell.shape:
            return "accelerate loads shards of tensor-parallel parameters as if they were full, and raises an error"
        return None


@dataclass
class _Plain:
    """Optimizer with the attribute by which accelerate's wrapper shows it."""

    optimizer: Optimizer

    def step(self) -> None:
        self.optimizer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()


@dataclass
class AccelerateRun:
    """One rank that trains by accelerate's methods, see `protocol.Run`."""

    subject: WithoutShim
    accelerator: Any
    model: nn.Module
    wrapped: Any
    """Optimizer as accelerate returns it."""
    data: DataGroup
    max_norm: float

    @property
    def optimizer(self) -> Optimizer:
        """Optimizer of torch that accelerate has wrapped."""
        optimizer: Optimizer = self.wrapped.optimizer
        return optimizer

    @property
    def data_rank(self) -> int:
        """Index of this rank among those with different data."""
        return self.data.rank

    def save(self, directory: Path) -> None:
        """Save model and optimizer with `Accelerator.save_state`."""
        self.accelerator.save_state(str(directory))

    def load(self, directory: Path) -> None:
        """Load them with `Accelerator.load_state`."""
        self.accelerator.load_state(str(directory))

    def step(self, step: int, micro_batches: Sequence[Batch], observer: StepObserver) -> float:
        """Train a step; micro-batches before the last are in `no_sync`."""
        count = self.data.total(sum(self.subject.count(batch) for batch in micro_batches))
        loss_sum = 0.0
        for batch in micro_batches[:-1]:
            with self.accelerator.no_sync(self.model):
                loss_sum += self._backward(batch, count, observer, step)
        loss_sum += self._backward(micro_batches[-1], count, observer, step)
        observer.gradients(self.model, step=step)
        observer.phase("clip", step=step)
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.max_norm)
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
        self.accelerator.backward(loss * (self.data.ranks / count))
        return scalar(loss)


def _parallelism(cell: SubjectCell) -> ParallelismConfig | None:
    """Return the meshes of more than one dimension; FSDP alone needs no configuration."""
    if len(cell.shape) == 1:
        return None
    return ParallelismConfig(**{f"{name}_size": size for name, size in cell.shape.items()})


def apply_shim() -> None:
    """Let accelerate, whose state exists, believe that there are GPUs, while tensors stay on the CPU."""
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def materialize(model: nn.Module, device: torch.device) -> None:
    """Materialise and initialise the decoder, sharded or not."""
    model.to_empty(device=device)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding | nn.LayerNorm):
            module.reset_parameters()
        if isinstance(module, Decoder):
            with torch.no_grad():
                module.scale.copy_(feature_scale())


def forget_state() -> None:
    """Forget the state of an earlier run in this process."""
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state() if hasattr(state, "_reset_state") else state._shared_state.clear()
