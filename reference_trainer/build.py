"""Build a parallel model with its initial weights.

Four strategies end in the same state. `meta` and `checkpoint` shard a model on the meta device and materialise only
each rank's shards. `layerwise` materialises, initialises and shards one block after the other. `full` initialises the
full model on every rank before it shards.
"""

from collections.abc import Sequence
from typing import Literal, cast

import torch
from torch.distributed.device_mesh import DeviceMesh

from reference_trainer.config import TrainerConfig
from reference_trainer.fsdp1 import FSDP1Model
from reference_trainer.init_weights import init_weights
from reference_trainer.mixed_precision import set_parameter_dtypes, torch_dtype
from reference_trainer.model import StageLayers, Transformer
from reference_trainer.observer import Observer
from reference_trainer.parallelize import apply_tp, parallelize
from reference_trainer.precision import PRECISIONS
from reference_trainer.reshard import ReshardPolicy
from reference_trainer.weights import load_weights


def build_model(
    config: TrainerConfig,
    mesh: DeviceMesh,
    device: torch.device,
    policy: ReshardPolicy,
    observer: Observer,
    *,
    stages: Sequence[StageLayers] | None = None,
) -> Transformer:
    """Build the sharded model, or `stages` of it, in training mode, with weights as `config.init` says.

    Raises UsageError for a checkpoint that cannot be loaded.
    """
    observer.phase("build", step=-1)
    match config.init:
        case "meta" | "checkpoint":
            model = _shard_first(_on_meta_device(config, stages), config, mesh, device, policy, observer)
        case "layerwise":
            model = _layer_by_layer(_on_meta_device(config, stages), config, mesh, device, policy, observer)
        case "full":
            with device:
                model = Transformer(config.model, stages)
            model = _initialise_first(model, config, mesh, device, policy, observer)
    precision = PRECISIONS[config.precision]
    if precision.build:
        model.to(torch_dtype(precision.shard))
    observer.initialized(model)
    return model.train()


def _shard_first(
    model: Transformer,
    config: TrainerConfig,
    mesh: DeviceMesh,
    device: torch.device,
    policy: ReshardPolicy,
    observer: Observer,
) -> Transformer:
    parallelize(model, mesh, config, policy)
    observer.sharded(model)
    _materialise(model, device, offload=config.offload)
    observer.materialized(model)
    if config.checkpoint is None:
        init_weights(model, seed=config.seed)
    else:
        form = load_weights(model, path=config.checkpoint, broadcast=config.checkpoint_reader == "rank0")
        observer.loaded(config.checkpoint, form)
    return model


def _materialise(model: Transformer, device: torch.device, *, offload: Literal["none", "cpu"]) -> None:
    """Materialise this rank's shards, offloaded parameters on the CPU. Buffers are never offloaded."""
    model.to_empty(device=device if offload == "none" else torch.device("cpu"))
    if model.rope_table.device.type != device.type:
        model.rope_table = torch.empty_like(model.rope_table, device=device)


def _layer_by_layer(
    model: Transformer,
    config: TrainerConfig,
    mesh: DeviceMesh,
    device: torch.device,
    policy: ReshardPolicy,
    observer: Observer,
) -> Transformer:
    for index, block in model.blocks.items():
        block.to_empty(device=device)
        observer.materialized(model)
        init_weights(model, seed=config.seed, prefix=f"layers.{index}.")
        parallelize(model, mesh, config, policy, blocks=[index], ends=False)
    for module in model.ends.values():
        module.to_empty(device=device)
    model.tie_weights()
    model.rope_table = torch.empty_like(model.rope_table, device=device)
    observer.materialized(model)
    for prefix in ("tok_embeddings.", "norm.", "output.", "rope_table"):
        init_weights(model, seed=config.seed, prefix=prefix)
    parallelize(model, mesh, config, policy, blocks=[])
    observer.sharded(model)
    return model


def _initialise_first(
    model: Transformer,
    config: TrainerConfig,
    mesh: DeviceMesh,
    device: torch.device,
    policy: ReshardPolicy,
    observer: Observer,
) -> Transformer:
    set_parameter_dtypes(model, config.precision)
    observer.materialized(model)
    init_weights(model, seed=config.seed)
    if config.implementation == "fsdp1":
        model = _wrap_in_fsdp1(model, mesh, config, device)
    else:
        parallelize(model, mesh, config, policy)
    observer.sharded(model)
    return model


def _wrap_in_fsdp1(model: Transformer, mesh: DeviceMesh, config: TrainerConfig, device: torch.device) -> Transformer:
    """Return the wrapper as the model, since it forwards every unknown attribute to the model."""
    if "tp" in (mesh.mesh_dim_names or ()):
        apply_tp(model, mesh["tp"], config)
    return cast("Transformer", FSDP1Model(model, mesh, config, device))


def _on_meta_device(config: TrainerConfig, stages: Sequence[StageLayers] | None) -> Transformer:
    with torch.device("meta"):
        model = Transformer(config.model, stages)
    set_parameter_dtypes(model, config.precision)
    return model
