"""Workload on which the laws are judged: the trainer's configuration of each cell."""

import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from msgspec.structs import replace

from conformance.plan.mesh import Mesh
from reference_trainer.checks import require
from reference_trainer.config import (
    DataConfig,
    LossScaleConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    PipelineConfig,
    TrainerConfig,
)
from reference_trainer.precision import PRECISIONS

if TYPE_CHECKING:
    from conformance.plan.cells import Cell

# Chosen so that faults show: a vocabulary that no world size divides, non-zero biases, norm weights other than 1,
# unequal numbers of valid tokens per sample.
_TINY_MODEL = ModelConfig(
    vocab_size=61,
    dim=32,
    n_layers=2,
    n_heads=8,
    n_kv_heads=4,
    ffn_dim=64,
    max_seq_len=32,
    bias=True,
    init_std=0.1,
    bias_std=0.1,
    norm_std=0.2,
)
_MODELS = {
    "tiny": _TINY_MODEL,
    "even": replace(_TINY_MODEL, vocab_size=64),
    # Over 4 and 8 data-parallel ranks some shards are smaller than others, or empty.
    "uneven": replace(_TINY_MODEL, dim=30, n_heads=5, n_kv_heads=1, ffn_dim=45),
    # Two tensor-parallel ranks have equal shards, which data-parallel ranks cannot shard evenly.
    "uneven-tp": replace(_TINY_MODEL, dim=36, n_heads=6, n_kv_heads=2, ffn_dim=50),
    "integer": replace(_TINY_MODEL, arithmetic="integer"),
    # Two or four stages of a pipeline do not all have as many layers.
    "cut": replace(_TINY_MODEL, n_layers=5),
    # In worlds of up to 1024 ranks each rank has a shard of every parameter.
    "wide": replace(
        _TINY_MODEL, vocab_size=1024, dim=1024, n_layers=4, n_heads=8, n_kv_heads=8, ffn_dim=1024, bias=False
    ),
    "deep": replace(_TINY_MODEL, dim=64, n_layers=8, ffn_dim=256),
    "half": replace(_TINY_MODEL, dim=64, n_layers=4, ffn_dim=256),
}
_DATA = DataConfig(seq_len=16, min_valid_fraction=0.25)
_GLOBAL_BATCH_SIZES = (16, 24)
"""Samples per step; the second is for three data-parallel ranks, which do not divide the first."""
# AdamW's epsilon is of the order of the gradients: with the usual 1e-8 the update is insensitive to the gradients'
# scale (a constant factor passes unseen) and infinitely sensitive to rounding where a gradient is nearly zero.
_ADAMW, _SGD = OptimizerConfig(name="adamw", lr=0.01, eps=0.001), OptimizerConfig(name="sgd", lr=0.1)
_OPTIMIZERS = {
    "adamw": _ADAMW,
    "adamw-foreach": replace(_ADAMW, implementation="foreach"),
    "adamw-fused": replace(_ADAMW, implementation="fused"),
    "sgd": _SGD,
    "sgd-momentum": replace(_SGD, momentum=0.9),
}
# The integer model is exact if all that scales is a power of two: learning rate and number of valid tokens.
_INTEGER_DATA = replace(_DATA, min_valid_fraction=1.0)
_INTEGER_LEARNING_RATE = 2.0**-4
_RESHARD: dict[str, int | dict[str, str | int]] = {
    "k2": 2,
    "table": {r"layers\.0": "never", r"layers\..*": "always", "output": "never"},
}
# Gradients of the workload overflow above 2^16 to 2^18, by seed: the last of four steps is taken from 2^19 in any case.
_LOSS_SCALE = {"fits": LossScaleConfig(initial=2.0**14, growth_interval=2)}
_LOSS_SCALE["overflows"] = replace(_LOSS_SCALE["fits"], initial=2.0**19)
_AMPLE_MEMORY_BYTES = 2**40
"""Device memory with which `auto` reshards no group."""


def trainer_config(cell: "Cell") -> TrainerConfig:
    """Return the complete configuration of a cell's run, on the CPU.

    The checkpoint that init=checkpoint loads is named relative to the run's directory. Raises UsageError for an axis
    value that can have no effect.
    """
    mesh = Mesh.parse(cell.mesh)
    loads = cell.init == "checkpoint"
    require(loads or cell.weights == "safetensors", f"cell {cell.id}: weights {cell.weights} need init checkpoint")
    require(
        cell.saved_on != "none" or cell.saving == "blocking", f"cell {cell.id}: saving {cell.saving} needs saved_on"
    )
    scales = PRECISIONS[cell.precision].scales_loss
    require(
        scales or cell.loss_scale == "fits", f"cell {cell.id}: loss_scale {cell.loss_scale} needs a precision of fp16"
    )
    require(
        cell.loss_scale == "fits" or cell.steps >= 4,
        f"cell {cell.id}: loss_scale {cell.loss_scale} needs at least 4 steps, of which the first are skipped",
    )
    for holds, problem in _effects(cell, mesh):
        require(holds, f"cell {cell.id}: {problem}")
    data = _INTEGER_DATA if cell.model == "integer" else _DATA
    return TrainerConfig(
        model=replace(_MODELS[cell.model], tied_embeddings=cell.tied_embeddings, dropout=cell.dropout),
        mesh=MeshConfig(pp=mesh.pp, dp_replicate=mesh.dp_replicate, dp_shard=mesh.dp_shard, tp=mesh.tp),
        pipeline=PipelineConfig(schedule=cell.pipeline),
        data=replace(data, global_batch_size=_global_batch_size(mesh, cell.accumulation)),
        optimizer=_optimizer(cell),
        precision=cell.precision,
        tf32=cell.tf32,
        loss_scale=_LOSS_SCALE[cell.loss_scale] if scales else LossScaleConfig(),
        reshard=_RESHARD.get(cell.reshard, cell.reshard),  # type: ignore[arg-type]
        memory_bytes=_AMPLE_MEMORY_BYTES if cell.reshard == "auto" else None,
        offload=cell.offload,
        pin_memory=cell.pin_memory,
        init=cell.init,
        checkpoint=f"initial.{cell.weights}" if loads else None,
        checkpoint_reader="rank0" if cell.weights == "rank0" else "each-rank",
        sequence_parallel=cell.sequence_parallel,
        norms_in_tp=cell.norms_in_tp,
        loss_parallel=cell.loss_parallel,
        activation_checkpointing=cell.activation_checkpointing,
        compile=compile_backend(mesh) if cell.compile else "none",
        accumulation=cell.accumulation,
        forward_prefetch=cell.forward_prefetch,
        backward_prefetch=cell.backward_prefetch,
        gradient_sync=cell.gradient_sync,
        implementation=cell.implementation,
        limit_all_gathers=cell.limit_all_gathers,
        steps=cell.steps,
        seed=cell.seed,
        device="cpu",
    )


def _effects(cell: "Cell", mesh: Mesh) -> Iterator[tuple[bool, str]]:
    """Yield what axis values need to have an effect: whether it is there, and what is missing if not."""
    heads = _MODELS[cell.model].n_kv_heads
    yield (
        cell.model != "integer" or cell.precision == "fp32",
        "model integer needs precision fp32, which holds its sums",
    )
    yield mesh.pp > 1 or cell.pipeline == "1f1b", f"pipeline {cell.pipeline} needs a mesh with a pipeline (pp)"
    if mesh.pp > 1:
        stages, layers = mesh.pp * (1 if cell.pipeline in ("1f1b", "gpipe") else 2), _MODELS[cell.model].n_layers
        yield layers >= stages, f"{stages} stages of a pipeline cannot be cut from {layers} layers"
        yield cell.accumulation >= mesh.pp, f"a pipeline over {mesh.pp} ranks needs as many micro-batches"
        yield not cell.tied_embeddings, "the trainer does not tie weights of different stages"
    yield mesh.tp > 1 or cell.sequence_parallel, "sequence_parallel false needs tensor parallelism"
    yield mesh.tp > 1 or not cell.loss_parallel, "loss_parallel needs tensor parallelism"
    yield heads % mesh.tp == 0, f"{heads} heads of keys cannot be divided among {mesh.tp} tensor-parallel ranks"
    yield (
        cell.accumulation > 1 or cell.gradient_sync == "each",
        f"gradient_sync {cell.gradient_sync} needs accumulation",
    )
    replicas = mesh.dp_replicate > 1
    yield replicas or cell.gradient_sync != "all-reduce-last", "gradient_sync all-reduce-last needs replicas (hsdp)"
    # The trainer refuses it with inductor, which devices use; a cell is to be the same everywhere.
    selective = cell.activation_checkpointing == "selective"
    yield not (cell.compile and selective), "selective activation checkpointing is not compiled by inductor"
    # torch refuses to reshard to as many ranks as there are, and to reshard DTensors of tensor parallelism: see
    # to_sharded_post_forward in torch/distributed/fsdp/_fully_shard/_fsdp_param.py.
    fewer = mesh.tp == 1 and mesh.dp_shard > 2 and mesh.dp_shard % 2 == 0
    yield fewer or cell.reshard != "k2", "reshard k2 needs a multiple of 2 above 2 of shards, and no tensor parallelism"
    yield cell.batches == "equal", f"batches {cell.batches} are for other people's trainers"
    yield cell.saved_on != cell.mesh, f"saved_on {cell.saved_on} is the mesh itself: write `same`"
    if cell.saved_on not in ("none", "same"):
        saves = Mesh.parse(cell.saved_on)
        yield heads % saves.tp == 0, f"{heads} heads of keys cannot be divided among {saves.tp} ranks that save"
        sizes = [_global_batch_size(of, cell.accumulation) for of in (saves, mesh)]
        yield (
            sizes[0] == sizes[1],
            f"saved_on {cell.saved_on} has a global batch of {sizes[0]} samples, mesh {cell.mesh} of {sizes[1]}: the "
            "trainer resumes a run with its own data only",
        )


def _global_batch_size(mesh: Mesh, accumulation: int) -> int:
    """Return the smallest of the usual sizes that the micro-batches divide; in large worlds each has one sample."""
    micro_batches = mesh.dp_replicate * mesh.dp_shard * accumulation
    return next((size for size in _GLOBAL_BATCH_SIZES if size % micro_batches == 0), micro_batches)


def _optimizer(cell: "Cell") -> OptimizerConfig:
    optimizer = replace(
        _OPTIMIZERS[cell.optimizer],
        max_norm=cell.clip,
        norm_type="inf" if cell.norm_type == "inf" else float(cell.norm_type),
        foreach_clip=cell.foreach_clip,
    )
    if cell.schedule == "cosine":
        # The same schedule for runs of any length: CKPT-2 compares with a run that ends where another one was saved.
        optimizer = replace(optimizer, warmup_steps=1, lr_decay_steps=4, final_lr_fraction=0.1)
    return replace(optimizer, lr=_INTEGER_LEARNING_RATE, weight_decay=0.0) if cell.model == "integer" else optimizer


def compile_backend(mesh: Mesh) -> Literal["inductor", "aot_eager"]:
    """Return the backend for `torch.compile` on the CPU; inductor needs a C++ compiler."""
    has_compiler = any(map(shutil.which, ("c++", "g++", "clang++")))
    return "inductor" if has_compiler and is_compiled_by_inductor(mesh) else "aot_eager"


def compiled_on_device(config: TrainerConfig) -> TrainerConfig:
    """Return the configuration of ranks that have devices of their own, where inductor compiles what is compiled."""
    return config if config.compile == "none" else replace(config, compile="inductor")


def is_compiled_by_inductor(mesh: Mesh) -> bool:
    """Return whether a machine with a C++ compiler uses inductor: on one rank.

    Each rank generates and compiles all kernels, although they depend neither on the number of ranks nor on what other
    ranks do: two ranks on two processors take 15 s, eight take 50 s. aot_eager traces and differentiates in the same
    way, in a fifth of the time.
    """
    return mesh.world_size == 1
