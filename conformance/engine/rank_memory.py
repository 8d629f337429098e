"""What a rank measures of memory: a step of training, in a real or a simulated world, and of a model without FSDP."""

from typing import Any

import msgspec
import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import nn

from conformance.defects.catalogue import injected
from conformance.engine.rank_messages import RankContext
from conformance.engine.rank_tasks import rank_config, start_process_group
from conformance.engine.simulation import simulated_world
from conformance.instruments.activations import Groups, finish_backward, mark_groups
from conformance.instruments.memory import Ledger, PhaseMarks, Segment, mark, memory_ledger
from reference_trainer.config import TrainerConfig
from reference_trainer.data import Batches
from reference_trainer.init_weights import init_weights
from reference_trainer.loss import loss_context, summed_loss
from reference_trainer.mesh import ParallelDims, build_mesh, resolve_mesh
from reference_trainer.model import Transformer
from reference_trainer.parallelize import (
    apply_ac,
    apply_tp_to_block,
    apply_tp_to_ends,
    mixed_precision_policy,
    norm_style,
)
from reference_trainer.train import Trainer

_CPU = torch.device("cpu")
_MANY_STEPS = 50


def step_on_ranks(context: RankContext, payload: dict[str, Any]) -> dict[str, Any]:
    """Memory of one step after a warm one, see `_step`, on this rank of a real world."""
    config = rank_config(context, payload)
    with injected(payload["defect"]):
        start_process_group(context)
        measured = _step(config, world_size=context.world_size)
        dist.destroy_process_group()
    return measured


def step_in_simulation(_context: RankContext, payload: dict[str, Any]) -> dict[str, Any]:
    """The same on rank 0 of a simulated world of `payload["world_size"]` ranks."""
    config = msgspec.convert(payload["config"], TrainerConfig)
    with injected(payload["defect"]), simulated_world(payload["world_size"]):
        return _step(config, world_size=payload["world_size"])


def growth_in_simulation(_context: RankContext, payload: dict[str, Any]) -> dict[str, Any]:
    """Memory of the second and of the 50th step: `first` and `last`, each as of `step_in_simulation`."""
    config = msgspec.convert(payload["config"], TrainerConfig)
    config = replace(config, steps=_MANY_STEPS)
    with injected(payload["defect"]), simulated_world(payload["world_size"]):
        trainer = _warm_trainer(config, world_size=payload["world_size"])
        first = _measured_step(trainer, 1)
        for step in range(2, _MANY_STEPS - 1):
            trainer.train_step(step)
        return {"first": first, "last": _measured_step(trainer, _MANY_STEPS - 1)}


def _step(config: TrainerConfig, *, world_size: int) -> dict[str, Any]:
    """`segments` of the phases of a step, and what the process group allocated for operators of c10d, `backend`."""
    return _measured_step(_warm_trainer(config, world_size=world_size), 1)


def _warm_trainer(config: TrainerConfig, *, world_size: int) -> Trainer:
    """After one step: the optimizer has its state, FSDP its streams and buffers."""
    trainer = Trainer(config, device=_CPU, world_size=world_size, observer=PhaseMarks())
    trainer.train_step(0)
    return trainer


def _measured_step(trainer: Trainer, step: int) -> dict[str, Any]:
    with memory_ledger() as ledger:
        trainer.train_step(step)
    return {name: [msgspec.to_builtins(one) for one in getattr(ledger, name)] for name in ("segments", "backend")}


def without_fsdp(_context: RankContext, payload: dict[str, Any]) -> list[dict[str, Any]]:
    """Segments of a model without FSDP, see `segments_without_fsdp`.

    One process; with tensor parallelism it is rank 0 of a simulated world of tensor-parallel ranks.
    """
    config = msgspec.convert(payload["config"], TrainerConfig)
    dims = resolve_mesh(config.mesh, world_size=payload["world_size"])
    with simulated_world(dims.tp):
        model = Transformer(config.model)
        init_weights(model, seed=config.seed)
        parallelize_without_fsdp(model, config, tp=dims.tp)
        batches = Batches(config.data, vocab_size=config.model.vocab_size, seed=config.seed)
        segments = segments_without_fsdp(model, batches, config, dims, ledger=memory_ledger)
    return [msgspec.to_builtins(segment) for segment in segments]


def parallelize_without_fsdp(model: Transformer, config: TrainerConfig, *, tp: int) -> None:
    """In place: parameters in the dtype of computation, and all that the trainer applies to a model beside FSDP."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(mixed_precision_policy(config.precision).param_dtype)
    if tp > 1:
        _apply_tp(model, config, tp=tp)
    for block in model.blocks:
        if config.activation_checkpointing != "none":
            apply_ac(block, mode=config.activation_checkpointing)


def segments_without_fsdp(
    model: Transformer, batches: Batches, config: TrainerConfig, dims: ParallelDims, *, ledger: Ledger
) -> list[Segment]:
    """Of forward, loss and backward of one micro-batch, after a warm one, marked as in `instruments.activations`."""
    groups = _groups(model)
    mark_groups(groups)
    (inputs, labels), *_ = batches.micro_batches(0, dp_rank=0, dp_size=dims.dp, accumulation=config.accumulation)
    for _step in range(2):
        with ledger() as found:
            mark("forward")
            with loss_context(parallel=config.loss_parallel and dims.tp > 1):
                logits = model(inputs)
                loss = summed_loss(logits, labels, arithmetic=config.model.arithmetic)
                mark("backward")
                loss.backward()  # type: ignore[no-untyped-call]
            finish_backward(groups)
            mark("end")
        del logits, loss
    return found.segments


def _apply_tp(model: Transformer, config: TrainerConfig, *, tp: int) -> None:
    mesh = build_mesh(ParallelDims(dp_replicate=1, dp_shard=1, tp=tp), _CPU)["tp"]
    norms, sequence_parallel = norm_style(config), config.sequence_parallel
    for block in model.blocks:
        apply_tp_to_block(block, mesh, norms=norms, sequence_parallel=sequence_parallel)
    apply_tp_to_ends(model, mesh, norms=norms, sequence_parallel=sequence_parallel, loss_parallel=config.loss_parallel)


def _groups(model: Transformer) -> Groups:
    """As FSDP shards them, see `oracles.schedule.groups`."""
    blocks: dict[str, list[nn.Module]] = {f"layers.{index}": [block] for index, block in enumerate(model.blocks)}
    return {"tok_embeddings": [model.tok_embeddings], **blocks, "output": [model.norm, model.output]}
