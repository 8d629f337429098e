"""Hugging Face accelerate with its FSDP2 plugin, in a loop as its documentation has.

Tried with accelerate 1.15.0. Without an accelerator it runs plain DDP in place of FSDP, without a warning; the first
shim below lets it take the path that it takes with GPUs. For tensor parallelism over FSDP2 it imports a class from
transformers that transformers 5.23.0 no longer has; a model whose parameters are all on the tensor-parallel mesh does
not use it. https://huggingface.co/docs/accelerate/concept_guides/fsdp1_vs_fsdp2
"""

import importlib.metadata
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, GradientAccumulationPlugin
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers.integrations import tensor_parallel

from conformance.subjects.cells import SubjectCell
from conformance.subjects.data import default_count
from conformance.subjects.own_loop import LoopConfig, own_loop
from conformance.subjects.shipped.workload import (
    Decoder,
    apply_tensor_parallelism,
    decoder_loss,
    feature_scale,
    tokens_and_labels,
)

SHIM = "accelerate.state.PartialState._shared_state['distributed_type'] = MULTI_GPU"
NO_ACCELERATOR = "accelerate recognises the accelerators that it has names for: this adapter runs it on the CPU"
_TP_CLASS = "ReplicateParallel"
_TP_SHIM = f"transformers.integrations.tensor_parallel.{_TP_CLASS} = object"

judged = partial(
    own_loop,
    model=Decoder,
    tied_model=partial(Decoder, tied=True),
    loss=decoder_loss,
    batch=tokens_and_labels,
    meshes=("dp2", "hsdp2x2", "dp2-tp2"),
    precisions=("fp32", "bf16"),
    meta=True,
    offload=True,
    resumes=True,
    packages=("accelerate",),
)


def refuses_any(cell: SubjectCell) -> str | None:
    """Return the reason for accelerators."""
    return None if cell.device == "cpu" else NO_ACCELERATOR


def refuses(cell: SubjectCell) -> str | None:
    """Return the reason for tensor parallelism, if transformers lacks the class that accelerate imports."""
    if "tp" in cell.shape and not hasattr(tensor_parallel, _TP_CLASS):
        version = importlib.metadata.version("transformers")
        return f"accelerate imports {_TP_CLASS} from transformers, and transformers {version} has none"
    return refuses_any(cell)


def refuses_without_shim(cell: SubjectCell) -> str | None:
    """Return the reason for meshes of two dimensions, and for the meta device."""
    if cell.mesh != "dp2":
        return "on its path without FSDP accelerate runs DDP"
    if cell.init == "meta":
        return "on its path without FSDP accelerate copies the model, which a model on the meta device refuses"
    return refuses_any(cell)


def refuses_with_loading(cell: SubjectCell) -> str | None:
    """Return the reason for the meta device, where rank 0 has no weights, and for tensor parallelism."""
    if cell.init == "meta":
        return "rank 0 needs the weights that it loads"
    if "tp" in cell.shape:
        return "accelerate loads shards of tensor-parallel parameters as if they were full, and raises an error"
    return refuses_any(cell)


@judged(refuses=refuses, shims=(SHIM,))
def accelerate(config: LoopConfig) -> Iterator[tuple[Tensor, Tensor]]:
    """Train on the path that accelerate takes with GPUs."""
    return train(config, as_with_gpus(config))


@judged(refuses=refuses_without_shim)
def accelerate_without_shim(config: LoopConfig) -> Iterator[tuple[Tensor, Tensor]]:
    """Train with accelerate as it is on the CPU: the plugin is ignored, and DDP runs."""
    forget_state()
    return train(config, accelerator_for(config))


@judged(refuses=refuses_any, shims=(SHIM, _TP_SHIM))
def accelerate_with_fix(config: LoopConfig) -> Iterator[tuple[Tensor, Tensor]]:
    """Train with an optimizer that is made of the prepared model's parameters, and with tensor parallelism."""
    complete_transformers()
    return train(config, as_with_gpus(config), remakes_optimizer=config.on_meta)


@judged(refuses=refuses_with_loading, shims=(SHIM, _TP_SHIM))
def accelerate_efficient_loading(config: LoopConfig) -> Iterator[tuple[Tensor, Tensor]]:
    """Train with weights that rank 0 alone loads (`cpu_ram_efficient_loading`)."""
    complete_transformers()
    return train(config, as_with_gpus(config, efficient_loading=True))


def train(
    config: LoopConfig, accelerator: Accelerator, *, remakes_optimizer: bool = False
) -> Iterator[tuple[Tensor, Tensor]]:
    """Prepare model and optimizer together, train, and yield the loss and the norm of each step."""
    model = config.model()
    if "tp" in config.shape:
        apply_tensor_parallelism(model, accelerator.torch_device_mesh["tp"])
    model, optimizer = accelerator.prepare(model, config.optimizer(model.parameters()))
    if config.on_meta:
        materialize(model, config.device)
    if remakes_optimizer:
        optimizer = remade(optimizer, config, model)
    if config.load_from:
        accelerator.load_state(str(config.load_from))
    for micro_batches in config.steps:
        count = total(accelerator, sum(map(default_count, micro_batches)))
        losses = []
        for batch in micro_batches:
            with nullcontext() if batch is micro_batches[-1] else accelerator.no_sync(model):
                loss = decoder_loss(model, batch)
                accelerator.backward(loss * (accelerator.num_processes / count))
            losses.append(loss.detach())
        norm = accelerator.clip_grad_norm_(model.parameters(), config.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        yield total(accelerator, sum(losses)) / count, norm
    if config.save_to:
        accelerator.save_state(str(config.save_to))


def remade(unused: Any, config: LoopConfig, model: nn.Module) -> Optimizer:
    """Return an optimizer of the materialised parameters; accelerate refuses to prepare a model without one."""
    unused.optimizer.param_groups.clear()
    optimizer: Optimizer = config.optimizer(model.parameters())
    return optimizer


def total(accelerator: Accelerator, number: float | Tensor) -> Tensor:
    """Return the sum of a number over all ranks, those that have the same data included, in fp64."""
    summed: Tensor = accelerator.reduce(torch.as_tensor(number, dtype=torch.float64), "sum")
    return summed


def as_with_gpus(config: LoopConfig, *, efficient_loading: bool = False) -> Accelerator:
    """Return an accelerator that believes in GPUs, while tensors stay on the CPU."""
    forget_state()
    PartialState(cpu=True)
    apply_shim()
    return accelerator_for(config, efficient_loading=efficient_loading)


def accelerator_for(config: LoopConfig, *, efficient_loading: bool = False) -> Accelerator:
    """Return an accelerator for the mesh, the precision and the offloading of a configuration."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        cpu_ram_efficient_loading=efficient_loading,
        mixed_precision_policy="bf16" if config.precision == "bf16" else None,
        cpu_offload=config.offload_policy if config.offload else None,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["FeedForward"],
    )
    sizes = {f"{name}_size": size for name, size in config.shape.items()}
    return Accelerator(
        cpu=True,
        fsdp_plugin=plugin,
        parallelism_config=ParallelismConfig(**sizes) if len(sizes) > 1 else None,  # FSDP alone needs none
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
    )


def complete_transformers() -> None:
    """Give transformers the class that accelerate imports."""
    if not hasattr(tensor_parallel, _TP_CLASS):
        setattr(tensor_parallel, _TP_CLASS, object)


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
