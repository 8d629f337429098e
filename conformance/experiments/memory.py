"""What a rank measures of memory: a step of training, in a real or a simulated world, and of a model without FSDP."""

from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from conformance.defects.catalogue import injected
from conformance.experiments.context import device_of, start_process_group
from conformance.experiments.simulation import simulated_world
from conformance.experiments.training import rank_config
from conformance.instruments.activations import GroupMarks, Groups
from conformance.instruments.allocator_snapshot import allocator_snapshot
from conformance.instruments.device_memory import ledger_of
from conformance.instruments.memory import Ledger, PhaseMarks, Segment, mark
from conformance.oracles.schedule import communicates
from conformance.oracles.torch_versions import gradients_stay, lifetimes_of
from conformance.run.devices.nvml import machine_devices
from conformance.run.ranks.messages import RankContext
from conformance.run.record import snapshot_file
from reference_trainer.config import TrainerConfig
from reference_trainer.data import Batches
from reference_trainer.init_weights import init_weights
from reference_trainer.loss import loss_context, summed_loss
from reference_trainer.mesh import build_mesh, destroy_process_group
from reference_trainer.mixed_precision import mixed_precision_policy
from reference_trainer.model import Transformer
from reference_trainer.parallel_dims import ParallelDims, resolve_mesh
from reference_trainer.parallelize import apply_ac, apply_tp
from reference_trainer.train import Trainer

_CPU = torch.device("cpu")
_MANY_STEPS = 50


def step_on_ranks(context: RankContext, payload: dict[str, Any]) -> dict[str, Any]:
    """Memory of one step after a warm one, see `_step`, on this rank of a real world."""
    config = rank_config(context, payload)
    with injected(payload["defect"]):
        device = start_process_group(context)
        with allocator_snapshot(Path(payload["kept"], snapshot_file(context.rank)), device):
            measured = _step(config, device, world_size=context.world_size)
        if context.device:
            measured["device_level_bytes"] = machine_devices().used_bytes(context.device)
        destroy_process_group()
    return measured


def step_in_simulation(_context: RankContext, payload: dict[str, Any]) -> dict[str, Any]:
    """The same on rank 0 of a simulated world of `payload["world_size"]` ranks."""
    config = msgspec.convert(payload["config"], TrainerConfig)
    with injected(payload["defect"]), simulated_world(payload["world_size"]):
        return _step(config, _CPU, world_size=payload["world_size"])


def growth_in_simulation(_context: RankContext, payload: dict[str, Any]) -> dict[str, Any]:
    """Memory of the second and of the 50th step: `first` and `last`, each as of `step_in_simulation`."""
    config = msgspec.convert(payload["config"], TrainerConfig)
    config = replace(config, steps=_MANY_STEPS)
    with injected(payload["defect"]), simulated_world(payload["world_size"]):
        trainer = _warm_trainer(config, _CPU, world_size=payload["world_size"])
        first = _measured_step(trainer, 1)
        for step in range(2, _MANY_STEPS - 1):
            trainer.train_step(step)
        return {"first": first, "last": _measured_step(trainer, _MANY_STEPS - 1)}


def _step(config: TrainerConfig, device: torch.device, *, world_size: int) -> dict[str, Any]:
    """`segments` of the phases of a step, and what the process group allocated for operators of c10d, `backend`."""
    return _measured_step(_warm_trainer(config, device, world_size=world_size), 1)


def _warm_trainer(config: TrainerConfig, device: torch.device, *, world_size: int) -> Trainer:
    """After one step: the optimizer has its state, FSDP its streams and buffers."""
    trainer = Trainer(config, device=device, world_size=world_size, observer=PhaseMarks())
    trainer.train_step(0)
    return trainer


def _measured_step(trainer: Trainer, step: int) -> dict[str, Any]:
    with ledger_of(trainer.device) as ledger:
        trainer.train_step(step)
    return {name: [msgspec.to_builtins(one) for one in getattr(ledger, name)] for name in ("segments", "backend")}


def without_fsdp(context: RankContext, payload: dict[str, Any]) -> list[dict[str, Any]]:
    """Segments of a model without FSDP, on this rank's device or on the CPU, see `segments_without_fsdp`.

    Gradients have the dtypes, and stay for later micro-batches, as they do with FSDP in this version of torch. One
    process; with tensor parallelism it is rank 0 of a simulated world of tensor-parallel ranks.
    """
    config = msgspec.convert(payload["config"], TrainerConfig)
    dims = resolve_mesh(config.mesh, world_size=payload["world_size"])
    device = device_of(context)
    with simulated_world(dims.tp):
        model = Transformer(config.model)
        init_weights(model, seed=config.seed)
        parallelize_without_fsdp(model.to(device), config, device, tp=dims.tp)
        batches = Batches(config.data, vocab_size=config.model.vocab_size, seed=config.seed)
        segments = segments_without_fsdp(model, batches, config, dims, ledger=lambda: ledger_of(device))
    return [msgspec.to_builtins(segment) for segment in segments]


def parallelize_without_fsdp(model: Transformer, config: TrainerConfig, device: torch.device, *, tp: int) -> None:
    """In place: parameters in the dtype of computation, and all that the trainer applies to a model beside FSDP."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(mixed_precision_policy(config.precision).param_dtype)
    if tp > 1:
        apply_tp(model, build_mesh(ParallelDims(dp_replicate=1, dp_shard=1, tp=tp), device)["tp"], config)
    for block in model.blocks:
        if config.activation_checkpointing != "none":
            apply_ac(block, mode=config.activation_checkpointing)


def segments_without_fsdp(
    model: Transformer, batches: Batches, config: TrainerConfig, dims: ParallelDims, *, ledger: Ledger
) -> list[Segment]:
    """Of forward, loss and backward of each micro-batch, after a warm step, marked as in `instruments.activations`.

    Gradients have the dtypes, and stay for later micro-batches, as they do with FSDP in this version of torch.
    """
    lifetimes = lifetimes_of(str(torch.__version__))
    marks = GroupMarks(_groups(model))
    micro_batches = batches.micro_batches(0, dp_rank=0, dp_size=dims.dp, accumulation=config.accumulation)
    for _warm in (True, False):
        with ledger() as found:
            for index, (inputs, labels) in enumerate(micro_batches):
                reduces, _ = communicates(config, index)
                marks.reduces = reduces
                marks.releases = reduces or not gradients_stay(config, lifetimes)
                if lifetimes.gradients_have_own_dtypes and config.implementation == "fsdp2":
                    _set_grad_dtypes(model, config, reduces=reduces)
                _forward_backward(model, marks, config, inputs, labels)
    return found.segments


def _set_grad_dtypes(model: Transformer, config: TrainerConfig, *, reduces: bool) -> None:
    """As FSDP does before backward if gradients are reduced in a wider dtype: `_set_unsharded_grad_dtypes` of torch
    2.15, torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py.

    They keep the dtype in which they are computed, and are added to those that are there. Cast at once are the first of
    several micro-batches, and those that tensor parallelism may have to reduce.
    """
    policy = mixed_precision_policy(config.precision)
    reduce_dtype = policy.reduce_dtype or torch.float32  # what 2.15 takes it for, see `oracles.dtype_policy`
    if policy.param_dtype in (None, reduce_dtype):
        return
    for parameter in model.parameters():
        first = parameter.grad is None and not reduces
        replicated = isinstance(parameter, DTensor) and any(where.is_replicate() for where in parameter.placements)
        parameter.grad_dtype = reduce_dtype if first or replicated else None


def _forward_backward(
    model: Transformer, marks: GroupMarks, config: TrainerConfig, inputs: Tensor, labels: Tensor
) -> None:
    """As the trainer's: logits and loss are there until backward is over."""
    device = model.output.weight.device
    mark("forward")
    with loss_context(parallel=config.loss_parallel and config.mesh.tp > 1):
        logits = model(inputs.to(device))
        loss = summed_loss(logits, labels.to(device), arithmetic=config.model.arithmetic)
        mark("backward")
        loss.backward()  # type: ignore[no-untyped-call]
    marks.finish_backward()
    mark("end")


def _groups(model: Transformer) -> Groups:
    """As FSDP shards them, see `oracles.schedule.groups`."""
    blocks: dict[str, list[nn.Module]] = {f"layers.{index}": [block] for index, block in enumerate(model.blocks)}
    return {"tok_embeddings": [model.tok_embeddings], **blocks, "output": [model.norm, model.output]}
